"""`embed`: texts to vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from workflows.operators.base import JsonType, NodeContext, NodeResult
from workflows.pooled_items import PooledItems
from workflows.scheduling.messages import Size
from workflows.signature import Identity
from workflows.spec import Document

MAX_TEXTS = 10_000


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[
    list[str],
    Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True),
    # Not a union: of several ways to be wrong, one says what is meant.
    BeforeValidator(
        _listed, json_schema_input_type=str | Annotated[list[str], Field(fail_fast=True)]
    ),
]


class EmbedParams(Document):
    """input: one text or several. model: by default the server's. truncate: cut what is too long
    for the model; without it that is an error."""

    input: Texts
    model: str | None = None
    truncate: bool = False


class EmbedOperator:
    """A vector for each text; `embedding` is the first one's."""

    name = "embed"
    params = EmbedParams
    resources = ("embed",)
    outputs: Mapping[str, JsonType] = {
        "embeddings": "array",
        "embedding": "array",
        "model": "string",
    }

    def __init__(self, items: PooledItems) -> None:
        self._items = items

    def identity(self, params: EmbedParams) -> Identity:
        """A server's models stay what they are as long as it runs."""
        return Identity(content=params.model_dump(mode="json"), is_pure=True)

    def expected_size(self, params: Any, expected_outputs: float) -> Size:
        texts = params.get("input")
        return Size(outputs=len(texts) if isinstance(texts, list) else 1)

    async def run(self, params: EmbedParams, context: NodeContext) -> NodeResult:
        model = await self._items.models.embedding(params.model)
        answer = await self._items.embed(context, model, params.input, truncate=params.truncate)
        embeddings = [vector.astype(float).tolist() for vector in answer.values]
        return NodeResult(
            output={"embeddings": embeddings, "embedding": embeddings[0], "model": model.name},
            usage=answer.usage,
            num_shared_items=answer.num_shared,
        )
