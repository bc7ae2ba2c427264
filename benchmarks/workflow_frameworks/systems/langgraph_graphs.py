"""LangGraph: graphs compiled once, asynchronous nodes, and its cache of nodes' results."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langgraph.cache.memory import InMemoryCache
from langgraph.graph import END, START, StateGraph
from langgraph.types import CachePolicy

from benchmarks.workflow_frameworks import tasks
from benchmarks.workflow_frameworks.systems.base import (
    TIMEOUT_S,
    Addresses,
    Services,
    Workflows,
    services,
)
from benchmarks.workflow_frameworks.workload import Run

Node = Callable[[Any], Awaitable[dict[str, Any]]]


class State(TypedDict, total=False):
    question: str
    topic: str
    query: str
    passages: list[str]
    answer: str
    documents: list[str]
    topic_documents: list[str]
    web: list[str]
    topic_web: list[str]
    best_documents: list[str]
    best_topic_documents: list[str]
    best_web: list[str]
    best_topic_web: list[str]


class LangGraphWorkflows:
    """One compiled graph for each kind of run."""

    def __init__(self, addresses: Addresses, services: Services) -> None:
        self._services = services
        self._embeddings = OpenAIEmbeddings(
            model=addresses.embedding_model,
            base_url=addresses.api_url,
            api_key="unused",
            check_embedding_ctx_length=False,
            max_retries=0,
            timeout=TIMEOUT_S,
        )
        self._chats = {
            max_tokens: ChatOpenAI(
                model=addresses.model,
                base_url=addresses.api_url,
                api_key="unused",
                temperature=0,
                max_tokens=max_tokens,
                max_retries=0,
                timeout=TIMEOUT_S,
                stop_sequences=[tasks.QUERY_STOP] if max_tokens == tasks.QUERY_MAX_TOKENS else None,
                extra_body={"cache_salt": addresses.cache_salt},
            )
            for max_tokens in (
                tasks.ANSWER_MAX_TOKENS,
                tasks.SHORT_ANSWER_MAX_TOKENS,
                tasks.QUERY_MAX_TOKENS,
            )
        }
        self._graphs = {
            "rag": self._rag(),
            "rag_rerank": self._rag_rerank(),
            "web": self._web(),
            "research": self._research(),
        }

    async def answer(self, run: Run) -> str:
        state = {"question": run.question, "topic": run.topic}
        final = await self._graphs[run.kind].ainvoke(state)
        return str(final["answer"])

    def _rag(self) -> Any:
        graph = StateGraph(State)
        _add(graph, "find", self._nearest("question", "passages", tasks.KEPT), "question")
        _add(graph, "reply", self._reply, "question", "passages")
        return _compiled(graph, [(START, "find"), ("find", "reply"), ("reply", END)])

    def _rag_rerank(self) -> Any:
        graph = StateGraph(State)
        _add(graph, "find", self._nearest("question", "documents", tasks.CANDIDATES), "question")
        rank = self._ranked("documents", "passages", tasks.KEPT)
        _add(graph, "rank", rank, "question", "documents")
        _add(graph, "reply", self._reply, "question", "passages")
        edges = [(START, "find"), ("find", "rank"), ("rank", "reply"), ("reply", END)]
        return _compiled(graph, edges)

    def _web(self) -> Any:
        graph = StateGraph(State)
        _add(graph, "rewrite", self._rewrite, "question")
        _add(graph, "find", self._searched("query", "passages", tasks.WEB_RESULTS), "query")
        _add(graph, "reply", self._reply, "question", "passages")
        edges = [(START, "rewrite"), ("rewrite", "find"), ("find", "reply"), ("reply", END)]
        return _compiled(graph, edges)

    def _research(self) -> Any:
        graph = StateGraph(State)
        for name, of in (("documents", "question"), ("topic_documents", "topic")):
            _add(graph, f"find_{name}", self._nearest(of, name, tasks.CANDIDATES), of)
        for name, of in (("web", "question"), ("topic_web", "topic")):
            _add(graph, f"find_{name}", self._searched(of, name, tasks.RESEARCH_WEB_RESULTS), of)
        edges: list[tuple[Any, str]] = []
        for source in tasks.SOURCES:
            rank = self._ranked(source, f"best_{source}", 1)
            _add(graph, f"rank_{source}", rank, "question", source)
            edges += [(START, f"find_{source}"), (f"find_{source}", f"rank_{source}")]
        bests = [f"best_{source}" for source in tasks.SOURCES]
        _add(graph, "reply", self._short_reply, "question", *bests)
        edges += [([f"rank_{source}" for source in tasks.SOURCES], "reply"), ("reply", END)]
        return _compiled(graph, edges)

    def _nearest(self, of: str, to: str, count: int) -> Node:
        async def find(state: Any) -> dict[str, Any]:
            vector = await self._embeddings.aembed_query(state[of])
            return {to: await self._services.nearest(vector, count)}

        return find

    def _searched(self, of: str, to: str, count: int) -> Node:
        async def find(state: Any) -> dict[str, Any]:
            return {to: await self._services.web(state[of], count)}

        return find

    def _ranked(self, of: str, to: str, count: int) -> Node:
        async def rank(state: Any) -> dict[str, Any]:
            return {to: await self._services.rerank(state["question"], state[of], count)}

        return rank

    async def _rewrite(self, state: Any) -> dict[str, Any]:
        text = await self._chat(tasks.QUERY_SYSTEM, state["question"], tasks.QUERY_MAX_TOKENS)
        return {"query": text or state["question"]}

    async def _reply(self, state: Any) -> dict[str, Any]:
        user = tasks.answer_user(state["question"], state["passages"])
        return {"answer": await self._chat(tasks.ANSWER_SYSTEM, user, tasks.ANSWER_MAX_TOKENS)}

    async def _short_reply(self, state: Any) -> dict[str, Any]:
        passages = tasks.excerpts([state[f"best_{source}"] for source in tasks.SOURCES])
        user = tasks.answer_user(state["question"], passages)
        max_tokens = tasks.SHORT_ANSWER_MAX_TOKENS
        return {"answer": await self._chat(tasks.ANSWER_SYSTEM, user, max_tokens)}

    async def _chat(self, system: str, user: str, max_tokens: int) -> str:
        message = await self._chats[max_tokens].ainvoke([("system", system), ("user", user)])
        return str(message.content)


def _add(graph: Any, name: str, node: Node, *fields: str) -> None:
    """A node whose result is used again where these fields of the state are equal."""

    def key(state: Any) -> str:
        return json.dumps([state[field] for field in fields])

    graph.add_node(name, node, cache_policy=CachePolicy(key_func=key))


def _compiled(graph: Any, edges: list[tuple[Any, str]]) -> Any:
    for start, end in edges:
        graph.add_edge(start, end)
    return graph.compile(cache=InMemoryCache())


@asynccontextmanager
async def opened(addresses: Addresses) -> AsyncIterator[Workflows]:
    """LangGraph as a `System`."""
    async with services(addresses) as tools:
        yield LangGraphWorkflows(addresses, tools)
