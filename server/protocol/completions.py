"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from server.protocol.sampling import INT64_MAX, MAX_TOP_LOGPROBS, SamplingBody, TokenId

MAX_PROMPTS = 1024
MAX_CHOICES = 1024

NonEmptyIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class CompletionRequest(SamplingBody):
    """`POST /v1/completions`: OpenAI's fields and vLLM's extras."""

    prompt: (
        str
        | NonEmptyIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[NonEmptyIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: int | None = Field(default=None, ge=0, le=INT64_MAX)
    logprobs: int | None = Field(default=None, ge=-1, le=MAX_TOP_LOGPROBS)
    echo: bool | None = False
    suffix: str | None = None
    add_special_tokens: bool | None = True
