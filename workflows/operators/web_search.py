"""`web_search`: what a search engine finds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from workflows.errors import NodeFailed
from workflows.operators.base import JsonType, NodeContext, NodeResult
from workflows.signature import Identity
from workflows.spec import Document
from workflows.web_search import SearchUnavailable, TimeRange, WebQuery, WebSearch


class WebSearchParams(Document):
    """count: results at most. language: as `en` or `de-CH`. time_range: how new they must be."""

    query: Annotated[str, Field(min_length=1, max_length=2000)]
    count: Annotated[int, Field(ge=1, le=100)] = 10
    language: Annotated[str, Field(pattern=r"^[A-Za-z]{2,3}(-[A-Za-z]{2,4})?$")] | None = None
    time_range: TimeRange | None = None


class WebSearchOperator:
    """The results in the engine's order; `texts` are their snippets under their titles.

    search: None where the server has no search engine.
    """

    name = "web_search"
    params = WebSearchParams
    resources = ("web_search",)
    outputs: Mapping[str, JsonType] = {"results": "array", "texts": "array"}

    def __init__(self, search: WebSearch | None) -> None:
        self._search = search

    def identity(self, params: WebSearchParams) -> Identity:
        """One search serves all that ask while it runs; later ones ask anew, unless they say how
        old an answer may be."""
        return Identity(content=params.model_dump(mode="json"))

    async def run(self, params: WebSearchParams, context: NodeContext) -> NodeResult:
        if self._search is None:
            raise NodeFailed(
                "this server has no web search; start it with --searxng-url",
                code="not_configured",
                is_retryable=False,
            )
        query = WebQuery(
            text=params.query,
            count=params.count,
            language=params.language,
            time_range=params.time_range,
        )
        try:
            async with context.job.slot("web_search"):
                results = await self._search.search(query)
        except SearchUnavailable as error:
            raise NodeFailed(
                error.message, code="search_failed", is_retryable=error.is_retryable
            ) from None
        return NodeResult(
            output={
                "results": [
                    {"title": one.title, "url": one.url, "snippet": one.snippet} for one in results
                ],
                "texts": [f"{one.title}\n{one.snippet}".strip() for one in results],
            }
        )
