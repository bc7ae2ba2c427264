"""What is told of nodes that wait, before all that they wait for is there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from pydantic import BaseModel

from tests.workflows.fakes import echo, operators
from workflows.checked import CheckedWorkflow, check_workflow
from workflows.errors import NodeFailed
from workflows.known_prefix import MIN_CHARS
from workflows.operators.base import JsonType, NodeContext, NodeResult
from workflows.run_state import ForeseeNode, RunState
from workflows.service import WorkflowService
from workflows.signature import Identity

LONG = "Rules. " * (MIN_CHARS // 7 + 1)


class Params(BaseModel):
    prompt: str


class Reader:
    """Reads ahead for ever, as far as it is let, and writes what `work` does."""

    name = "reader"
    params = Params
    outputs: Mapping[str, JsonType] = {"text": "string"}

    def __init__(self, work: Callable[[NodeContext], Awaitable[None]] | None = None) -> None:
        self._work = work
        self.begun: list[tuple[str, str]] = []
        self.num_stopped = 0

    def identity(self, params: Params) -> Identity:
        return Identity(content=params.prompt)

    async def foresee(self, params: Mapping[str, Any], *, tenant: str) -> None:
        self.begun.append((tenant, params["messages"][0]["content"]))
        try:
            await anyio.sleep_forever()
        finally:
            self.num_stopped += 1

    async def run(self, params: Params, context: NodeContext) -> NodeResult:
        if self._work is not None:
            await self._work(context)
        return NodeResult(output={"text": params.prompt})


def workflow(reader: Reader, *nodes: dict[str, Any]) -> CheckedWorkflow:
    return check_workflow({"nodes": list(nodes)}, {**operators(), "reader": reader})


def reads(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"id": "read", "op": "reader", "params": {"prompt": prompt}, **fields}


def foreseen(state: RunState, now_s: float = 0.0) -> list[str]:
    return texts(state.foresee(now_s=now_s))


def texts(commands: list[ForeseeNode]) -> list[str]:
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


def writing(*nodes: dict[str, Any], **fields: Any) -> RunState:
    """A run in which `a` is at work, and nothing has been said of its children."""
    state = RunState(workflow(Reader(), echo("a", **fields), *nodes), {}, now_s=0.0)
    state.start(now_s=0.0)
    state.work_started("a", now_s=0.0)
    return state


def test_a_prompt_grows_with_the_text_of_a_node_that_writes() -> None:
    state = writing(reads("Check: {{ nodes.a.output.text }}"))
    assert state.is_heard("a")
    text = ""
    told: list[str] = []
    for _ in range(3 * MIN_CHARS // 10):
        text += "ten chars."
        told += texts(state.work_said("a", "ten chars.", now_s=0.0))
    assert told == [f"Check: {text[:end]}" for end in (400, 800, 1200)]
    state.work_completed("a", NodeResult(output={"text": text}), now_s=1.0)
    assert state.nodes["read"].params == {"prompt": f"Check: {text}"}


def test_a_long_prompt_is_told_again_when_it_has_grown_by_a_share() -> None:
    """So that what it costs to encode it is in proportion to what is new."""
    state = writing(reads("x" * 64_000 + "{{ nodes.a.output.text }}"))
    assert len(foreseen(state)) == 1
    sizes = [
        len(one) - 64_000
        for _ in range(20)
        for one in texts(state.work_said("a", "y" * MIN_CHARS, now_s=0.0))
    ]
    assert sizes == [4000]


def test_nobody_listens_to_a_node_without_children_that_can_begin() -> None:
    state = writing(echo("b", "{{ nodes.a.output.text }}"), reads("x {{ nodes.b.output.text }}"))
    assert not state.is_heard("a")
    assert state.is_heard("b")


@pytest.mark.parametrize(
    "fields",
    [{"retry": {"max_attempts": 2}}, {"on_error": "default", "default": {"text": "other"}}],
)
def test_what_a_failed_try_said_is_void(fields: dict[str, Any]) -> None:
    prompt = LONG + "{{ nodes.a.output.text }}{{ nodes.b.output.text }}"
    state = writing(echo("b"), reads(prompt), **fields)
    (told,) = texts(state.work_said("a", "wrong. " * MIN_CHARS, now_s=0.0))
    assert told == LONG + "wrong. " * MIN_CHARS
    error = NodeFailed("no", code="broken", is_retryable=True)
    state.work_failed("a", error, now_s=1.0)
    (told,) = foreseen(state)
    assert told.startswith(LONG)
    assert "wrong" not in told
    if "retry" in fields:
        assert state.work_said("a", "late. " * MIN_CHARS, now_s=1.0) == []
        state.work_started("a", now_s=2.0)
        (told,) = texts(state.work_said("a", "right. " * MIN_CHARS, now_s=2.0))
        assert told == LONG + "right. " * MIN_CHARS


def test_what_is_rendered_ahead_is_not_charged_to_the_run() -> None:
    state = writing(reads(LONG + "{{ nodes.a.output.text }}"))
    state.work_said("a", LONG, now_s=0.0)
    assert state.rendering.ahead.spent_s > 0
    spent_s = state.rendering.spent_s
    state.foresee(now_s=0.0)
    assert state.rendering.spent_s == spent_s


@pytest.mark.anyio
@pytest.mark.parametrize("num_runs", [1, 2])
async def test_a_prompt_is_read_while_another_node_writes_it(num_runs: int) -> None:
    """Also where equal nodes of two runs are one, and where nobody watches."""
    may_end = anyio.Event()

    async def write(context: NodeContext) -> None:
        if context.node_id == "write":
            for _ in range(3):
                context.emit(LONG)
                await anyio.lowlevel.checkpoint()
            await may_end.wait()

    reader = Reader(write)
    nodes = [
        {"id": "write", "op": "reader", "params": {"prompt": LONG * 3}},
        reads("{{ nodes.write.output.text }}"),
    ]
    async with WorkflowService() as service:
        runs = [service.submit(workflow(reader, *nodes), {}, tenant="t") for _ in range(num_runs)]
        with anyio.fail_after(5):
            await anyio.wait_all_tasks_blocked()
            expected = [("t", LONG * count) for count in (1, 2, 3) for _ in runs]
            assert sorted(reader.begun) == sorted(expected)
            # The longer one makes the shorter one needless.
            assert reader.num_stopped == 2 * num_runs
            may_end.set()
            for run in runs:
                await run.ended.wait()
    assert reader.num_stopped == 3 * num_runs
    for run in runs:
        assert run.state.outputs == {"read": {"text": LONG * 3}}
        assert "node.delta" not in [event.type for event in await run.events.after(0)]


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
