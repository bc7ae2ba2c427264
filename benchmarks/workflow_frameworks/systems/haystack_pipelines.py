"""Haystack: pipelines built once, its own embedder, prompt builder and generator, run_async."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from haystack import Document, Pipeline, component
from haystack.components.builders import ChatPromptBuilder
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret

from benchmarks.workflow_frameworks import tasks
from benchmarks.workflow_frameworks.systems.base import (
    TIMEOUT_S,
    Addresses,
    Services,
    Workflows,
    services,
)
from benchmarks.workflow_frameworks.workload import Run

_KEY = Secret.from_token("unused")
_ALL_BRANCHES = 8


@component
class PassageRetriever:
    """The passages nearest to a vector, out of pgvector."""

    def __init__(self, services: Services, top_k: int) -> None:
        self._services = services
        self._top_k = top_k

    @component.output_types(documents=list[Document])
    def run(self, query_embedding: list[float]) -> dict[str, Any]:
        raise NotImplementedError("asynchronous only")

    @component.output_types(documents=list[Document])
    async def run_async(self, query_embedding: list[float]) -> dict[str, Any]:
        return _documents(await self._services.nearest(query_embedding, self._top_k))


@component
class Reranker:
    """The best documents for a query, by the server's reranker."""

    def __init__(self, services: Services, top_k: int) -> None:
        self._services = services
        self._top_k = top_k

    @component.output_types(documents=list[Document])
    def run(self, query: str, documents: list[Document]) -> dict[str, Any]:
        raise NotImplementedError("asynchronous only")

    @component.output_types(documents=list[Document])
    async def run_async(self, query: str, documents: list[Document]) -> dict[str, Any]:
        texts = [one.content or "" for one in documents]
        return _documents(await self._services.rerank(query, texts, self._top_k))


@component
class WebSearch:
    """Results of the search engine as documents."""

    def __init__(self, services: Services, top_k: int) -> None:
        self._services = services
        self._top_k = top_k

    @component.output_types(documents=list[Document])
    def run(self, query: str) -> dict[str, Any]:
        raise NotImplementedError("asynchronous only")

    @component.output_types(documents=list[Document])
    async def run_async(self, query: str) -> dict[str, Any]:
        return _documents(await self._services.web(query, self._top_k))


@component
class QueryOfReply:
    """The text that the model rewrote the question to; the question, if that is empty."""

    @component.output_types(query=str)
    def run(self, replies: list[ChatMessage], question: str) -> dict[str, Any]:
        return {"query": replies[0].text or question}


def _documents(texts: list[str]) -> dict[str, Any]:
    return {"documents": [Document(content=text) for text in texts]}


