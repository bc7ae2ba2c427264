"""How often an operation is repeated, and which of its times counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from placement.calibration.clock import busy_s

Operation = Callable[[int], object]
Stopwatch = Callable[[Operation], float]

_REPEATS = 15
_LEAST_REPEATS = 3
_BUDGET_S = 0.4
_GRAPH_REPEATS = 10


def typical_s(times: Sequence[float]) -> float:
    """The lower quartile: others on the machine make a time longer, never shorter."""
    return sorted(times)[len(times) // 4]


def cpu_stopwatch(operation: Operation) -> float:
    """Typical seconds of `operation(i)`, i = 0, 1, …, on a CPU, without waiting for a core."""
    operation(0)
    operation(1)
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < _LEAST_REPEATS or (
        len(times) < _REPEATS and time.perf_counter() - begun < _BUDGET_S
    ):
        before = busy_s()
        operation(len(times))
        times.append(busy_s() - before)
    return typical_s(times)


def cuda_stopwatch(torch: Any) -> Stopwatch:
    """As `cpu_stopwatch`, on the current CUDA device, in a CUDA graph as engines replay it.

    An operation that cannot be captured is launched as it is.
    """

    def stopwatch(operation: Operation) -> float:
        for index in range(2):
            operation(index)
        torch.cuda.synchronize()
        replay = _captured(torch, operation)
        times: list[float] = []
        begun = time.perf_counter()
        while len(times) < _LEAST_REPEATS or (
            len(times) < _REPEATS and time.perf_counter() - begun < _BUDGET_S
        ):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / _GRAPH_REPEATS)
        return typical_s(times)

    return stopwatch


def _captured(torch: Any, operation: Operation) -> Callable[[], object]:
    """`_GRAPH_REPEATS` of the operation, to be run at once."""

    def repeat() -> None:
        for index in range(_GRAPH_REPEATS):
            operation(index)

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            repeat()
    except RuntimeError:
        torch.cuda.synchronize()
        return repeat
    replay: Callable[[], object] = graph.replay
    return replay
