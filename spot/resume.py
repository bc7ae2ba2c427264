"""What it takes to go on with a generation elsewhere, and who can do it."""

from __future__ import annotations

import msgspec

from spot.engines.base import Resume
from spot.generation import Generation, SamplingParams


def can_resume(generation: Generation, resume: Resume) -> bool:
    """Whether an engine with this capability continues the generation as its own would have.

    Without output there is nothing to continue: every engine can start it. A client may also allow
    that it goes on as well as it can.
    """
    if not generation.output_token_ids or generation.allow_inexact_resume:
        return True
    return continues_exactly(generation.sampling, resume)


def continues_exactly(sampling: SamplingParams, resume: Resume) -> bool:
    """Whether an engine with this capability takes output from elsewhere as its own."""
    if resume == "exact":
        return True
    is_seeded = sampling.seed is not None and sampling.temperature > 0
    if resume == "unseeded":
        return not is_seeded
    return not is_seeded and not _looks_back(sampling)


def _looks_back(sampling: SamplingParams) -> bool:
    """Whether the next token depends on which of the tokens before it are output."""
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.structured is not None
        or sampling.bad_words
        or sampling.thinking_token_budget is not None
        or sampling.extra_args
    )


def as_prompt(generation: Generation) -> Generation:
    """The same generation for an engine that knows no output before the first: output as prompt.

    Only for generations that `can_resume` allows there.
    """
    output = generation.output_token_ids
    if not output:
        return generation
    sampling = msgspec.structs.replace(
        generation.sampling,
        max_tokens=generation.sampling.max_tokens - len(output),
        min_tokens=max(0, generation.sampling.min_tokens - len(output)),
        prompt_logprobs=None,
    )
    return msgspec.structs.replace(
        generation,
        prompt_token_ids=[*generation.prompt_token_ids, *output],
        output_token_ids=[],
        sampling=sampling,
    )
