"""Shuntyard: one request per run, everything else is the server's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_args

import httpx

from benchmarks.workflow_frameworks import tasks
from benchmarks.workflow_frameworks.systems.base import Addresses, Workflows, http_client
from benchmarks.workflow_frameworks.workload import Kind, Run

_CACHE_TTL_S = 600
_QUERY = "{{ nodes.rewrite.output.text or inputs.question }}"
_QUESTION = "{{ inputs.question }}"
_TOPIC = "{{ inputs.topic }}"


def document(kind: Kind, addresses: Addresses) -> dict[str, Any]:
    """The workflow of a kind of run; its inputs are `question` and `topic`."""
    make = {"rag": _rag, "rag_rerank": _rag_rerank, "web": _web, "research": _research}[kind]
    options = {
        "share": {"salt": addresses.cache_salt},
        "cache": {"ttl_s": _CACHE_TTL_S},
    }
    nodes = [node | options for node in make(addresses)]
    for node in nodes:
        if node["op"] == "llm":
            node["params"]["cache_salt"] = addresses.cache_salt
    return {"nodes": nodes, "outputs": {"answer": "{{ nodes.answer.output.text }}"}}


def _rag(addresses: Addresses) -> list[dict[str, Any]]:
    return [
        _search("find", addresses, _QUESTION, tasks.KEPT),
        _answer("nodes.find.output.texts"),
    ]


def _rag_rerank(addresses: Addresses) -> list[dict[str, Any]]:
    return [
        _search("find", addresses, _QUESTION, tasks.CANDIDATES),
        _rerank("best", "find", tasks.KEPT),
        _answer("nodes.best.output.texts"),
    ]


def _web(addresses: Addresses) -> list[dict[str, Any]]:
    rewrite = _chat("rewrite", tasks.QUERY_SYSTEM, _QUESTION, tasks.QUERY_MAX_TOKENS)
    rewrite["params"]["stop"] = [tasks.QUERY_STOP]
    return [
        rewrite,
        _web_search("find", _QUERY, tasks.WEB_RESULTS),
        _answer("nodes.find.output.texts"),
    ]


def _research(addresses: Addresses) -> list[dict[str, Any]]:
    finds = [
        _search("documents", addresses, _QUESTION, tasks.CANDIDATES),
        _search("topic_documents", addresses, _TOPIC, tasks.CANDIDATES),
        _web_search("web", _QUESTION, tasks.RESEARCH_WEB_RESULTS),
        _web_search("topic_web", _TOPIC, tasks.RESEARCH_WEB_RESULTS),
    ]
    ranks = [_rerank(f"best_{find['id']}", find["id"], 1) for find in finds]
    texts = " + ".join(f"nodes.{rank['id']}.output.texts" for rank in ranks)
    excerpts = f"({texts}) | map('truncate', {tasks.EXCERPT_CHARACTERS}, true, '', 0)"
    return [*finds, *ranks, _answer(excerpts, tasks.SHORT_ANSWER_MAX_TOKENS)]


def _search(name: str, addresses: Addresses, query: str, count: int) -> dict[str, Any]:
    params = {"collection": addresses.collection, "query": query, "top_k": count}
    return {"id": name, "op": "search", "params": params}


def _web_search(name: str, query: str, count: int) -> dict[str, Any]:
    return {"id": name, "op": "web_search", "params": {"query": query, "count": count}}


def _rerank(name: str, source: str, count: int) -> dict[str, Any]:
    params = {
        "query": _QUESTION,
        "documents": f"{{{{ nodes.{source}.output.texts }}}}",
        "top_n": count,
        "truncate": True,
    }
    return {"id": name, "op": "rerank", "params": params}


def _answer(passages: str, max_tokens: int = tasks.ANSWER_MAX_TOKENS) -> dict[str, Any]:
    """passages: an expression for a list of texts."""
    user = tasks.ANSWER_USER.format(
        passages=f"{{{{ {passages} | join('{_escaped(tasks.PASSAGE_SEPARATOR)}') }}}}",
        question=_QUESTION,
    )
    return _chat("answer", tasks.ANSWER_SYSTEM, user, max_tokens)


def _escaped(text: str) -> str:
    return text.replace("\n", "\\n")


def _chat(name: str, system: str, user: str, max_tokens: int) -> dict[str, Any]:
    params = {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    return {"id": name, "op": "llm", "params": params}


class ShuntyardWorkflows:
    """`POST /v1/workflows`."""

    def __init__(self, addresses: Addresses, http: httpx.AsyncClient) -> None:
        self._url = f"{addresses.api_url}/workflows"
        self._http = http
        self._documents = {kind: document(kind, addresses) for kind in get_args(Kind)}

    async def answer(self, run: Run) -> str:
        inputs = {"question": run.question, "topic": run.topic}
        body = self._documents[run.kind] | {"inputs": inputs}
        answer = await self._http.post(self._url, json=body)
        answer.raise_for_status()
        finished = answer.json()
        if finished["status"] != "completed":
            raise RuntimeError(f"the run ended as {finished['status']}: {finished['error']}")
        return str(finished["outputs"]["answer"])


@asynccontextmanager
async def opened(addresses: Addresses) -> AsyncIterator[Workflows]:
    """Shuntyard as a `System`."""
    async with http_client() as http:
        yield ShuntyardWorkflows(addresses, http)
