"""λ: how much the mean counts against the maximum, by load and by the tail of latency.

The paper lets λ rise with load and fall with the tail, which rise together. Here the load sets it
and the tail relieves it: λ = clip(load/full, 0, 1) − β·max(0, (p99/p50)/ratio − 1), within 0..1,
and small changes are ignored.
"""

from __future__ import annotations

from math import expm1

from workflows.scheduling.parameters import SchedulerParameters
from workflows.scheduling.scale import RunningQuantile


class Tail:
    """How far the slowest runs are behind the median ones. Latency is from arrival to end."""

    def __init__(self, parameters: SchedulerParameters) -> None:
        self._parameters = parameters
        self._latencies = RunningQuantile(0.5, window=parameters.window)
        self.relief = 0.0

    def add(self, latency_s: float) -> None:
        self._latencies.add(latency_s)
        median_s = self._latencies.at(0.5) or 0.0
        p99_s = self._latencies.at(0.99) or 0.0
        if len(self._latencies) < self._parameters.min_long_sample or not median_s:
            return
        excess = p99_s / median_s / self._parameters.tail_ratio - 1
        self.relief = self._parameters.tail_relief * max(0.0, excess)


class Balance:
    """λ of one resource, from its load averaged over time.

    A batch can only wait, and a node only be split, while a slot is free, which is to say at a
    moment of low load; so the moment says nothing.
    """

    def __init__(self, parameters: SchedulerParameters) -> None:
        self._parameters = parameters
        self._average = 0.0
        self._load = 0.0
        self._updated_s = 0.0
        self.value = 0.0

    def update(self, *, load: float, relief: float, now_s: float, median_s: float) -> float:
        """load: dispatches that run or could be formed of what waits, for each slot, from now on.

        The average is exponential, over `load_memory` medians.
        """
        elapsed = (now_s - self._updated_s) / (self._parameters.load_memory * median_s)
        self._average += (self._load - self._average) * -expm1(-elapsed)
        self._load, self._updated_s = load, now_s
        target = min(max(self._average / self._parameters.full_load, 0.0), 1.0) - relief
        target = min(max(target, 0.0), 1.0)
        if abs(target - self.value) > self._parameters.lambda_hysteresis or target in (0.0, 1.0):
            self.value = target
        return self.value
