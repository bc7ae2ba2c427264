"""Fields that chat and text completions share: sampling, limits, constraints, vLLM's extras."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from server.protocol.base import RequestBody

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_STOP_STRINGS = 4
MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_PRIORITY = 2**31

Finite = Annotated[float, Field(allow_inf_nan=False)]
StopString = Annotated[str, StringConstraints(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def input_kind(value: Any) -> str:
    """Which form of text or token ids is meant, by its first element.

    So errors are about that form, not about all of them.
    """
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else None
    if isinstance(first, list):
        return "id_lists"
    return "ids" if isinstance(first, int) and not isinstance(first, bool) else "texts"


@dataclass(frozen=True, slots=True)
class Truncation:
    """To how many tokens a prompt is cut, -1 for what the context allows, and at which side."""

    max_tokens: int
    side: Literal["left", "right"] = "left"


class StreamOptions(BaseModel):
    """Options of a stream. `continuous_usage_stats` is vLLM's, obfuscation is accepted only."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: exactly one constraint."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1, fail_fast=True)
    grammar: str | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    @field_validator("whitespace_pattern")
    @classmethod
    def _not_empty(cls, value: str | None) -> str | None:
        return value or None


class JsonSchemaFormat(BaseModel):
    """The `json_schema` member of a response format."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)

    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextFormat(BaseModel):
    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    type: Literal["json_object"]


class JsonSchemaResponseFormat(BaseModel):
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


class StructuralTagFormat(BaseModel):
    """vLLM's structural tags; handed to the engine as they are."""

    model_config = ConfigDict(extra="allow")

    type: Literal["structural_tag"]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaResponseFormat | StructuralTagFormat,
    Field(discriminator="type"),
]


def _is_finite_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class SamplingBody(RequestBody):
    """The shared fields. None means absent: the server's default applies."""

    model: str | None = None
    """A served name; without one the server's main model."""
    stream: bool | None = False
    """Send the answer as server-sent events while it is generated."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    """Choices to generate for each prompt."""
    seed: int | None = Field(default=None, ge=INT64_MIN, le=INT64_MAX)
    """Makes sampling repeatable; choice `i` uses `seed + i`."""
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True)] | None = None
    """Up to four strings that end the answer, and are not part of it."""
    temperature: Finite | None = Field(default=None, ge=0, le=2)
    """0 takes the likeliest token, 1 samples from the model's own distribution."""
    top_p: Finite | None = Field(default=None, ge=0, le=1)
    """Sample from the likeliest tokens that together have this probability; 1 for all."""
    presence_penalty: Finite | None = Field(default=None, ge=-2, le=2)
    """Positive values make tokens less likely that have been generated at least once."""
    frequency_penalty: Finite | None = Field(default=None, ge=-2, le=2)
    """Positive values make tokens less likely by how often they have been generated."""
    logit_bias: dict[str, Finite] | None = None
    """Token ids with what is added to their logits."""
    response_format: ResponseFormat | None = None
    """Constrains the answer to JSON, to a JSON schema, or to structural tags."""
    user: str | None = None
    """Accepted without effect."""

    top_k: int | None = Field(default=None, ge=-1, le=INT64_MAX)
    """Sample from so many likeliest tokens; 0 or -1 for all."""
    min_p: Finite | None = Field(default=None, ge=0, le=1)
    """Leave out tokens less likely than this share of the likeliest one's probability."""
    repetition_penalty: Finite | None = Field(default=None, gt=0, le=100)
    """Above 1 makes tokens less likely that stand in the prompt or the output."""
    min_tokens: int | None = Field(default=None, ge=0, le=INT64_MAX)
    """No end before so many output tokens."""
    ignore_eos: bool | None = False
    """Go on after the end-of-sequence token, up to the output limit."""
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=1024, fail_fast=True)
    """Token ids that end the answer."""
    skip_special_tokens: bool | None = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool | None = True
    """Put spaces between special tokens that are shown."""
    include_stop_str_in_output: bool | None = False
    """Keep the stop string in the answer."""
    bad_words: list[str] | None = Field(default=None, max_length=1024, fail_fast=True)
    """Words that are never generated."""
    allowed_token_ids: list[TokenId] | None = Field(default=None, min_length=1, fail_fast=True)
    """Only these token ids may be generated."""
    prompt_logprobs: int | None = Field(default=None, ge=-1, le=INT64_MAX)
    """Log probabilities of the prompt's tokens, with so many alternatives."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=INT64_MAX)
    """Cut the prompt to so many tokens; -1 to what the context allows."""
    truncation_side: Literal["left", "right"] | None = None
    """The side at which a prompt is cut; left by default."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's constraints on the output: a JSON schema, expression, choice or grammar."""
    priority: int | None = Field(default=None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Requests with lower numbers are served first; 0 by default."""
    request_id: str | None = Field(default=None, max_length=256)
    """Becomes a part of the answer's id."""
    allow_inexact_resume: bool | None = None
    """true: when its pipeline dies, go on elsewhere even if the rest may differ."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    """Only requests with the same salt share the prefix cache."""
    return_token_ids: bool | None = None
    """Answer with the token ids of prompt and output as well."""
    return_tokens_as_token_ids: bool | None = None
    """Name tokens in log probabilities as `token_id:N`."""
    stream_interval: int | None = Field(default=None, ge=1, le=INT64_MAX)
    """Tokens to gather before a chunk is sent."""
    thinking_token_budget: int | None = Field(default=None, ge=0, le=INT64_MAX)
    """At most so many tokens of reasoning."""
    vllm_xargs: dict[str, Any] | None = None
    """Further arguments for extensions of vLLM."""
    kv_transfer_params: dict[str, Any] | None = None
    """Accepted without effect."""

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _numbers(cls, value: object) -> object:
        """Said once for the whole map, however many values are wrong."""
        if isinstance(value, dict):
            bad = [key for key, bias in value.items() if not _is_finite_number(bias)]
            if bad:
                keys = ", ".join(repr(key[:32]) for key in bad[:10])
                raise ValueError(f"biases must be finite numbers; those of {keys} are not")
        return value

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are allowed")
        return value

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def prompt_truncation(self) -> Truncation | None:
        if self.truncate_prompt_tokens is None:
            return None
        return Truncation(self.truncate_prompt_tokens, self.truncation_side or "left")

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)
