"""An operator that does what a test says, and documents made of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from workflows.checked import CheckedWorkflow, check_workflow
from workflows.operators.base import JsonType, NodeContext, NodeResult, Operator
from workflows.operators.nested import LoopOperator, MapOperator, WorkflowOperator
from workflows.operators.text import MergeOperator, SelectOperator, TemplateOperator

Work = Callable[["EchoParams", NodeContext], Awaitable[None]]


class EchoParams(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    text: str = ""
    number: float = 0.0
    items: list[Any] = []


class Echo:
    """Answers with its parameters, after doing `work`."""

    name = "echo"
    params = EchoParams
    outputs: Mapping[str, JsonType] = {"text": "string", "number": "number", "items": "array"}

    def __init__(self, work: Work | None = None) -> None:
        self._work = work

    async def run(self, params: EchoParams, context: NodeContext) -> NodeResult:
        if self._work is not None:
            await self._work(params, context)
        return NodeResult(output=params.model_dump(), usage={"tokens": len(params.text)})


def operators(work: Work | None = None) -> dict[str, Operator]:
    every: list[Operator] = [
        Echo(work),
        TemplateOperator(),
        MergeOperator(),
        SelectOperator(),
        WorkflowOperator(),
        MapOperator(),
        LoopOperator(),
    ]
    return {one.name: one for one in every}


def echo(node_id: str, text: str = "", **fields: Any) -> dict[str, Any]:
    """A node."""
    return {"id": node_id, "op": "echo", "params": {"text": text}, **fields}


def checked(*nodes: dict[str, Any], work: Work | None = None, **fields: Any) -> CheckedWorkflow:
    return check_workflow({"nodes": list(nodes), **fields}, operators(work))
