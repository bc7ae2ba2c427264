"""Our sampling parameters as vLLM's, and vLLM's complaints as short messages."""

from __future__ import annotations

import math
import re
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from spot import generation as ours
from spot.engines.vllm_compat.constraint_cost import check_cost
from spot.engines.vllm_compat.refusal import Unservable
from spot.engines.vllm_compat.resume import KEY_PREFIX, mark_resumed

_MAX_MESSAGE_CHARS = 900
_SOURCE_POSITION = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
_PATH = re.compile(r"(?<![\w/])/(?:[\w.+-]+/)+[\w.+-]*")
_ABOUT_CONSTRAINT = re.compile(
    r"\b(?:grammar|regex|json schema|structured|choice)\b", re.IGNORECASE
)
_PARAMETER_SUFFIX = re.compile(r" \((?:parameter=\w+(?:, )?)?(?:value=.*)?\)$", re.DOTALL)
_INT64 = range(-(2**63), 2**63)
# What a request that cannot be served raises, ours or vLLM's. OverflowError: a number that fits no
# message to the engine.
REFUSALS = (Unservable, VLLMClientError, ValueError, OverflowError)


def to_vllm(params: ours.SamplingParams, *, num_resumed: int = 0) -> SamplingParams:
    """The same parameters for vLLM, for token deltas without detokenizing.

    num_resumed: so many tokens at the end of the prompt are output already. What was to be said of
        the prompt was said with the first of them.
    Raises Unservable, or vLLM's own ValueError or VLLMValidationError.
    """
    if any(str(name).startswith(KEY_PREFIX) for name in params.extra_args or ()):
        raise Unservable(f"names that start with {KEY_PREFIX} are reserved", "vllm_xargs")
    if params.seed is not None and params.seed not in _INT64:
        raise Unservable("seed must be a 64-bit integer", "seed")
    converted = SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed,
        ignore_eos=params.ignore_eos,
        stop_token_ids=list(params.stop_token_ids),
        bad_words=list(params.bad_words),
        logit_bias=_logit_bias(params.logit_bias),
        allowed_token_ids=params.allowed_token_ids,
        logprobs=params.logprobs,
        prompt_logprobs=None if num_resumed else params.prompt_logprobs,
        structured_outputs=_structured(params.structured),
        thinking_token_budget=params.thinking_token_budget,
        extra_args=params.extra_args,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )
    if num_resumed:
        mark_resumed(converted, num_resumed)
    return converted


def _logit_bias(bias: dict[int, float] | None) -> dict[int, float] | None:
    """The biases, cut to vLLM's -100 to 100."""
    if bias is None:
        return None
    if not all(math.isfinite(value) for value in bias.values()):
        raise Unservable("logit_bias values must be finite numbers", "logit_bias")
    return {token_id: min(100.0, max(-100.0, value)) for token_id, value in bias.items()}


def _structured(constraint: ours.StructuredOutput | None) -> StructuredOutputsParams | None:
    if constraint is None:
        return None
    schema = constraint.json_schema
    if isinstance(schema, bool):
        # `true` allows any JSON, `false` none at all; the grammar compilers know only objects.
        if not schema:
            raise Unservable("the JSON schema `false` allows no output", "structured")
        schema = {}
    check_cost(constraint)
    return StructuredOutputsParams(
        json=schema,
        json_object=True if constraint.json_object else None,
        regex=constraint.regex,
        choice=constraint.choice,
        grammar=constraint.grammar,
        structural_tag=constraint.structural_tag,
        disable_any_whitespace=constraint.disable_any_whitespace,
        whitespace_pattern=constraint.whitespace_pattern,
    )


def explain(error: BaseException) -> tuple[str, str | None]:
    """A message for the sender (under 1000 characters, no file paths) and the parameter's name."""
    param = getattr(error, "param", None) or getattr(error, "parameter", None)
    if param is None and _ABOUT_CONSTRAINT.search(str(error)):
        param = "structured"
    message = _PARAMETER_SUFFIX.sub("", str(error))
    message = _SOURCE_POSITION.sub("", message)
    message = _PATH.sub("<path>", message).strip() or type(error).__name__
    if len(message) > _MAX_MESSAGE_CHARS:
        message = message[:_MAX_MESSAGE_CHARS] + " …"
    return message, _our_name(param)


def _our_name(param: Any) -> str | None:
    if param is None:
        return None
    return "structured" if str(param).startswith("structured_outputs") else str(param)
