"""The yardsticks that make priorities free of units: running quantiles, frozen for a while."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from math import ceil


class RunningQuantile:
    """A quantile of the last `window` values; O(window) memory moves for each, which is little."""

    def __init__(self, share: float, *, window: int) -> None:
        self._share = share
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._window = window

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float) -> None:
        if len(self._recent) == self._window:
            oldest = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._recent.append(value)
        insort(self._sorted, value)

    @property
    def value(self) -> float | None:
        """None before the first value."""
        return self.at(self._share)

    def at(self, share: float) -> float | None:
        """Another quantile of the same values."""
        if not self._sorted:
            return None
        return self._sorted[max(0, ceil(share * len(self._sorted)) - 1)]


class Scale:
    """What a priority is measured in: the median service of a run, and the p95 of φ.

    Both follow recent runs, but in steps: they stay as they are until they have drifted by `drift`,
    so that the keys of queued tickets remain comparable. Each step begins a new `epoch`, after
    which every key has to be computed anew; between two steps there are at least as many samples
    as in half a window once the window is full.
    """

    def __init__(self, *, window: int, drift: float) -> None:
        self.service_s = 1.0
        self.contribution = 1.0
        self.epoch = 0
        self._drift = drift
        self._services = RunningQuantile(0.5, window=window)
        self._contributions = RunningQuantile(0.95, window=window)
        self._num_until_check = 0

    def add_service(self, service_s: float) -> None:
        """The predicted total service of a run that arrived."""
        if service_s > 0:
            self._services.add(service_s)
            self._num_until_check -= 1

    def add_contribution(self, contribution: float) -> None:
        """The φ of a node, in medians of service."""
        if contribution > 0:
            self._contributions.add(contribution)

    def update(self) -> bool:
        """Take a step if it is time. Returns whether there is a new epoch."""
        median_s = self._services.value
        if median_s is None or self._num_until_check > 0:
            return False
        self._num_until_check = min(len(self._services) // 2, 256)
        p95 = self._contributions.value or self.contribution
        is_first = self.epoch == 0
        if not is_first and not self._has_drifted(median_s, p95):
            return False
        self.service_s, self.contribution = median_s, p95
        self.epoch += 1
        return True

    def _has_drifted(self, service_s: float, contribution: float) -> bool:
        most = 1 + self._drift
        ratios = (service_s / self.service_s, contribution / self.contribution)
        return any(ratio > most or ratio * most < 1 for ratio in ratios)
