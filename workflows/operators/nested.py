"""Operators whose work is a workflow of its own: once, for each item of a list, or repeatedly.

The inner workflow stands literally in the parameters: its templates see its own `inputs` and
`nodes` only. Its nodes share equal work as all others do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import anyio
from pydantic import Field

from workflows.errors import NodeFailed
from workflows.operators.base import JsonType, NodeContext, NodeResult
from workflows.spec import Document

MAX_ITEMS = 1000
MAX_ITERATIONS = 100


class WorkflowParams(Document):
    """workflow: a document, checked with the one around it. inputs: its inputs."""

    workflow: dict[str, Any]
    inputs: dict[str, Any] = Field(default_factory=dict)


class WorkflowOperator:
    """Runs a workflow as one node."""

    name = "workflow"
    params = WorkflowParams
    outputs: Mapping[str, JsonType] = {"outputs": "object"}
    nested_param = "workflow"

    async def run(self, params: WorkflowParams, context: NodeContext) -> NodeResult:
        inner = await context.run_nested(params.inputs, {}, "")
        return NodeResult(output={"outputs": inner.output}, usage=inner.usage)


class MapParams(Document):
    """over: the items; each is `inputs.item` of a run of its own, its position `inputs.index`.

    inputs: the same for all. max_parallel: runs at once.
    """

    workflow: dict[str, Any]
    over: Annotated[list[Any], Field(max_length=MAX_ITEMS)]
    inputs: dict[str, Any] = Field(default_factory=dict)
    max_parallel: Annotated[int, Field(ge=1, le=256)] = 16


class MapOperator:
    """Runs a workflow for each item of a list; the outputs stand in the order of the items."""

    name = "map"
    params = MapParams
    outputs: Mapping[str, JsonType] = {"items": "array"}
    nested_param = "workflow"

    async def run(self, params: MapParams, context: NodeContext) -> NodeResult:
        outputs: list[Any] = [None] * len(params.over)
        usage: dict[str, int] = {}
        failure: NodeFailed | None = None
        seats = anyio.CapacityLimiter(params.max_parallel)

        async def one(index: int) -> None:
            nonlocal failure
            async with seats:
                added = {"item": params.over[index], "index": index}
                try:
                    inner = await context.run_nested(params.inputs, added, str(index))
                except NodeFailed as error:
                    failure = failure or _of_item(error, index)
                    tasks.cancel_scope.cancel()
                    return
                outputs[index] = inner.output
                _add(usage, inner.usage)

        async with anyio.create_task_group() as tasks:
            for index in range(len(params.over)):
                tasks.start_soon(one, index)
        if failure is not None:
            raise failure
        return NodeResult(output={"items": outputs}, usage=usage)


class LoopParams(Document):
    """Each round gets `inputs`, the outputs of the round before as `inputs.previous` (null at
    first) and its number from 0 as `inputs.round`.

    until: the output that ends the loop when it is true.
    """

    workflow: dict[str, Any]
    inputs: dict[str, Any] = Field(default_factory=dict)
    until: str = "done"
    max_rounds: Annotated[int, Field(ge=1, le=MAX_ITERATIONS)] = 10


class LoopOperator:
    """Runs a workflow until one of its outputs is true, a bounded number of times."""

    name = "loop"
    params = LoopParams
    feeds_back: Final = True
    outputs: Mapping[str, JsonType] = {"outputs": "object", "rounds": "integer", "done": "boolean"}
    nested_param = "workflow"

    async def run(self, params: LoopParams, context: NodeContext) -> NodeResult:
        previous: dict[str, Any] | None = None
        usage: dict[str, int] = {}
        is_done, num_rounds = False, 0
        while not is_done and num_rounds < params.max_rounds:
            added = {"previous": previous, "round": num_rounds}
            inner = await context.run_nested(params.inputs, added, str(num_rounds))
            previous = inner.output
            is_done = bool(previous.get(params.until))
            num_rounds += 1
            _add(usage, inner.usage)
        output = {"outputs": previous, "rounds": num_rounds, "done": is_done}
        return NodeResult(output=output, usage=usage)


def _of_item(error: NodeFailed, index: int) -> NodeFailed:
    return NodeFailed(
        f"item {index}: {error.message}", code=error.code, is_retryable=error.is_retryable
    )


def _add(total: dict[str, int], usage: Mapping[str, int]) -> None:
    for name, count in usage.items():
        total[name] = total.get(name, 0) + count
