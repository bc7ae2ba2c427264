"""What a system is to the load generator, and the services that frameworks' nodes call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from benchmarks.workflow_frameworks.workload import Run

TIMEOUT_S = 600.0
# As the server's own sessions, so that all find the same passages.
_SESSION = "-c hnsw.ef_search=100 -c hnsw.iterative_scan=strict_order"
_NUM_CONNECTIONS = 10  # to Postgres, as many as the server's own default


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where everything is.

    base_url: of the server, without `/v1`. database, table: the Postgres of the server's
    collections, and the table of the one with the passages. cache_salt: keeps a measurement from
    what others before it have left in any cache.
    """

    base_url: str
    search_url: str
    database: str
    table: str
    collection: str
    model: str
    embedding_model: str
    cache_salt: str

    @property
    def api_url(self) -> str:
        return f"{self.base_url}/v1"


class Workflows(Protocol):
    """One system's workflows, compiled, with open connections."""

    async def answer(self, run: Run) -> str:
        """Run one workflow; its answer. Whatever goes wrong is raised."""
        ...


class System(Protocol):
    """Opens workflows for the time of a measurement."""

    def __call__(self, addresses: Addresses) -> AbstractAsyncContextManager[Workflows]: ...


class Services:
    """Retrieval, reranking and web search, each as an application would call it directly."""

    def __init__(self, addresses: Addresses, http: httpx.AsyncClient, pool: Any) -> None:
        self._addresses = addresses
        self._http = http
        self._pool = pool
        self._nearest = (
            f"SELECT text FROM {addresses.table} ORDER BY embedding <=> %s::vector LIMIT %s"
        )

    async def nearest(self, vector: list[float], count: int) -> list[str]:
        """The passages nearest to a vector, the nearest first."""
        text = "[" + ",".join(map(str, vector)) + "]"
        async with self._pool.connection() as connection:
            cursor = await connection.execute(self._nearest, (text, count))
            return [row[0] for row in await cursor.fetchall()]

    async def rerank(self, query: str, texts: list[str], count: int) -> list[str]:
        """The best of some texts, the best first."""
        body = {
            "query": query,
            "documents": texts,
            "top_n": count,
            "return_documents": False,
            "truncate_prompt_tokens": -1,
        }
        answer = await self._http.post(f"{self._addresses.api_url}/rerank", json=body)
        answer.raise_for_status()
        return [texts[one["index"]] for one in answer.json()["results"]]

    async def web(self, query: str, count: int) -> list[str]:
        """Titles with snippets."""
        asked = {"q": query, "format": "json", "pageno": "1"}
        answer = await self._http.get(f"{self._addresses.search_url}/search", params=asked)
        answer.raise_for_status()
        return [f"{one['title']}\n{one['content']}" for one in answer.json()["results"][:count]]


def http_client() -> httpx.AsyncClient:
    """One for a whole measurement, with as many connections as are needed."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(limits=limits, timeout=TIMEOUT_S, trust_env=False)


@asynccontextmanager
async def services(addresses: Addresses) -> AsyncIterator[Services]:
    """Services with connections of their own."""
    from psycopg_pool import AsyncConnectionPool  # not needed where the server does all

    pool = AsyncConnectionPool(
        addresses.database,
        min_size=2,
        max_size=_NUM_CONNECTIONS,
        timeout=TIMEOUT_S,
        kwargs={"autocommit": True, "options": _SESSION},
        open=False,
    )
    async with http_client() as http, pool:
        yield Services(addresses, http, pool)
