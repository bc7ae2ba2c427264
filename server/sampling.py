"""From a request's fields and the server's defaults to the sampling parameters of a generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from server.protocol.sampling import (
    JsonObjectFormat,
    JsonSchemaResponseFormat,
    SamplingBody,
    StructuralTagFormat,
)
from spot.errors import ContextLengthExceeded, InvalidRequest
from spot.generation import SamplingParams, StructuredOutput

_DEFAULTED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What applies where a request says nothing. None leaves OpenAI's default.

    Source: the model's generation_config.json, then --override-generation-config over it.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SamplingDefaults:
        """Known, well-typed entries of a generation config; the rest is of no concern here."""
        found: dict[str, Any] = {}
        for name in (*_DEFAULTED, "max_new_tokens"):
            value = config.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                integral = name in ("top_k", "max_new_tokens")
                found[name] = int(value) if integral else float(value)
        return cls(**found)


def output_limit(
    requested: int | None,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    default: int | None,
    prompt_param: str,
    limit_param: str,
) -> int:
    """How many tokens may be generated: what was asked for, cut to what the context leaves.

    Raises ContextLengthExceeded if the prompt leaves no room, InvalidRequest if more was asked for
    than the context could ever hold.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:  # also for none: the engine makes at least one, which is then dropped
        raise context_exceeded(max_model_len, num_prompt_tokens, prompt_param)
    if requested is None:
        return room if default is None else min(default, room)
    if requested > max_model_len:
        raise InvalidRequest(
            f"{limit_param} ({requested}) cannot be greater than the model's context length "
            f"max_model_len ({max_model_len}).",
            param=limit_param,
        )
    return min(requested, room)


def context_exceeded(
    max_model_len: int, num_prompt_tokens: int | None, param: str
) -> ContextLengthExceeded:
    """Clients match the words 'maximum context length is N tokens'."""
    if num_prompt_tokens is None:
        asked = "your prompt is longer than that"
    else:
        asked = f"your prompt has {num_prompt_tokens} tokens, which leaves no room for an answer"
    return ContextLengthExceeded(
        f"This model's maximum context length is {max_model_len} tokens. However, {asked}. "
        "Please reduce the length of the input prompt.",
        param=param,
    )


def sampling_params(
    body: SamplingBody,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    vocab_size: int,
    structured: StructuredOutput | None,
) -> SamplingParams:
    """The parameters of one generation; seeds of further choices are the caller's."""
    chosen: dict[str, Any] = {}
    for name in _DEFAULTED:
        value = getattr(body, name)
        if value is None:
            value = getattr(defaults, name)
        if value is not None:
            chosen[name] = value
    if chosen.get("top_p") == 0:
        chosen["top_p"], chosen["top_k"] = 1.0, 1
    if chosen.get("top_k") == -1:
        chosen["top_k"] = 0
    if "top_k" in chosen:
        chosen["top_k"] = min(chosen["top_k"], vocab_size)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens ({min_tokens}) must not be greater than max_tokens ({max_tokens}).",
            param="min_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=body.seed,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=_token_ids(body.stop_token_ids, vocab_size, "stop_token_ids") or [],
        bad_words=body.bad_words or [],
        logit_bias=logit_bias(body.logit_bias, vocab_size),
        allowed_token_ids=_token_ids(body.allowed_token_ids, vocab_size, "allowed_token_ids"),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured=structured,
        thinking_token_budget=body.thinking_token_budget,
        extra_args=body.vllm_xargs,
        **chosen,
    )


def _token_ids(ids: list[int] | None, vocab_size: int, param: str) -> list[int] | None:
    bad = [token_id for token_id in ids or [] if token_id >= vocab_size]
    if bad:
        raise InvalidRequest(
            f"{param} holds ids outside the vocabulary (0 to {vocab_size - 1}): {bad[:10]}.",
            param=param,
        )
    return ids


def logit_bias(bias: Mapping[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    """Token ids to biases, clamped to ±100. Raises InvalidRequest that names every bad key."""
    if not bias:
        return None
    result: dict[int, float] = {}
    bad: list[str] = []
    for key, value in bias.items():
        digits = key.strip()
        if len(digits) < 12 and digits.isascii() and digits.isdigit() and int(digits) < vocab_size:
            result[int(digits)] = max(-100.0, min(100.0, value))
        else:
            bad.append(key[:32])
    if bad:
        raise InvalidRequest(
            f"logit_bias keys must be token ids from 0 to {vocab_size - 1}, written as strings; "
            f"not {', '.join(map(repr, bad[:10]))}.",
            param="logit_bias",
        )
    return result


def structured_output(body: SamplingBody) -> StructuredOutput | None:
    """The constraint that `response_format` or `structured_outputs` asks for."""
    constraint = _from_structured_outputs(body)
    if constraint is not None:
        return constraint
    form = body.response_format
    if isinstance(form, JsonObjectFormat):
        return StructuredOutput(json_object=True)
    if isinstance(form, JsonSchemaResponseFormat):
        schema = form.json_schema.schema_
        if schema is None:
            raise InvalidRequest(
                "response_format of type json_schema needs a schema.",
                param="response_format.json_schema.schema",
                code="missing_required_parameter",
            )
        return StructuredOutput(json_schema=schema)
    if isinstance(form, StructuralTagFormat):
        return StructuredOutput(structural_tag=orjson.dumps(form.model_dump()).decode())
    return None


def constrained_by_extension(body: SamplingBody) -> bool:
    """Whether the constraint is one of `structured_outputs`, not of `response_format`."""
    return _from_structured_outputs(body) is not None


def constraint_param(body: SamplingBody) -> str | None:
    """The field of the request that constrains the output."""
    if body.structured_outputs is not None:
        return "structured_outputs"
    return None if body.response_format is None else "response_format"


def _from_structured_outputs(body: SamplingBody) -> StructuredOutput | None:
    asked = body.structured_outputs
    if asked is None:
        return None
    constraints = {
        "json": asked.json_schema,
        "json_object": asked.json_object or None,
        "regex": asked.regex,
        "choice": asked.choice,
        "grammar": asked.grammar,
        "structural_tag": asked.structural_tag,
    }
    named = [name for name, value in constraints.items() if value is not None]
    if len(named) > 1:
        raise InvalidRequest(
            f"structured_outputs takes one constraint, not {len(named)}: {', '.join(named)}.",
            param="structured_outputs",
        )
    if named and body.response_format is not None and body.response_format.type != "text":
        raise InvalidRequest(
            "Use either response_format or structured_outputs, not both.",
            param="structured_outputs",
        )
    if not named:
        return None
    return StructuredOutput(
        json_schema=asked.json_schema,
        json_object=bool(asked.json_object),
        regex=asked.regex,
        choice=asked.choice,
        grammar=asked.grammar,
        structural_tag=asked.structural_tag,
        disable_any_whitespace=asked.disable_any_whitespace,
        whitespace_pattern=asked.whitespace_pattern,
    )


def for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """The parameters of choice `index` of a prompt: another seed.

    Seeds are int64; the one after the largest is the smallest.
    """
    if not index:
        return sampling
    seed = sampling.seed
    if seed is not None:
        seed = (seed + index + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(sampling, seed=seed)


def check_stream_options(body: SamplingBody) -> None:
    """Raises InvalidRequest for options of a stream that is none (an empty object is let pass)."""
    if body.stream_options is None or body.stream:
        return
    if body.stream_options.model_fields_set:
        raise InvalidRequest(
            "stream_options is only allowed with stream=true.", param="stream_options"
        )
