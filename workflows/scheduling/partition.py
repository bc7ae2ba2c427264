"""Which runs are long: far above the others in remaining service."""

from __future__ import annotations

from math import sqrt

from workflows.scheduling.active_run import ActiveRun
from workflows.scheduling.parameters import SchedulerParameters


class Partition:
    """Mean and deviation of Ŝ over active runs, kept up in O(1) for each change.

    A run becomes long above μ + η·σ, and short again below `long_hysteresis` of that: with few runs
    or little spread the labels of the paper's plain rule flap.
    """

    def __init__(self, parameters: SchedulerParameters) -> None:
        self._parameters = parameters
        self._count = 0
        self._sum_s = 0.0
        self._sum_squares = 0.0

    @property
    def count(self) -> int:
        return self._count

    @property
    def threshold_s(self) -> float | None:
        """τ = μ + η·σ; None while there are too few runs, or all are equal."""
        if self._count < self._parameters.min_long_sample:
            return None
        mean_s = self._sum_s / self._count
        variance = self._sum_squares / self._count - mean_s * mean_s
        if variance <= 1e-9 * mean_s * mean_s:
            return None
        return mean_s + self._parameters.long_sigmas * sqrt(variance)

    def add(self, run: ActiveRun, remaining_s: float) -> None:
        self._count += 1
        self._account(run, remaining_s, 0.0)

    def change(self, run: ActiveRun, remaining_s: float) -> None:
        """A run's Ŝ is another now."""
        self._account(run, remaining_s, run.counted_s)

    def remove(self, run: ActiveRun) -> None:
        self._count -= 1
        self._account(run, 0.0, run.counted_s)
        if not self._count:
            self._sum_s = self._sum_squares = 0.0

    def label(self, run: ActiveRun) -> bool:
        """Decide anew whether a run is long. Returns whether that changed."""
        was_long = run.is_long
        threshold_s = self.threshold_s
        if threshold_s is None:
            run.is_long = False
        elif was_long:
            run.is_long = run.counted_s >= self._parameters.long_hysteresis * threshold_s
        else:
            run.is_long = run.counted_s > threshold_s
        return run.is_long != was_long

    def _account(self, run: ActiveRun, remaining_s: float, before_s: float) -> None:
        self._sum_s += remaining_s - before_s
        self._sum_squares += remaining_s * remaining_s - before_s * before_s
        run.counted_s = remaining_s
