"""How long one step of an engine takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes, summed over its sequences.

    num_prefill_tokens: new tokens of sequences that compute more than one.
    num_decode_seqs: sequences that compute one token (the line that attention kernels draw).
    prefill_context_tokens, decode_context_tokens: KV entries that either kind attends to, its new
        tokens included.
    prefill_pairs: (query, key) pairs of a causal mask, of sequences that compute more than one.
    num_seqs: all of them; each gets one row of logits.
    """

    num_prefill_tokens: int = 0
    num_decode_seqs: int = 0
    prefill_context_tokens: int = 0
    decode_context_tokens: int = 0
    prefill_pairs: int = 0
    num_seqs: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_seqs

    @property
    def context_tokens(self) -> int:
        return self.prefill_context_tokens + self.decode_context_tokens


class StepTime(Protocol):
    """The time model of one pipeline stage."""

    def step_s(self, work: StepWork) -> float:
        """Seconds for one step of this stage, without queueing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearStepTime:
    """A step time linear in the work, in seconds: a fixed part and one part per kind of work."""

    base_s: float
    per_prefill_token_s: float = 0.0
    per_decode_seq_s: float = 0.0
    per_context_token_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative")

    def step_s(self, work: StepWork) -> float:
        return (
            self.base_s
            + self.per_prefill_token_s * work.num_prefill_tokens
            + self.per_decode_seq_s * work.num_decode_seqs
            + self.per_context_token_s * work.context_tokens
        )
