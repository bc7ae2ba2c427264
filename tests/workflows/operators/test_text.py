from typing import Any

import pytest

from tests.workflows.pooling_fakes import context
from workflows.operators.base import Operator
from workflows.operators.text import MergeOperator, SelectOperator, TemplateOperator

pytestmark = pytest.mark.anyio

CONTEXT = context()


async def run(operator: Operator, **params: Any) -> dict[str, Any]:
    result = await operator.run(operator.params.model_validate(params), CONTEXT)
    assert operator.outputs is not None
    assert set(result.output) == set(operator.outputs)
    return result.output


async def test_template_gives_its_value_a_name() -> None:
    assert await run(TemplateOperator(), value={"a": [1]}) == {"value": {"a": [1]}}


async def test_merge_joins_in_order() -> None:
    assert await run(MergeOperator(), lists=[[1, 2], [], [2, 3]]) == {"items": [1, 2, 2, 3]}


async def test_merge_can_drop_what_came_before() -> None:
    lists = [[{"a": 1, "b": 2}, 1], [{"b": 2, "a": 1}, "1", 1]]
    merged = await run(MergeOperator(), lists=lists, unique=True)
    assert merged == {"items": [{"a": 1, "b": 2}, 1, "1"]}


async def test_select_takes_a_part_and_a_field() -> None:
    items = [{"t": "a"}, {"t": "b"}, 3, {"t": "c"}]
    assert await run(SelectOperator(), items=items, start=1, limit=2) == {"items": [{"t": "b"}, 3]}
    assert await run(SelectOperator(), items=items, field="t") == {"items": ["a", "b", None, "c"]}
    assert await run(SelectOperator(), items=items, start=9) == {"items": []}
