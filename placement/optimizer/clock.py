"""How long a search may take, and whom it tells how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from placement.errors import Infeasible, OutOfTime, Unmet

# Told the best value so far, and what no fleet can exceed.
OnProgress = Callable[[float, float], None]


@dataclass(slots=True, kw_only=True)
class Clock:
    """Time left, and whom to tell of progress: the best value so far and its bound."""

    time_limit_s: float
    on_progress: OnProgress | None = None
    started_s: float = field(default_factory=time.perf_counter)

    @property
    def passed_s(self) -> float:
        return time.perf_counter() - self.started_s

    @property
    def left_s(self) -> float:
        return max(self.time_limit_s - self.passed_s, 0.0)

    def is_over(self) -> bool:
        return self.passed_s > self.time_limit_s

    def half(self) -> Clock:
        """A clock for half of the time that is left. It may be given more, by its limit."""
        middle_s = (self.passed_s + self.time_limit_s) / 2
        return replace(self, time_limit_s=min(middle_s, self.time_limit_s))

    def tell(self, value: float, bound: float) -> None:
        if self.on_progress is not None:
            self.on_progress(value, bound)


def nothing_meets(
    clock: Clock, *, is_proven: bool = True, most_found: float | None = None
) -> Infeasible:
    """The error where machines hold the model and yet no fleet was found that meets the goal.

    is_proven: whether none can. most_found: requests per second of a fleet that serves too few.
    """
    if clock.is_over():
        most = (
            ""
            if most_found is None
            else f" (the most that one serves is {most_found:.4g} a second)"
        )
        return OutOfTime(
            f"no fleet was found in {clock.time_limit_s:.3g} s{most}; give it a longer time limit"
        )
    return Unmet(is_proven=is_proven)
