"""`search`: the chunks of a collection that are nearest to a text or a vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

import numpy as np
from pydantic import Field, JsonValue, model_validator

from workflows.operators.base import JsonType, NodeContext, NodeResult
from workflows.operators.failures import invalid_params, store_failures
from workflows.operators.ingest import CollectionName
from workflows.pooled_items import PooledItems
from workflows.signature import Identity
from workflows.spec import Document
from workflows.stores.collections import CollectionStore, Found, VectorSpace

Finite = Annotated[float, Field(allow_inf_nan=False)]


class SearchParams(Document):
    """query: a text, or embedding: its vector. filter: conditions on metadata.

    model: that embeds the query; it must be the one that the collection was made with.
    min_score: leave out what scores less.
    """

    collection: CollectionName
    query: str | None = None
    embedding: (
        Annotated[list[Finite], Field(min_length=1, max_length=16_384, fail_fast=True)] | None
    ) = None
    top_k: Annotated[int, Field(ge=1, le=1000)] = 10
    filter: dict[str, JsonValue] = Field(default_factory=dict)
    min_score: float | None = None
    model: str | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.query is None) == (self.embedding is None):
            raise ValueError("give one of query and embedding")
        return self


class SearchOperator:
    """The nearest chunks, the nearest first, and the epoch of the collection in which they are."""

    name = "search"
    params = SearchParams
    resources = ("embed", "search")
    reads_own: Final = True
    outputs: Mapping[str, JsonType] = {"results": "array", "texts": "array", "epoch": "integer"}

    def __init__(self, items: PooledItems, store: CollectionStore) -> None:
        self._items = items
        self._store = store

    def identity(self, params: SearchParams) -> Identity:
        """With the number of writes that this server knows of: a search that comes after an ingest
        is not equal to one that began before it. (Where others write too, `run` says so.)"""
        content = params.model_dump(mode="json")
        num_writes = self._store.num_writes(params.collection)
        return Identity(content=[content, num_writes], is_pure=True)

    async def run(self, params: SearchParams, context: NodeContext) -> NodeResult:
        space, usage = None, {}
        if params.query is not None:
            model = await self._items.models.embedding(params.model)
            space = VectorSpace(
                embedder=model.name, revision=model.revision, dimension=model.dimension
            )
            answer = await self._items.embed(context, model, [params.query])
            vector, usage = answer.values[0], answer.usage
        else:
            with np.errstate(over="ignore"):
                vector = np.asarray(params.embedding, np.float32)
            if not np.isfinite(vector).all():
                raise invalid_params("params.embedding: a number is too large")
        with store_failures():
            async with context.job.slot("search"):
                found = await self._store.search(
                    context.tenant,
                    params.collection,
                    vector,
                    space=space,
                    top_k=params.top_k,
                    filters=params.filter,
                )
        return NodeResult(
            output=_output(found, params.min_score),
            usage=usage,
            # Others may write to a database that is shared, and nothing tells of it.
            may_be_kept=self._store.is_ours_alone,
        )


def _output(found: Found, min_score: float | None) -> dict[str, Any]:
    results = [
        {
            "id": one.id,
            "document_id": one.document_id,
            "chunk_index": one.chunk_index,
            "text": one.text,
            "score": one.score,
            "metadata": one.metadata,
        }
        for one in found.chunks
        if min_score is None or one.score >= min_score
    ]
    texts = [one["text"] for one in results]
    return {"results": results, "texts": texts, "epoch": found.epoch}
