"""Search engines, and the one that is bundled: any with SearXNG's JSON API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol
from urllib.parse import urlencode

import orjson

from workflows.outbound.client import OutboundAnswer, OutboundClient, OutboundRequest
from workflows.outbound.errors import OutboundError, Refused

TimeRange = Literal["day", "week", "month", "year"]

_MAX_PAGES: Final = 5
_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WebQuery:
    """count: results at most."""

    text: str
    count: int = 10
    language: str | None = None
    time_range: TimeRange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WebResult:
    """One page. snippet: some of its text, possibly none."""

    title: str
    url: str
    snippet: str


class SearchUnavailable(Exception):
    """The search engine gave no answer that can be used."""

    def __init__(self, message: str, *, is_retryable: bool) -> None:
        super().__init__(message)
        self.message = message
        self.is_retryable = is_retryable


class WebSearch(Protocol):
    """A search engine."""

    async def search(self, query: WebQuery) -> list[WebResult]:
        """The best first. Raises SearchUnavailable."""
        ...


class SearxngSearch:
    """A SearXNG server, or what answers like one.

    url: its address, as `http://127.0.0.1:8080`. client: may connect there.
    """

    def __init__(self, url: str, client: OutboundClient) -> None:
        self._url = url.rstrip("/")
        self._client = client

    async def search(self, query: WebQuery) -> list[WebResult]:
        """Asks for page after page until there are enough; the same address counts once."""
        found: dict[str, WebResult] = {}
        for page in range(1, _MAX_PAGES + 1):
            results = await self._page(query, page)
            num_before = len(found)
            for one in results:
                found.setdefault(one.url, one)
            if len(found) >= query.count or len(found) == num_before:
                break
        return list(found.values())[: query.count]

    async def _page(self, query: WebQuery, number: int) -> list[WebResult]:
        asked = {"q": query.text, "format": "json", "pageno": str(number)}
        if query.language is not None:
            asked["language"] = query.language
        if query.time_range is not None:
            asked["time_range"] = query.time_range
        request = OutboundRequest(
            url=f"{self._url}/search?{urlencode(asked)}",
            headers={"Accept": "application/json"},
            timeout_s=_TIMEOUT_S,
        )
        try:
            answer = await self._client.send(request)
        except OutboundError as error:
            raise SearchUnavailable(
                f"the search engine gave no answer: {error.message}",
                is_retryable=not isinstance(error, Refused),
            ) from None
        return _results(answer)


def _results(answer: OutboundAnswer) -> list[WebResult]:
    """Raises SearchUnavailable."""
    if answer.status == 403:
        raise SearchUnavailable(
            "the search engine refuses (403); SearXNG needs json among search.formats in its "
            "settings.yml",
            is_retryable=False,
        )
    if answer.status != 200:
        is_transient = answer.status >= 500 or answer.status == 429
        raise SearchUnavailable(
            f"the search engine answers with {answer.status}", is_retryable=is_transient
        )
    try:
        entries: Any = orjson.loads(answer.body)["results"]
        return [
            WebResult(
                title=str(entry.get("title") or ""),
                url=str(entry["url"]),
                snippet=str(entry.get("content") or ""),
            )
            for entry in entries
            if entry.get("url")
        ]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise SearchUnavailable(
            "the search engine's answer is not that of SearXNG's JSON API", is_retryable=False
        ) from None
