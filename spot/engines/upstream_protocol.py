"""A generation as a request to an upstream: pure functions for two endpoints of vLLM's.

- `/inference/v1/generate`: token ids in and out. Only with `--enable-scale-out`.
- `/v1/completions`: always there. Token ids come along with the text.

Both take token ids and end with the same tokens. Where they differ:

| | generate | completions |
|---|---|---|
| rank of the actual token | exact | a lower bound when it is not among the alternatives |
| `logprobs` of exactly the server's maximum | not all alternatives: not used | yes |
| `reasoning_ended` | yes | no: the engine finds out |

Neither streams prompt log probabilities: a generation that wants them is answered in one piece.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from spot.errors import InvalidRequest
from spot.generation import Generation, SamplingParams, StructuredOutput

Endpoint = Literal["generate", "completions"]

PATHS: dict[Endpoint, str] = {
    "generate": "/inference/v1/generate",
    "completions": "/v1/completions",
}

_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """One POST. is_streamed: whether the answer is an event stream or one JSON object."""

    path: str
    body: bytes
    is_streamed: bool


def choose_endpoint(generation: Generation, *, has_generate: bool, max_logprobs: int) -> Endpoint:
    """The endpoint that answers this generation exactly.

    `generate` counts the actual token as one of the alternatives, so it is asked for one more than
    wanted; where the server allows no more, `completions` has them all.
    """
    num_logprobs = generation.sampling.logprobs or 0
    return "generate" if has_generate and num_logprobs < max_logprobs else "completions"


def build_request(generation: Generation, endpoint: Endpoint, *, model: str) -> UpstreamRequest:
    """The request for a generation without output. Raises InvalidRequest."""
    is_streamed = generation.sampling.prompt_logprobs is None
    body: dict[str, Any] = {
        "model": model,
        "stream": is_streamed,
        "stream_options": {"include_usage": True} if is_streamed else None,
        "priority": generation.priority or None,
        "cache_salt": generation.cache_salt,
    }
    sampling = _sampling(generation.sampling)
    if endpoint == "generate":
        body |= _generate_fields(generation, sampling)
    else:
        body |= _completions_fields(generation, sampling)
    try:
        encoded = msgspec.json.encode(_without_none(body))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be sent to an engine: {error}") from error
    return UpstreamRequest(PATHS[endpoint], encoded, is_streamed)


def _generate_fields(generation: Generation, sampling: dict[str, Any]) -> dict[str, Any]:
    num_logprobs = generation.sampling.logprobs
    if num_logprobs is not None and num_logprobs > 0:
        sampling["logprobs"] = num_logprobs + 1
    sampling["extra_args"] = generation.sampling.extra_args
    sampling["detokenize"] = False
    return {
        "token_ids": generation.prompt_token_ids,
        "reasoning_ended": generation.reasoning_ended,
        "sampling_params": _without_none(sampling),
    }


def _completions_fields(generation: Generation, sampling: dict[str, Any]) -> dict[str, Any]:
    return sampling | {
        "prompt": generation.prompt_token_ids,
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "vllm_xargs": generation.sampling.extra_args,
    }


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """vLLM's names. All is said, even defaults: an upstream has defaults of its own."""
    if params.seed is not None and params.seed not in _INT64:
        raise InvalidRequest("seed must be a 64-bit integer", param="seed")
    return {
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "seed": params.seed,
        "ignore_eos": params.ignore_eos,
        "stop_token_ids": params.stop_token_ids,
        "bad_words": params.bad_words,
        "logit_bias": _logit_bias(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "structured_outputs": _structured(params.structured),
        "thinking_token_budget": params.thinking_token_budget,
    }


def _logit_bias(bias: dict[int, float] | None) -> dict[str, float] | None:
    """The biases, cut to vLLM's -100 to 100."""
    if bias is None:
        return None
    if not all(math.isfinite(value) for value in bias.values()):
        raise InvalidRequest("logit_bias values must be finite numbers", param="logit_bias")
    return {str(token_id): min(100.0, max(-100.0, value)) for token_id, value in bias.items()}


def _structured(constraint: StructuredOutput | None) -> dict[str, Any] | None:
    if constraint is None:
        return None
    schema = constraint.json_schema
    if schema is False:
        raise InvalidRequest("the JSON schema `false` allows no output", param="structured")
    return _without_none(
        {
            "json": {} if schema is True else schema,
            "json_object": constraint.json_object or None,
            "regex": constraint.regex,
            "choice": constraint.choice,
            "grammar": constraint.grammar,
            "structural_tag": constraint.structural_tag,
            "disable_any_whitespace": constraint.disable_any_whitespace,
            "whitespace_pattern": constraint.whitespace_pattern,
        }
    )


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