class HaystackWorkflows:
    """One pipeline for each kind of run."""

    def __init__(self, addresses: Addresses, services: Services) -> None:
        self._addresses = addresses
        self._services = services
        self._pipelines = {
            "rag": self._rag(),
            "rag_rerank": self._rag_rerank(),
            "web": self._web(),
            "research": self._research(),
        }
        for pipeline in self._pipelines.values():
            pipeline.warm_up()

    async def answer(self, run: Run) -> str:
        asked = {"text": run.question}
        inputs: dict[str, Any] = {"prompt": {"question": run.question}}
        if run.kind == "web":
            inputs |= {"rewrite": {"question": run.question}, "query": {"question": run.question}}
        elif run.kind == "research":
            for source in tasks.SOURCES:
                inputs[f"rank_{source}"] = {"query": run.question}
            inputs |= {"embed": asked, "embed_topic": {"text": run.topic}}
            inputs |= {"web": {"query": run.question}, "topic_web": {"query": run.topic}}
        else:
            inputs["embed"] = asked
        if run.kind == "rag_rerank":
            inputs["rank"] = {"query": run.question}
        pipeline = self._pipelines[run.kind]
        done = await pipeline.run_async(inputs, concurrency_limit=_ALL_BRANCHES)
        return str(done["llm"]["replies"][0].text or "")

    def _rag(self) -> Pipeline:
        pipeline = self._answering("documents")
        pipeline.add_component("embed", self._embedder())
        pipeline.add_component("find", PassageRetriever(self._services, tasks.KEPT))
        pipeline.connect("embed.embedding", "find.query_embedding")
        pipeline.connect("find.documents", "prompt.documents")
        return pipeline

    def _rag_rerank(self) -> Pipeline:
        pipeline = self._answering("documents")
        pipeline.add_component("embed", self._embedder())
        pipeline.add_component("find", PassageRetriever(self._services, tasks.CANDIDATES))
        pipeline.add_component("rank", Reranker(self._services, tasks.KEPT))
        pipeline.connect("embed.embedding", "find.query_embedding")
        pipeline.connect("find.documents", "rank.documents")
        pipeline.connect("rank.documents", "prompt.documents")
        return pipeline

    def _web(self) -> Pipeline:
        pipeline = self._answering("documents")
        template = [
            ChatMessage.from_system(tasks.QUERY_SYSTEM),
            ChatMessage.from_user("{{ question }}"),
        ]
        pipeline.add_component("rewrite", ChatPromptBuilder(template, required_variables="*"))
        rewriter = self._generator(tasks.QUERY_MAX_TOKENS, stop=[tasks.QUERY_STOP])
        pipeline.add_component("rewriter", rewriter)
        pipeline.add_component("query", QueryOfReply())
        pipeline.add_component("find", WebSearch(self._services, tasks.WEB_RESULTS))
        pipeline.connect("rewrite.prompt", "rewriter.messages")
        pipeline.connect("rewriter.replies", "query.replies")
        pipeline.connect("query.query", "find.query")
        pipeline.connect("find.documents", "prompt.documents")
        return pipeline

    def _research(self) -> Pipeline:
        limit = tasks.EXCERPT_CHARACTERS
        pipeline = self._answering(
            *tasks.SOURCES, limit=limit, max_tokens=tasks.SHORT_ANSWER_MAX_TOKENS
        )
        pipeline.add_component("embed", self._embedder())
        pipeline.add_component("embed_topic", self._embedder())
        for source in tasks.SOURCES:
            is_web = source.endswith("web")
            find: Any = (
                WebSearch(self._services, tasks.RESEARCH_WEB_RESULTS)
                if is_web
                else PassageRetriever(self._services, tasks.CANDIDATES)
            )
            pipeline.add_component(source, find)
            pipeline.add_component(f"rank_{source}", Reranker(self._services, 1))
            pipeline.connect(f"{source}.documents", f"rank_{source}.documents")
            pipeline.connect(f"rank_{source}.documents", f"prompt.{source}")
        pipeline.connect("embed.embedding", "documents.query_embedding")
        pipeline.connect("embed_topic.embedding", "topic_documents.query_embedding")
        return pipeline

    def _answering(
        self, *variables: str, limit: int | None = None, max_tokens: int = tasks.ANSWER_MAX_TOKENS
    ) -> Pipeline:
        """A pipeline that ends with an answer from the documents in these variables."""
        cut = "" if limit is None else f"[:{limit}]"
        separator = tasks.PASSAGE_SEPARATOR.replace("\n", "\\n")
        listed = " + ".join(variables)
        passages = (
            f"{{% for one in {listed} %}}{{{{ one.content{cut} }}}}"
            f"{{% if not loop.last %}}{{{{ '{separator}' }}}}{{% endif %}}{{% endfor %}}"
        )
        user = tasks.ANSWER_USER.format(passages=passages, question="{{ question }}")
        template = [ChatMessage.from_system(tasks.ANSWER_SYSTEM), ChatMessage.from_user(user)]
        pipeline = Pipeline()
        pipeline.add_component("prompt", ChatPromptBuilder(template, required_variables="*"))
        pipeline.add_component("llm", self._generator(max_tokens))
        pipeline.connect("prompt.prompt", "llm.messages")
        return pipeline

    def _embedder(self) -> OpenAITextEmbedder:
        return OpenAITextEmbedder(
            api_key=_KEY,
            model=self._addresses.embedding_model,
            api_base_url=self._addresses.api_url,
            timeout=TIMEOUT_S,
            max_retries=0,
        )

    def _generator(self, max_tokens: int, **options: Any) -> OpenAIChatGenerator:
        return OpenAIChatGenerator(
            api_key=_KEY,
            model=self._addresses.model,
            api_base_url=self._addresses.api_url,
            timeout=TIMEOUT_S,
            max_retries=0,
            generation_kwargs={
                "temperature": 0,
                "max_tokens": max_tokens,
                "extra_body": {"cache_salt": self._addresses.cache_salt},
                **options,
            },
        )


@asynccontextmanager
async def opened(addresses: Addresses) -> AsyncIterator[Workflows]:
    """Haystack as a `System`."""
    async with services(addresses) as tools:
        yield HaystackWorkflows(addresses, tools)
