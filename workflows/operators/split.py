"""`split`: long texts in pieces that a model can take, cut where the text itself has an end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from workflows.chunking import Chunking, split_texts
from workflows.operators.base import JsonType, NodeContext, NodeResult
from workflows.operators.failures import invalid_params
from workflows.spec import Document

MAX_PIECES = 100_000


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class SplitParams(Document):
    """text: one, or several in a row. size: characters of a piece, at most.

    overlap: characters that a piece may repeat of the one before it; below size.
    """

    text: Annotated[
        Annotated[list[str], Field(max_length=10_000, fail_fast=True)],
        BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
    ]
    size: Annotated[int, Field(ge=1, le=1_000_000)] = 4000
    overlap: Annotated[int, Field(ge=0)] = 0


class SplitOperator:
    """The pieces of texts, in order: at paragraphs, else at sentences, else at words."""

    name = "split"
    params = SplitParams
    outputs: Mapping[str, JsonType] = {"pieces": "array"}

    async def run(self, params: SplitParams, context: NodeContext) -> NodeResult:
        """Raises NodeFailed."""
        if params.overlap >= params.size:
            raise invalid_params(f"params.overlap: must be below size, which is {params.size}")
        chunking = Chunking(unit="characters", size=params.size, overlap=params.overlap)
        pieces = await split_texts(params.text, chunking, None, max_pieces=MAX_PIECES)
        return NodeResult(output={"pieces": [piece for one in pieces for piece in one]})
