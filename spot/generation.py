"""A generation: one sequence being generated, and all that is needed to go on with it anywhere."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length"]


class StructuredOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """A constraint on the output. Exactly one of the first six fields is set."""

    json_schema: dict[str, Any] | str | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are chosen and when to stop. Token ids only: stop strings are the gateway's.

    logprobs: number of alternatives per output token besides the sampled one, or None for none.
        -1 asks for the whole vocabulary.
    prompt_logprobs: the same for each prompt token.
    stop_token_ids: these end the generation as `stop`; the stop token is the last output id.
    top_k: 0 means no limit.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    bad_words: list[str] = []
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None
    thinking_token_budget: int | None = None
    extra_args: dict[str, Any] | None = None


class Generation(msgspec.Struct, omit_defaults=True):
    """One sequence being generated.

    id: unique among all live generations; never taken from a client.
    output_token_ids: what it has put out so far, on whichever engine. Limits in `sampling` count
        from the first of these.
    via: servers that it has come through, should it have come from one that has this as upstream.
    allow_inexact_resume: after the loss of its engine it may go on where penalties, constraints
        and seeds see only what comes after.
    head_start_s: among generations of the same priority it counts as having come so much earlier
        than it did (below 0: later), and may lose its seat to one that counts as earlier still.
        None for one that has no rank beside its arrival.
    reasoning_ended: for constrained output behind a reasoning parser; None lets the engine
        find out.
    """

    id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    reasoning_ended: bool | None = None
    output_token_ids: list[int] = []
    allow_inexact_resume: bool = False
    via: list[str] = []
    head_start_s: float | None = None


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log probabilities at one position.

    token_ids, logprobs: the actual token first, then the most likely ones in falling order
        (the actual token appears again there if it is among them).
    rank: 1-based rank of the actual token in the vocabulary.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class TokenDelta(msgspec.Struct, array_like=True, omit_defaults=True):
    """What an engine adds to one generation in one step, or in several merged ones.

    logprobs: one entry per token id, if asked for.
    prompt_logprobs: on the first delta only, one entry per prompt token, the first one None.
    finish_reason: set on the last delta only. `stop_token_id` is the stop token that was hit,
        None for the model's own end-of-sequence token.
    num_cached_tokens, queue_s: on the first delta: prompt tokens found in the prefix cache, and the
        time that the generation waited for a seat in the engine.
    num_migrations: how often the generation lost its engine and went on elsewhere before this.
    """

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int | None = None
    queue_s: float | None = None
    num_migrations: int = 0

    def merge(self, later: TokenDelta) -> None:
        """Append `later` to this delta, in place. Whoever merges owns this delta's lists."""
        self.token_ids.extend(later.token_ids)
        if later.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(later.logprobs)
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        if later.num_cached_tokens is not None:
            self.num_cached_tokens = later.num_cached_tokens
        if later.queue_s is not None:
            self.queue_s = later.queue_s
        self.num_migrations += later.num_migrations
        self.finish_reason = later.finish_reason
        self.stop_token_id = later.stop_token_id
