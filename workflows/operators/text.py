"""Operators that only rearrange what is there: template, merge, select."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from pydantic import Field

from workflows.operators.base import JsonType, NodeContext, NodeResult
from workflows.spec import Document


class TemplateParams(Document):
    """value: any JSON; its strings are templates, as everywhere."""

    value: Any


class TemplateOperator:
    """Gives its rendered parameter a name, for nodes that share it."""

    name = "template"
    params = TemplateParams
    outputs: Mapping[str, JsonType] = {"value": "any"}

    async def run(self, params: TemplateParams, context: NodeContext) -> NodeResult:
        return NodeResult(output={"value": params.value})


class MergeParams(Document):
    """lists: joined in order. unique: of equal items only the first stays."""

    lists: Annotated[list[list[Any]], Field(fail_fast=True)]
    unique: bool = False


class MergeOperator:
    """Joins lists."""

    name = "merge"
    params = MergeParams
    outputs: Mapping[str, JsonType] = {"items": "array"}

    async def run(self, params: MergeParams, context: NodeContext) -> NodeResult:
        items: list[Any] = [item for one in params.lists for item in one]
        if params.unique:
            first: dict[bytes, Any] = {}
            for item in items:
                first.setdefault(_identity(item), item)
            items = list(first.values())
        return NodeResult(output={"items": items})


class SelectParams(Document):
    """items from `start` on, at most `limit`. field: of each item, in place of the item."""

    items: list[Any]
    start: Annotated[int, Field(ge=0)] = 0
    limit: Annotated[int, Field(ge=0)] | None = None
    field: str | None = None


class SelectOperator:
    """Takes a part of a list."""

    name = "select"
    params = SelectParams
    outputs: Mapping[str, JsonType] = {"items": "array"}

    async def run(self, params: SelectParams, context: NodeContext) -> NodeResult:
        end = None if params.limit is None else params.start + params.limit
        items: list[Any] = params.items[params.start : end]
        if params.field is not None:
            items = [item.get(params.field) if isinstance(item, dict) else None for item in items]
        return NodeResult(output={"items": items})


def _identity(item: Any) -> bytes:
    """Equal for equal JSON values, whatever the order of keys."""
    return orjson.dumps(item, option=orjson.OPT_SORT_KEYS)
