"""What chat and text completions do alike: choices made of prompts, and the answer to them."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Send

from server.asgi import send_json
from server.endpoints.event_ids import with_event_ids
from server.endpoints.streaming import ChunkWriter, stream_run
from server.gateway import Gateway, ServedModel
from server.generation_run import GenerationRun
from server.journaling import Job
from server.protocol.sampling import SamplingBody
from server.record import RequestRecord
from server.sampling import constraint_param, for_choice, output_limit, sampling_params
from server.text.assembler import ChoiceAssembler
from server.text.detokenizer import Detokenizer
from server.text.logprobs import LogprobFormatter
from spot.generation import Generation, SamplingParams, StructuredOutput
from spot.parsed import OutputParser


def sampling_for(
    model: ServedModel,
    body: SamplingBody,
    *,
    num_prompt_tokens: int,
    prompt_param: str,
    max_tokens: int | None,
    limit_param: str,
    default_max_tokens: int | None,
    num_logprobs: int | None,
    prompt_logprobs: int | None,
    constraint: StructuredOutput | None,
) -> SamplingParams:
    """The parameters of one prompt's choices, within what the context leaves.

    max_tokens: as the request has it; for 0 a token is made, which the caller drops.
    Raises InvalidRequest.
    """
    limit = output_limit(
        max_tokens,
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=model.max_model_len,
        default=default_max_tokens,
        prompt_param=prompt_param,
        limit_param=limit_param,
    )
    return sampling_params(
        body,
        model.defaults,
        max_tokens=max(1, limit),
        logprobs=num_logprobs,
        prompt_logprobs=prompt_logprobs,
        vocab_size=model.vocab_size,
        structured=constraint,
    )


def formatter_for(
    model: ServedModel, body: SamplingBody, num_logprobs: int | None
) -> LogprobFormatter | None:
    """What renders log probabilities, if any were asked for."""
    if num_logprobs is None and body.prompt_logprobs is None:
        return None
    return LogprobFormatter(
        model.tokenizer,
        num_top=num_logprobs or 0,
        as_ids=bool(body.return_tokens_as_token_ids),
    )


class Choices:
    """The generations of a request, `n` for each prompt, and what makes text of each.

    key: what their ids begin with; no client chooses it.
    """

    def __init__(self, gateway: Gateway, record: RequestRecord, body: SamplingBody) -> None:
        self.key = secrets.token_hex(12)
        self.n = body.n or 1
        self.generations: list[Generation] = []
        self.assemblers: list[ChoiceAssembler] = []
        self._tokenizer = gateway.model.tokenizer
        self._body = body
        self._via = record.via
        self._salt = gateway.cache_salt(record.tenant, body.cache_salt)

    def add(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        reasoning_ended: bool | None = None,
        new_parser: Callable[[], OutputParser | None] = lambda: None,
        hide_reasoning: bool = False,
    ) -> None:
        """One more prompt. new_parser: makes the parser of each choice's output."""
        body = self._body
        for index in range(self.n):
            self.generations.append(
                Generation(
                    id=f"{self.key}-{len(self.generations)}",
                    prompt_token_ids=prompt_token_ids,
                    sampling=for_choice(sampling, index),
                    priority=body.priority or 0,
                    cache_salt=self._salt,
                    allow_inexact_resume=bool(body.allow_inexact_resume),
                    reasoning_ended=reasoning_ended,
                    via=self._via,
                )
            )
            self.assemblers.append(
                ChoiceAssembler(
                    Detokenizer(
                        self._tokenizer,
                        prompt_token_ids,
                        skip_special_tokens=body.skip_special_tokens is not False,
                        spaces_between_special_tokens=body.spaces_between_special_tokens
                        is not False,
                    ),
                    stops=body.stop_strings,
                    include_stop=bool(body.include_stop_str_in_output),
                    min_tokens=body.min_tokens or 0,
                    parser=new_parser(),
                    hide_reasoning=hide_reasoning,
                )
            )


async def respond(
    gateway: Gateway,
    body: SamplingBody,
    job: Job,
    record: RequestRecord,
    send: Send,
    *,
    prompts: list[list[int]],
    new_writer: Callable[[], ChunkWriter],
    whole_answer: Callable[[GenerationRun], Awaitable[dict[str, Any]]],
) -> None:
    """Run a job and answer with it, as a stream or in one piece; journaled, if the record says so.

    new_writer: called when the job is what it was at first, should it be in the journal.
    """
    if record.journaling is not None:
        await record.journaling.begin(job, prompts=prompts, model=gateway.model.root)
    num_choices = len(job.generations)
    interval = body.stream_interval or gateway.limits.stream_interval
    run = GenerationRun(
        gateway,
        record,
        job.generations,
        job.assemblers,
        num_prompt_tokens=sum(map(len, prompts)),
        num_choices=num_choices // len(prompts),
        constraint_param=constraint_param(body),
        stream_interval=interval if body.stream else 1,
    )
    writer = with_event_ids(new_writer(), record.journaling, num_choices=num_choices)
    with run:
        if body.stream:
            await stream_run(gateway, record, run, writer, send)
        else:
            await send_json(send, await whole_answer(run))
