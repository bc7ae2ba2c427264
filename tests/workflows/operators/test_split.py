from __future__ import annotations

from typing import Any

import pytest

from tests.workflows.pooling_fakes import context
from workflows.errors import NodeFailed
from workflows.operators.split import SplitOperator, SplitParams

pytestmark = pytest.mark.anyio

CONTEXT = context()


async def split(text: str | list[str], **params: Any) -> list[str]:
    checked = SplitParams.model_validate({"text": text, **params})
    result = await SplitOperator().run(checked, CONTEXT)
    return list(result.output["pieces"])


async def test_pieces_end_where_the_text_does_and_are_no_longer_than_asked_for() -> None:
    pieces = await split("First one here. Second one here.\n\nA paragraph of its own.", size=35)
    assert pieces == ["First one here. Second one here.", "A paragraph of its own."]


async def test_texts_in_a_row_stay_in_order_and_empty_ones_have_no_pieces() -> None:
    assert await split(["b", "", "a"]) == ["b", "a"]
    assert await split("") == []


async def test_an_overlap_that_never_ends_is_refused() -> None:
    with pytest.raises(NodeFailed, match="overlap"):
        await split("abc", size=3, overlap=3)


async def test_more_pieces_than_a_run_should_hold_are_refused() -> None:
    with pytest.raises(NodeFailed, match="more than 100,000 pieces") as refused:
        await split("a" * 120_000, size=1)
    assert refused.value.code == "invalid_params"
