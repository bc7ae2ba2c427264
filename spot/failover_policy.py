"""When generations and pipelines are moved, waited for and given up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FailoverPolicy:
    """When to move, when to wait, when to give up. Times in seconds.

    max_migrations: of one generation. A preemption is none.
    max_fruitless: a generation that loses so many pipelines in a row without a token in between
        is taken for the cause.
    no_capacity_timeout_s: how long a generation waits while no pipeline could take it.
    backoff_s, max_backoff_s: before a generation that was lost without a token starts again;
        doubled each time, the first time there is none.
    stall_base_s, stall_steps, slowest_prefill_tokens_per_s: silence of a pipeline that is a fault
        is longer than all three together: a fixed time, so many of its usual steps, and what its
        unread prompts could take.
    resumed_prefill_budget: tokens that migrated generations may recompute on one pipeline at once.
    subnode_tokens: output tokens between two boundaries; None fits them to subnode_s.
    lookahead: generations given to a pipeline beyond its seats, as a share of these, so that a
        seat that comes free is taken in the next step.
    breaker_failures, breaker_s: failures in a row that close a pipeline, and for how long.
    canary_period_s: an idle pipeline is asked for a token about this often.
    drain_margin_s: before the deadline of a draining pipeline, when what still runs is moved.
    """

    max_migrations: int = 32
    max_fruitless: int = 3
    no_capacity_timeout_s: float = 120.0
    backoff_s: float = 0.25
    max_backoff_s: float = 5.0
    stall_base_s: float = 15.0
    stall_steps: float = 50.0
    slowest_prefill_tokens_per_s: float = 50.0
    resumed_prefill_budget: int = 16_384
    subnode_tokens: int | None = None
    subnode_s: float = 0.5
    lookahead: float = 0.125
    breaker_failures: int = 3
    breaker_s: float = 5.0
    drain_margin_s: float = 5.0
    canary_period_s: float = 30.0

    def retry_delay_s(self, num_fruitless: int) -> float:
        """How long a generation waits that lost so many pipelines in a row without a token."""
        if num_fruitless < 2:
            return 0.0
        delay_s: float = self.backoff_s * 2 ** (num_fruitless - 2)
        return min(delay_s, self.max_backoff_s)

    def is_suspect(self, num_fruitless: int) -> bool:
        """Whether a generation that loses one more pipeline so would be taken for the cause."""
        return num_fruitless >= self.max_fruitless - 1
