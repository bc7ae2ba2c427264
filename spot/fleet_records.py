"""What the fleet knows of each pipeline and of each generation in flight.

starting ──ready──▶ serving ──drain──▶ draining ──empty──▶ gone
    ▲                  │                                    ▲
    └──── lost ────────┘            (remove, from any) ─────┘
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from spot.engines.base import Resume
from spot.generation import Generation
from spot.resume import continues_exactly

PipelineState = Literal["starting", "serving", "draining", "gone"]

_TRANSITIONS: dict[PipelineState, frozenset[PipelineState]] = {
    "starting": frozenset({"serving", "draining", "gone"}),
    "serving": frozenset({"starting", "draining", "gone"}),
    "draining": frozenset({"gone"}),
    "gone": frozenset(),
}


class IllegalTransition(ValueError):
    """A pipeline cannot go from its state to that one."""


@dataclass(slots=True, eq=False)
class Live:
    """A generation in flight.

    came_s, due_s: when it came, and that less its head start. output: what it has put out so far.
    leg: how often it was started. num_leg_tokens: since the last start. num_fruitless: pipelines
    lost in a row without a token in between.
    avoids: these pipelines; it is tried elsewhere first.
    next_boundary: number of output tokens at which its sub-node ends.
    """

    generation: Generation
    order: int
    came_s: float = 0.0
    due_s: float = 0.0
    output: list[int] = field(default_factory=list)
    pipeline_id: str | None = None
    leg: int = 0
    started_s: float = 0.0
    progress_s: float = 0.0
    num_leg_tokens: int = 0
    num_fruitless: int = 0
    num_migrations: int = 0
    is_moving: bool = False
    not_before_s: float = 0.0
    stranded_since_s: float | None = None
    avoids: set[str] = field(default_factory=set)
    next_boundary: int = 1

    @property
    def rank(self) -> tuple[int, float, int]:
        """Lower goes first."""
        return self.generation.priority, self.due_s, self.order

    def yields_to(self, other: Live, *, margin_s: float, num_few: int) -> bool:
        """Whether it gives its seat to another one that waits.

        To one of a lower priority; a ranked one also to one that is due earlier by a margin, unless
        it has but a few tokens to go: coming back costs more than those.
        """
        if other.generation.priority != self.generation.priority:
            return other.generation.priority < self.generation.priority
        num_left = self.generation.sampling.max_tokens - len(self.output)
        is_ranked = self.generation.head_start_s is not None and num_left > num_few
        return is_ranked and other.due_s + margin_s < self.due_s

    @property
    def remaining(self) -> Generation:
        """The generation as another engine takes it on."""
        if not self.output:
            return self.generation
        return msgspec.structs.replace(self.generation, output_token_ids=list(self.output))

    @property
    def num_context(self) -> int:
        """Tokens that a start must compute, if nothing is cached."""
        return len(self.generation.prompt_token_ids) + len(self.output)

    def can_go_on_at(self, pipeline: Pipeline) -> bool:
        """Whether it would continue there as if it had never left."""
        if not self.output or self.generation.allow_inexact_resume:
            return True
        return continues_exactly(self.generation.sampling, pipeline.resume)


@dataclass(slots=True, eq=False)
class Pipeline:
    """One pipeline as the fleet sees it.

    weight: expected throughput, in any unit that all pipelines share.
    num_seats: generations that its engine runs at once.
    step_s: usual time between two tokens of one generation there.
    prefill_tokens_per_s: how fast long prompts usually come to their first token.
    tokens_per_s: observed, over the last seconds.
    deadline_s: when a draining pipeline must be empty.
    """

    id: str
    weight: float = 1.0
    state: PipelineState = "starting"
    num_seats: int = 0
    block_size: int = 16
    resume: Resume = "prompt"
    legs: dict[str, Live] = field(default_factory=dict)
    progress_s: float = 0.0
    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    tokens_per_s: float = 0.0
    num_tokens: int = 0
    num_counted: int = 0
    num_failures: int = 0
    closed_until_s: float = 0.0
    deadline_s: float | None = None
    cause: str = ""
    num_migrated_in: int = 0
    num_migrated_out: int = 0
    correction: float = 1.0

    @property
    def load(self) -> float:
        return len(self.legs) / max(1, self.num_seats)

    def become(self, state: PipelineState) -> None:
        """Raises IllegalTransition."""
        if state not in _TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.id} cannot go from {self.state} to {state}")
        self.state = state

    def seat(self, live: Live, now_s: float) -> None:
        """A generation starts here, for the first time or again."""
        if not self.legs:
            self.progress_s = now_s  # it owed nothing until now
        self.legs[live.generation.id] = live
        self.num_migrated_in += live.is_moving
        live.is_moving = False
        live.pipeline_id = self.id
        live.leg += 1
        live.started_s = live.progress_s = now_s
        live.num_leg_tokens = 0
        live.next_boundary = len(live.output) + 1

    def unseat(self, live: Live) -> None:
        del self.legs[live.generation.id]
        live.pipeline_id = None
