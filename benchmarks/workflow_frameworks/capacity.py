"""What the server does per second of each kind of work alone, with all of it at hand at once."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any

import anyio
import httpx

from benchmarks.processes import BenchmarkError
from benchmarks.workflow_frameworks import tasks
from benchmarks.workflow_frameworks.bound import Work
from benchmarks.workflow_frameworks.systems.base import Addresses, http_client
from benchmarks.workflow_frameworks.systems.shuntyard import document
from benchmarks.workflow_frameworks.workload import Run

_PAIRS_AT_ONCE = 64
_NUM_PAIR_REQUESTS = 4
_RANKED = {"rag": (), "rag_rerank": ("find",), "web": (), "research": tasks.SOURCES}
_PASSAGE_NODE = {"rag": "find", "rag_rerank": "best", "web": "find"}
_Nodes = dict[str, dict[str, Any]]


async def measure_capacity(addresses: Addresses, runs: Sequence[Run]) -> Work:
    """Calls, texts and pairs per second, of the very work that these runs make.

    Pairs are those of the runs' lists; one that is in several lists of a run is scored once.

    Raises BenchmarkError, httpx.HTTPError.
    """
    async with http_client() as http:
        done = await _all([_workflow(http, addresses, run) for run in runs])
        bodies = [
            body | {"cache_salt": secrets.token_hex(8)}
            for run, nodes in zip(runs, done, strict=True)
            for body in chat_bodies(run, nodes, addresses.model)
        ]
        queries = list({run.question for run in runs})
        listed = [_candidates(run, nodes) for run, nodes in zip(runs, done, strict=True)]
        candidates = [text for texts in listed for text in dict.fromkeys(texts)]
        if not candidates:
            raise BenchmarkError("no run has anything to rank")
        embedding = {"model": addresses.embedding_model, "input": queries}
        chats_s = await _time_s([_post(http, addresses, "/chat/completions", b) for b in bodies])
        embeddings_s = await _time_s([_post(http, addresses, "/embeddings", embedding)])
        pairs = list(_pair_bodies(queries[0], candidates))
        pairs_s = await _time_s([_post(http, addresses, "/rerank", body) for body in pairs])
    num_listed = sum(map(len, listed))
    return Work(
        chats=len(bodies) / chats_s,
        embeddings=len(queries) / embeddings_s,
        pairs=num_listed / len(candidates) * sum(len(one["documents"]) for one in pairs) / pairs_s,
    )


def chat_bodies(run: Run, nodes: _Nodes, model: str) -> Iterator[dict[str, Any]]:
    """The chat requests of a run whose nodes have these outputs."""
    if run.kind == "research":
        passages = tasks.excerpts(
            [nodes[f"best_{name}"]["output"]["texts"] for name in tasks.SOURCES]
        )
        max_tokens = tasks.SHORT_ANSWER_MAX_TOKENS
    else:
        passages = nodes[_PASSAGE_NODE[run.kind]]["output"]["texts"]
        max_tokens = tasks.ANSWER_MAX_TOKENS
    if run.kind == "web":
        query = _chat(model, tasks.QUERY_SYSTEM, run.question, tasks.QUERY_MAX_TOKENS)
        yield query | {"stop": [tasks.QUERY_STOP]}
    user = tasks.answer_user(run.question, passages)
    yield _chat(model, tasks.ANSWER_SYSTEM, user, max_tokens)


def _chat(model: str, system: str, user: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}


def _candidates(run: Run, nodes: _Nodes) -> list[str]:
    """What a run gave to its rerankers."""
    return [text for name in _RANKED[run.kind] for text in nodes[name]["output"]["texts"]]


def _pair_bodies(query: str, candidates: list[str]) -> Iterator[dict[str, Any]]:
    for number in range(_NUM_PAIR_REQUESTS):
        start = number * _PAIRS_AT_ONCE % len(candidates)
        documents = candidates[start : start + _PAIRS_AT_ONCE]
        yield {"query": query, "documents": documents, "truncate_prompt_tokens": -1}


async def _workflow(http: httpx.AsyncClient, addresses: Addresses, run: Run) -> _Nodes:
    inputs = {"question": run.question, "topic": run.topic}
    body = document(run.kind, addresses) | {"inputs": inputs}
    finished = await _post(http, addresses, "/workflows", body)
    if finished["status"] != "completed":
        raise BenchmarkError(f"a run ended as {finished['status']}: {finished['error']}")
    return dict(finished["nodes"])


async def _post(http: httpx.AsyncClient, addresses: Addresses, path: str, body: Any) -> Any:
    answer = await http.post(f"{addresses.api_url}{path}", json=body)
    answer.raise_for_status()
    return answer.json()


async def _time_s(work: Sequence[Awaitable[Any]]) -> float:
    begin_s = time.perf_counter()
    await _all(work)
    return time.perf_counter() - begin_s


async def _all(work: Sequence[Awaitable[Any]]) -> list[Any]:
    results: list[Any] = [None] * len(work)

    async def one(place: int, part: Awaitable[Any]) -> None:
        results[place] = await part

    async with anyio.create_task_group() as group:
        for place, part in enumerate(work):
            group.start_soon(one, place, part)
    return results
