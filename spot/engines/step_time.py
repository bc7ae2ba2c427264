"""How long one step of an engine takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class StepTime(Protocol):
    """The time model of one pipeline stage."""

    def step_s(self, num_prefill_tokens: int, num_decode_seqs: int, context_tokens: int) -> float:
        """Seconds for one step of this stage, without queueing.

        num_prefill_tokens: new tokens of sequences that compute more than one.
        num_decode_seqs: sequences that compute one token.
        context_tokens: KV entries that the step attends to, summed over all of its sequences.
        """


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

    def step_s(self, num_prefill_tokens: int, num_decode_seqs: int, context_tokens: int) -> float:
        return (
            self.base_s
            + self.per_prefill_token_s * num_prefill_tokens
            + self.per_decode_seq_s * num_decode_seqs
            + self.per_context_token_s * context_tokens
        )
