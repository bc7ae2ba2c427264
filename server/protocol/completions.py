"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from server.protocol.sampling import (
    INT64_MAX,
    MAX_TOP_LOGPROBS,
    SamplingBody,
    TokenId,
    input_kind,
)

MAX_PROMPTS = 1024
MAX_CHOICES = 1024

NonEmptyIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_PROMPT_LIST = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
PromptInput = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[NonEmptyIds, Tag("ids")]
    | Annotated[list[str], _PROMPT_LIST, Tag("texts")]
    | Annotated[list[NonEmptyIds], _PROMPT_LIST, Tag("id_lists")],
    Discriminator(input_kind),
]


class CompletionRequest(SamplingBody):
    """`POST /v1/completions`: OpenAI's fields and vLLM's extras."""

    prompt: PromptInput
    """Text, token ids, or a list of either."""
    max_tokens: int | None = Field(default=None, ge=0, le=INT64_MAX)
    """At most so many output tokens; 16 by default."""
    logprobs: int | None = Field(default=None, ge=-1, le=MAX_TOP_LOGPROBS)
    """Log probabilities of each token, with so many alternatives."""
    echo: bool | None = False
    """Begin the answer with the prompt."""
    suffix: str | None = None
    """Not supported."""
    add_special_tokens: bool | None = True
    """Add special tokens, such as the one that begins a text, to the prompt."""
