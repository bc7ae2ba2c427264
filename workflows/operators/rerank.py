"""`rerank`: documents in the order of their relevance to a query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, JsonValue

from workflows.operators.base import JsonType, NodeContext, NodeResult
from workflows.operators.failures import invalid_params
from workflows.pooled_items import PooledItems
from workflows.signature import Identity
from workflows.spec import Document

MAX_DOCUMENTS = 10_000


class RerankParams(Document):
    """documents: texts, or objects with a `text`, such as the results of a search.

    top_n: how many to keep; all by default. min_score: leave out what scores less.
    """

    query: str
    documents: Annotated[list[JsonValue], Field(max_length=MAX_DOCUMENTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    min_score: float | None = None
    model: str | None = None
    truncate: bool = False


class RerankOperator:
    """The best first; equally good ones in the order in which they came."""

    name = "rerank"
    params = RerankParams
    resources = ("rerank",)
    outputs: Mapping[str, JsonType] = {
        "results": "array",
        "documents": "array",
        "texts": "array",
        "model": "string",
    }

    def __init__(self, items: PooledItems) -> None:
        self._items = items

    def identity(self, params: RerankParams) -> Identity:
        """A server's models stay what they are as long as it runs."""
        return Identity(content=params.model_dump(mode="json"), is_pure=True)

    async def run(self, params: RerankParams, context: NodeContext) -> NodeResult:
        texts = [_text(place, one) for place, one in enumerate(params.documents)]
        model = await self._items.models.scoring(params.model)
        pairs = [(params.query, text) for text in texts]
        answer = await self._items.score(context, model, pairs, truncate=params.truncate)
        scores = answer.values
        order = sorted(range(len(texts)), key=lambda place: -scores[place])[: params.top_n]
        if params.min_score is not None:
            order = [place for place in order if scores[place] >= params.min_score]
        results: list[dict[str, Any]] = [
            {"index": place, "score": scores[place], "document": params.documents[place]}
            for place in order
        ]
        return NodeResult(
            output={
                "results": results,
                "documents": [one["document"] for one in results],
                "texts": [texts[place] for place in order],
                "model": model.name,
            },
            usage=answer.usage,
            num_shared_items=answer.num_shared,
        )


def _text(place: int, document: JsonValue) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise invalid_params(f"params.documents.{place}: must be a text, or an object with one")
    return text
