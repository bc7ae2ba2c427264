"""What is told of nodes that wait, before all that they wait for is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import pytest
from pydantic import BaseModel

from tests.workflows.fakes import echo, operators
from workflows.checked import CheckedWorkflow, check_workflow
from workflows.known_prefix import MIN_CHARS
from workflows.operators.base import JsonType, NodeContext, NodeResult
from workflows.run_state import ForeseeNode, RunState
from workflows.service import WorkflowService

LONG = "Rules. " * (MIN_CHARS // 7 + 1)


class Params(BaseModel):
    prompt: str


class Reader:
    """Reads ahead for ever, as far as it is let."""

    name = "reader"
    params = Params
    outputs: Mapping[str, JsonType] = {"text": "string"}

    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []
        self.num_stopped = 0

    async def foresee(self, params: Mapping[str, Any], *, tenant: str) -> None:
        self.begun.append((tenant, params["messages"][0]["content"]))
        try:
            await anyio.sleep_forever()
        finally:
            self.num_stopped += 1

    async def run(self, params: Params, context: NodeContext) -> NodeResult:
        return NodeResult(output={"text": params.prompt})


def workflow(reader: Reader, *nodes: dict[str, Any]) -> CheckedWorkflow:
    return check_workflow({"nodes": list(nodes)}, {**operators(), "reader": reader})


def reads(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"id": "read", "op": "reader", "params": {"prompt": prompt}, **fields}


def foreseen(state: RunState, now_s: float = 0.0) -> list[str]:
    commands = state.foresee(now_s=now_s)
    assert all(isinstance(one, ForeseeNode) for one in commands)
    return [str(one.params["messages"][0]["content"]) for one in commands]


def test_each_beginning_is_told_once_and_again_when_it_has_grown() -> None:
    prompt = LONG + "{{ nodes.a.output.text }}" + "{{ nodes.b.output.text }}"
    state = RunState(workflow(Reader(), echo("a"), echo("b"), reads(prompt)), {}, now_s=0.0)
    state.start(now_s=0.0)
    assert foreseen(state) == [LONG]
    assert foreseen(state) == []
    state.work_started("a", now_s=0.0)
    state.work_completed("a", NodeResult(output={"text": LONG}), now_s=1.0)
    assert foreseen(state) == [LONG + LONG]
    state.work_started("b", now_s=0.0)
    state.work_completed("b", NodeResult(output={"text": "end"}), now_s=2.0)
    assert foreseen(state) == []


@pytest.mark.parametrize(
    "node",
    [
        reads("short {{ nodes.a.output.text }}"),
        reads("{{ nodes.a.output.text }}" + LONG),
        reads(LONG + "{{ nodes.a.output.text }}", when="nodes.a.output.text == 'x'"),
        reads(LONG + "{{ inputs.missing }}{{ nodes.a.output.text }}"),
        reads(LONG),
    ],
    ids=["short", "unknown", "perhaps not at all", "fails", "ready"],
)
def test_what_is_short_unsure_or_ready_is_not_told(node: dict[str, Any]) -> None:
    state = RunState(workflow(Reader(), echo("a"), node), {}, now_s=0.0)
    state.start(now_s=0.0)
    assert foreseen(state) == []


@pytest.mark.anyio
async def test_reading_ahead_ends_with_the_run_and_never_holds_it_up() -> None:
    reader = Reader()
    prompt = LONG + "{{ nodes.a.output.text }}"
    async with WorkflowService() as service:
        run = service.submit(workflow(reader, echo("a", "x"), reads(prompt)), {}, tenant="t")
        with anyio.fail_after(5):
            await run.ended.wait()
    assert run.state.outputs == {"read": {"text": f"{LONG}x"}}
    assert reader.begun == [("t", LONG)]
    assert reader.num_stopped == 1
