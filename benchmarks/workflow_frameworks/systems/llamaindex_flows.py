"""LlamaIndex Workflows: one instance of each, asynchronous steps that are driven by events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from workflows.events import Event, StartEvent, StopEvent

from benchmarks.workflow_frameworks import tasks
from benchmarks.workflow_frameworks.systems.base import (
    TIMEOUT_S,
    Addresses,
    Services,
    Workflows,
    services,
)
from benchmarks.workflow_frameworks.workload import Run
from workflows import Context, Workflow, step


class Models:
    """The models with their settings, and the services."""

    def __init__(self, addresses: Addresses, services: Services) -> None:
        self.services = services
        self._embedding = OpenAILikeEmbedding(
            model_name=addresses.embedding_model,
            api_base=addresses.api_url,
            api_key="unused",
            max_retries=0,
            timeout=TIMEOUT_S,
        )
        self._llms = {
            max_tokens: OpenAILike(
                model=addresses.model,
                api_base=addresses.api_url,
                api_key="unused",
                is_chat_model=True,
                temperature=0,
                max_tokens=max_tokens,
                max_retries=0,
                timeout=TIMEOUT_S,
                additional_kwargs={"extra_body": {"cache_salt": addresses.cache_salt}},
            )
            for max_tokens in (
                tasks.ANSWER_MAX_TOKENS,
                tasks.SHORT_ANSWER_MAX_TOKENS,
                tasks.QUERY_MAX_TOKENS,
            )
        }

    async def nearest(self, text: str, count: int) -> list[str]:
        vector = await self._embedding.aget_query_embedding(text)
        return await self.services.nearest(vector, count)

    async def query(self, question: str) -> str:
        messages = _messages(tasks.QUERY_SYSTEM, question)
        llm = self._llms[tasks.QUERY_MAX_TOKENS]
        answer = await llm.achat(messages, stop=[tasks.QUERY_STOP])
        return answer.message.content or question

    async def answer(self, question: str, passages: list[str], max_tokens: int) -> str:
        user = tasks.answer_user(question, passages)
        answer = await self._llms[max_tokens].achat(_messages(tasks.ANSWER_SYSTEM, user))
        return answer.message.content or ""


def _messages(system: str, user: str) -> list[ChatMessage]:
    return [ChatMessage(role="system", content=system), ChatMessage(role="user", content=user)]


class Asked(StartEvent):
    question: str
    topic: str


class Candidates(Event):
    question: str
    texts: list[str]


class Passages(Event):
    question: str
    texts: list[str]


class Query(Event):
    question: str
    query: str


class Wanted(Event):
    source: str
    question: str
    text: str
    is_web: bool


class Found(Event):
    source: str
    question: str
    texts: list[str]


class Best(Event):
    source: str
    texts: list[str]


class _Flow(Workflow):
    def __init__(self, models: Models) -> None:
        super().__init__(timeout=TIMEOUT_S)
        self.models = models


class Rag(_Flow):
    @step
    async def find(self, event: Asked) -> Passages:
        texts = await self.models.nearest(event.question, tasks.KEPT)
        return Passages(question=event.question, texts=texts)

    @step
    async def reply(self, event: Passages) -> StopEvent:
        answer = self.models.answer(event.question, event.texts, tasks.ANSWER_MAX_TOKENS)
        return StopEvent(result=await answer)


class RagRerank(_Flow):
    @step
    async def find(self, event: Asked) -> Candidates:
        texts = await self.models.nearest(event.question, tasks.CANDIDATES)
        return Candidates(question=event.question, texts=texts)

    @step
    async def rank(self, event: Candidates) -> Passages:
        services = self.models.services
        texts = await services.rerank(event.question, event.texts, tasks.KEPT)
        return Passages(question=event.question, texts=texts)

    @step
    async def reply(self, event: Passages) -> StopEvent:
        answer = self.models.answer(event.question, event.texts, tasks.ANSWER_MAX_TOKENS)
        return StopEvent(result=await answer)


class Web(_Flow):
    @step
    async def rewrite(self, event: Asked) -> Query:
        query = await self.models.query(event.question)
        return Query(question=event.question, query=query)

    @step
    async def find(self, event: Query) -> Passages:
        texts = await self.models.services.web(event.query, tasks.WEB_RESULTS)
        return Passages(question=event.question, texts=texts)

    @step
    async def reply(self, event: Passages) -> StopEvent:
        answer = self.models.answer(event.question, event.texts, tasks.ANSWER_MAX_TOKENS)
        return StopEvent(result=await answer)


class Research(_Flow):
    @step
    async def begin(self, ctx: Context, event: Asked) -> Wanted | None:
        await ctx.store.set("question", event.question)
        for source in tasks.SOURCES:
            text = event.topic if source.startswith("topic") else event.question
            is_web = source.endswith("web")
            ctx.send_event(Wanted(source=source, question=event.question, text=text, is_web=is_web))
        return None

    @step(num_workers=len(tasks.SOURCES))
    async def find(self, event: Wanted) -> Found:
        if event.is_web:
            texts = await self.models.services.web(event.text, tasks.RESEARCH_WEB_RESULTS)
        else:
            texts = await self.models.nearest(event.text, tasks.CANDIDATES)
        return Found(source=event.source, question=event.question, texts=texts)

    @step(num_workers=len(tasks.SOURCES))
    async def rank(self, event: Found) -> Best:
        texts = await self.models.services.rerank(event.question, event.texts, 1)
        return Best(source=event.source, texts=texts)

    @step
    async def reply(self, ctx: Context, event: Best) -> StopEvent | None:
        bests = ctx.collect_events(event, [Best] * len(tasks.SOURCES))
        if bests is None:
            return None
        texts = {best.source: best.texts for best in bests}
        passages = tasks.excerpts([texts[source] for source in tasks.SOURCES])
        question = await ctx.store.get("question")
        answer = self.models.answer(question, passages, tasks.SHORT_ANSWER_MAX_TOKENS)
        return StopEvent(result=await answer)


class LlamaIndexWorkflows:
    """One workflow for each kind of run."""

    def __init__(self, models: Models) -> None:
        self._flows = {
            "rag": Rag(models),
            "rag_rerank": RagRerank(models),
            "web": Web(models),
            "research": Research(models),
        }

    async def answer(self, run: Run) -> str:
        flow = self._flows[run.kind]
        return str(await flow.run(start_event=Asked(question=run.question, topic=run.topic)))


@asynccontextmanager
async def opened(addresses: Addresses) -> AsyncIterator[Workflows]:
    """LlamaIndex Workflows as a `System`."""
    async with services(addresses) as tools:
        yield LlamaIndexWorkflows(Models(addresses, tools))
