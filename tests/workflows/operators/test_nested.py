"""Workflows inside nodes, run by the real service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from tests.workflows.fakes import EchoParams, Work, checked, echo, operators
from workflows.builder import WorkflowBuilder
from workflows.checked import MAX_DEPTH, check_workflow
from workflows.errors import InvalidWorkflow, NodeFailed
from workflows.operators.base import NodeContext
from workflows.service import Run, WorkflowService

pytestmark = pytest.mark.anyio


@pytest.fixture
async def service() -> AsyncIterator[WorkflowService]:
    async with WorkflowService(max_active=1, max_nested=20) as service:
        yield service


def nested(op: str, *nodes: dict[str, Any], **params: Any) -> dict[str, Any]:
    outputs = params.pop("outputs", None)
    inner: dict[str, Any] = {"nodes": list(nodes)}
    if outputs is not None:
        inner["outputs"] = outputs
    return {"id": "outer", "op": op, "params": {"workflow": inner, **params}}


async def run(
    service: WorkflowService, *nodes: dict[str, Any], work: Work | None = None, **inputs: Any
) -> Run:
    run = service.submit(checked(*nodes, work=work), inputs, tenant="t")
    with anyio.fail_after(5):
        await run.ended.wait()
    run.state.check_invariants()
    return run


async def test_a_workflow_is_a_node(service: WorkflowService) -> None:
    inner = echo("a", "{{ inputs.q }}!")
    node = nested("workflow", inner, inputs={"q": "{{ inputs.word }}"}, outputs="a")
    done = await run(service, node, echo("b", "{{ nodes.outer.output.outputs.a.text }}"), word="hi")
    assert done.state.outputs is not None
    assert done.state.outputs["b"]["text"] == "hi!"
    assert done.state.usage == {"tokens": 6}
    # Only the outermost run is one that can be asked for.
    assert service.runs(tenant="t") == [done]


async def test_map_keeps_the_order_and_runs_side_by_side(service: WorkflowService) -> None:
    at_once, most = 0, 0

    async def count(params: EchoParams, context: NodeContext) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        # Later items end first.
        await anyio.sleep(0.03 / (1 + params.number))
        at_once -= 1

    inner = {
        "id": "a",
        "op": "echo",
        "params": {"text": "{{ inputs.by }}{{ inputs.item }}", "number": "{{ inputs.index }}"},
    }
    node = nested(
        "map",
        inner,
        over="{{ inputs.words }}",
        inputs={"by": "-"},
        max_parallel=3,
        outputs={"text": "{{ nodes.a.output.text }}"},
    )
    done = await run(service, node, work=count, words=list("abcdef"))
    assert done.state.outputs is not None
    items = done.state.outputs["outer"]["items"]
    assert [item["text"] for item in items] == [f"-{letter}" for letter in "abcdef"]
    assert most == 3


async def test_one_item_that_fails_fails_the_node_and_stops_the_others(
    service: WorkflowService,
) -> None:
    stopped = []

    async def work(params: EchoParams, context: NodeContext) -> None:
        if params.text == "b":
            raise NodeFailed("no", code="broken", is_retryable=False)
        try:
            await anyio.sleep(60)
        finally:
            stopped.append(params.text)

    node = nested("map", echo("a", "{{ inputs.item }}"), over=["a", "b", "c"])
    done = await run(service, node, work=work)
    assert done.state.failure is not None
    assert done.state.failure.code == "broken"
    assert "item 1" in done.state.failure.message
    assert sorted(stopped) == ["a", "c"]


async def test_map_over_nothing_gives_nothing(service: WorkflowService) -> None:
    done = await run(service, nested("map", echo("a"), over=[]))
    assert done.state.outputs == {"outer": {"items": []}}


LOOP = {
    "id": "a",
    "op": "echo",
    "params": {"number": "{{ (inputs.previous.sum if inputs.previous else 0) + inputs.step }}"},
}


@pytest.mark.parametrize(
    ("max_rounds", "total", "rounds", "is_done"), [(10, 15, 3, True), (2, 10, 2, False)]
)
async def test_a_loop_ends_by_its_output_or_by_its_bound(
    service: WorkflowService, max_rounds: int, total: float, rounds: int, is_done: bool
) -> None:
    outputs = {"sum": "{{ nodes.a.output.number }}", "done": "{{ nodes.a.output.number >= 12 }}"}
    node = nested("loop", LOOP, inputs={"step": 5}, max_rounds=max_rounds, outputs=outputs)
    done = await run(service, node)
    assert done.state.outputs is not None
    loop = done.state.outputs["outer"]
    assert (loop["outputs"]["sum"], loop["rounds"], loop["done"]) == (total, rounds, is_done)


async def test_cancelling_the_run_stops_what_is_inside(service: WorkflowService) -> None:
    stopped = []

    async def work(params: EchoParams, context: NodeContext) -> None:
        try:
            await anyio.sleep(60)
        finally:
            stopped.append(params.text)

    inner = nested("map", echo("a", "{{ inputs.item }}"), over=["x", "y"])
    node = nested("workflow", {**inner, "id": "inner"})
    outer = service.submit(checked(node, work=work), {}, tenant="")
    await anyio.wait_all_tasks_blocked()
    service.cancel(outer)
    with anyio.fail_after(5):
        await outer.ended.wait()
        await anyio.wait_all_tasks_blocked()
    assert sorted(stopped) == ["x", "y"]


async def test_runs_inside_are_bounded_all_together(service: WorkflowService) -> None:
    inner = nested("map", echo("a"), over=list(range(6)))
    node = nested("map", {**inner, "id": "inner"}, over=list(range(4)))
    done = await run(service, node)
    assert done.state.failure is not None
    assert done.state.failure.code == "too_many_runs"


async def test_inputs_that_the_inner_workflow_does_not_take_fail_the_node(
    service: WorkflowService,
) -> None:
    node = nested("workflow", echo("a"), inputs={})
    node["params"]["workflow"]["input_schema"] = {"required": ["q"]}
    done = await run(service, node)
    assert done.state.failure is not None
    assert done.state.failure.code == "invalid_input"


async def test_what_an_inner_workflow_declares_is_all_that_is_added_for_it(
    service: WorkflowService,
) -> None:
    each, again = WorkflowBuilder(), WorkflowBuilder()
    each.node("echo", id="a", text=each.input("item"))
    number = again.input("round", {"type": "integer"})
    again.output(done=f"{{{{ {number.expression} == 1 }}}}")
    again.node("echo", id="a", text=f"round {number}")
    flow = WorkflowBuilder()
    flow.node("map", id="each", workflow=each, over=["x", "y"])
    flow.node("loop", id="again", workflow=again)
    run = service.submit(flow.check(operators()), {}, tenant="t")
    await run.ended.wait()
    assert run.state.outputs is not None
    texts = [one["a"]["text"] for one in run.state.outputs["each"]["items"]]
    assert texts == ["x", "y"]
    assert run.state.outputs["again"]["rounds"] == 2


def test_the_inner_workflow_is_checked_with_its_path() -> None:
    inner = nested("workflow", echo("a", "{{ nodes.zz.output }}", nope=1))
    with pytest.raises(InvalidWorkflow) as caught:
        check_workflow({"nodes": [echo("x"), inner]}, operators())
    assert {one.path for one in caught.value.problems} == {
        "nodes.1.params.workflow.nodes.0.nope",
    }


def test_the_inner_workflow_does_not_see_the_outer_nodes() -> None:
    inner = nested("workflow", echo("a", "{{ nodes.x.output }}"))
    with pytest.raises(InvalidWorkflow) as caught:
        check_workflow({"nodes": [echo("x"), inner]}, operators())
    (problem,) = caught.value.problems
    assert problem.path == "nodes.1.params.workflow.nodes.0.params.text"


def test_workflows_nest_only_so_deep() -> None:
    node = echo("a")
    for _ in range(MAX_DEPTH):
        node = nested("workflow", node)
    with pytest.raises(InvalidWorkflow, match="deep"):
        check_workflow({"nodes": [node]}, operators())
    check_workflow({"nodes": [node["params"]["workflow"]["nodes"][0]]}, operators())
