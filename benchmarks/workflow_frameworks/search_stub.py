"""A web search engine with SearXNG's API and the latency of one.

    python -m benchmarks.workflow_frameworks.search_stub PORT SEED

The pages are TruthfulQA's questions and answers, found by shared words. A query takes a log-normal
time that depends on the query and the seed alone, so that it is the same whoever asks.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections import Counter, defaultdict

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from benchmarks.workflow_frameworks.workload import load_pages

MEDIAN_LATENCY_S = 0.35
SIGMA = 0.6
MAX_LATENCY_S = 3.0
_PAGE_SIZE = 10
_WORD = re.compile(r"[a-z0-9]+")


def latency_s(query: str, seed: int) -> float:
    """How long the search for a query takes."""
    rng = random.Random(f"{seed} {query}")
    return min(MAX_LATENCY_S, rng.lognormvariate(math.log(MEDIAN_LATENCY_S), SIGMA))


class Pages:
    """An index of words."""

    def __init__(self, pages: list[dict[str, str]]) -> None:
        self._pages = pages
        self._with_word: dict[str, set[int]] = defaultdict(set)
        for number, page in enumerate(pages):
            text = f"{page['category']} {page['question']} {page['best_answer']}"
            for word in _words(text):
                self._with_word[word].add(number)

    def find(self, query: str, page_number: int) -> list[dict[str, str]]:
        """Results of one page: those that share rare words with the query come first."""
        scores: Counter[int] = Counter()
        for word in _words(query):
            found = self._with_word.get(word, ())
            for number in found:
                scores[number] += 1 / len(found)  # type: ignore[assignment]
        ranked = sorted(scores, key=lambda number: (-scores[number], number))
        first = _PAGE_SIZE * (page_number - 1)
        return [self._result(number) for number in ranked[first : first + _PAGE_SIZE]]

    def _result(self, number: int) -> dict[str, str]:
        page = self._pages[number]
        return {
            "title": page["question"],
            "url": f"https://example.org/{page['id']}",
            "content": page["best_answer"],
        }


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))


def application(seed: int) -> Starlette:
    """`GET /search?q=…&pageno=…`, and `/health`."""
    pages = Pages(load_pages())

    async def search(request: Request) -> Response:
        query = request.query_params["q"]
        await anyio.sleep(latency_s(query, seed))
        results = pages.find(query, int(request.query_params.get("pageno", "1")))
        return JSONResponse({"query": query, "results": results})

    async def health(request: Request) -> Response:
        return PlainTextResponse("ok")

    return Starlette(routes=[Route("/search", search), Route("/health", health)])


def main() -> None:
    port, seed = (int(word) for word in sys.argv[1:])
    uvicorn.run(application(seed), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
