"""The operators of workflows that this server has."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import anyio
import anyio.lowlevel
from pydantic import ValidationError

from server.endpoints.chat import ChatCompletions, ChatJob, WholeChoice
from server.engine_waiting import wait_started
from server.gateway import Gateway
from server.generation_run import GenerationRun, usage
from server.prefill_ahead import PrefillAhead
from server.protocol.workflows import LlmParams
from server.record import RequestRecord
from server.sampling import constraint_param
from server.workflow_failures import node_failed
from server.workflow_resources import WorkflowResources
from spot.errors import ShuntyardError
from workflows.operators.base import JsonType, NodeContext, NodeResult, Operator
from workflows.operators.embed import EmbedOperator
from workflows.operators.http import HttpOperator
from workflows.operators.ingest import IngestOperator
from workflows.operators.nested import LoopOperator, MapOperator, WorkflowOperator
from workflows.operators.python import PythonOperator
from workflows.operators.rerank import RerankOperator
from workflows.operators.search import SearchOperator
from workflows.operators.split import SplitOperator
from workflows.operators.text import MergeOperator, SelectOperator, TemplateOperator
from workflows.operators.web_search import WebSearchOperator
from workflows.scheduling.messages import Size
from workflows.signature import Identity

_ENDPOINT = "workflow:llm"
# `prompt` is in `messages`; the others change who waits how, not what is said. What a request can
# be refused for is not among them: nobody's mistake may be another one's failure.
_NOT_IN_THE_ANSWER = {"prompt", "stream", "stream_interval", "user", "priority"}


def operators_of(gateway: Gateway, resources: WorkflowResources | None) -> list[Operator]:
    """Every operator that a node can name; without resources, those that need none."""
    operators: list[Operator] = [
        LlmOperator(gateway),
        TemplateOperator(),
        MergeOperator(),
        SelectOperator(),
        SplitOperator(),
        WorkflowOperator(),
        MapOperator(),
        LoopOperator(),
    ]
    if resources is not None:
        operators += [
            EmbedOperator(resources.items),
            RerankOperator(resources.items),
            IngestOperator(resources.items, resources.store),
            SearchOperator(resources.items, resources.store),
            HttpOperator(resources.http),
            WebSearchOperator(resources.web_search),
        ]
        if resources.functions:
            operators.append(PythonOperator(resources.functions))
    return operators


class LlmOperator:
    """One answer of the served model; its parameters are those of a chat completion."""

    name = "llm"
    params = LlmParams
    resources = ("llm",)
    outputs: Mapping[str, JsonType] = {
        "text": "string",
        "message": "object",
        "tool_calls": "array",
        "reasoning": "string",
        "finish_reason": "string",
    }

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._chat = ChatCompletions(gateway)
        self._ahead = PrefillAhead(gateway)
        self._profile = f"llm:{gateway.model.root or gateway.model.names[0]}"

    def identity(self, params: LlmParams) -> Identity:
        """Everything in the request that the answer depends on, and the model."""
        is_sampled = params.temperature != 0 and params.seed is None
        exclude = set(_NOT_IN_THE_ANSWER)
        if params.model is None or params.model in self._gateway.model.names:
            exclude.add("model")
        if params.stream:
            exclude.add("stream_options")
        content = params.model_dump(mode="json", exclude_unset=True, exclude=exclude)
        return Identity(
            content={"model": self._gateway.model.root, "request": content},
            sampled="sampled: neither is temperature 0 nor is there a seed" if is_sampled else "",
            is_pure=not is_sampled,
            wants_deltas=bool(params.stream),
        )

    def expected_size(self, params: Any, expected_outputs: float) -> Size:
        """Before the prompt is known: a token for every four characters of the request."""
        limit = params.get("max_completion_tokens") or params.get("max_tokens")
        if isinstance(limit, int):
            expected_outputs = min(expected_outputs, limit)
        return Size(expected_outputs, len(str(params)) / 4)

    async def foresee(self, params: Mapping[str, Any], *, tenant: str) -> None:
        """Let the engine read how the prompt begins, if it has nothing better to do."""
        await anyio.lowlevel.checkpoint()  # more may be known by now, and this be stopped
        if not self._ahead.is_idle:
            return
        try:
            body = LlmParams.model_validate(params)
            raw = body.model_dump(mode="json", exclude_unset=True, exclude={"prompt"})
            token_ids = await self._chat.beginning(body, raw)
            salt = self._gateway.cache_salt(tenant, body.cache_salt)
            await self._ahead.read(token_ids, salt)
        except (ValidationError, ShuntyardError):
            return  # the node itself will say so

    async def run(self, params: LlmParams, context: NodeContext) -> NodeResult:
        record = RequestRecord(
            request_id=f"{context.run_id}-{context.node_id}-{secrets.token_hex(4)}",
            method="POST",
            path="/v1/workflows",
            arrived_s=anyio.current_time(),
            tenant=context.tenant,
            status=200,
            stream=bool(params.stream),
        )
        try:
            await wait_started(self._gateway.model.engine, self._gateway.patience_s)
            return await self._answer(params, record, context)
        except ShuntyardError as error:
            record.outcome, record.error = "failed", error.message
            raise node_failed(error) from None
        except BaseException:
            record.outcome = "aborted"
            raise
        finally:
            self._gateway.metrics.observe(record, _ENDPOINT, anyio.current_time())

    async def _answer(
        self, params: LlmParams, record: RequestRecord, context: NodeContext
    ) -> NodeResult:
        raw = params.model_dump(mode="json", exclude_unset=True, exclude={"prompt"})
        job = await self._chat.prepare(params, raw, record)
        (generation,) = job.generations
        generation.priority += context.job.priority
        num_prompt_tokens = len(job.prompt_token_ids)
        limit = generation.sampling.max_tokens
        expected = context.job.expected_outputs(self._profile, limit=limit)
        async with context.job.slot(
            "llm",
            profile=self._profile,
            size=Size(expected, num_prompt_tokens),
            priority=generation.priority,
            work_id=generation.id,
        ) as slot:
            generation.head_start_s = slot.head_start_s
            answer = await self._generated(job, params, record, context)
            slot.size = Size(record.num_output_tokens, num_prompt_tokens)
        message = answer["message"]
        record.finish_reasons = [answer["finish_reason"]]
        counts = {name: count for name, count in usage(record).items() if isinstance(count, int)}
        return NodeResult(
            output={
                "text": message["content"] or "",
                "message": message,
                "tool_calls": message.get("tool_calls", []),
                "reasoning": message.get("reasoning", ""),
                "finish_reason": answer["finish_reason"],
            },
            usage={**counts, "cached_tokens": record.num_cached_tokens},
            may_be_kept=answer["finish_reason"] != "length" or _is_as_long_as_asked(params, record),
        )

    async def _generated(
        self, job: ChatJob, params: LlmParams, record: RequestRecord, context: NodeContext
    ) -> dict[str, Any]:
        """The answer's choice, whole."""
        run = GenerationRun(
            self._gateway,
            record,
            job.generations,
            job.assemblers,
            num_prompt_tokens=len(job.prompt_token_ids),
            constraint_param=constraint_param(params),
        )
        choice = WholeChoice(job, 0)
        if job.echo:
            context.emit(job.echo)
        with run:
            while not run.is_done:
                for _, piece in await run.pieces():
                    choice.add(piece)
                    if piece.content:
                        context.emit(piece.content)
        return choice.render()


def _is_as_long_as_asked(params: LlmParams, record: RequestRecord) -> bool:
    """Whether an answer was cut by the request's own limit, and not by the model's context: equal
    work would be cut at the same token."""
    limit = params.max_completion_tokens or params.max_tokens
    return limit is not None and record.num_output_tokens >= limit
