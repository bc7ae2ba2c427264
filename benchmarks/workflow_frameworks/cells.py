"""Which measurements there are, how many runs each has, and how that fits into a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.workflow_frameworks.workload import Workload

Loop = Literal["closed", "open"]
DUPLICATE_SHARES = (0.0, 0.05, 0.15)
_MIN_RUNS = 20
_START_S = 6.0  # of a process with a framework, its warm-up and its end
_REACHED = 0.6  # of what the machine could do at most, before anything is measured
# Lighter loads are offered with the fewest and the most duplicates only.
_HIGHEST_LOAD = 0.95
_ENDS = (DUPLICATE_SHARES[0], DUPLICATE_SHARES[-1])
# Concurrency or share of saturation -> runs, if time allows.
_CLOSED = {6: 40, 30: 60, 100: 120}
_OPEN = {0.5: 40, 0.8: 60, _HIGHEST_LOAD: 150}


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison of all systems.

    level: the number of clients of a closed loop; of an open one, the share of the saturation
    throughput of the best framework. limit_s: after it no further run begins.
    """

    workload: Workload
    loop: Loop
    level: float
    duplicate_share: float
    num_runs: int
    limit_s: float = 60.0

    @property
    def name(self) -> str:
        level = f"{self.level:.0f} clients" if self.loop == "closed" else f"{self.level:.0%} load"
        return f"{self.workload}, {level}, {self.duplicate_share:.0%} duplicates"


def all_cells(workloads: Sequence[Workload], duplicate_shares: Sequence[float]) -> list[Cell]:
    """The full comparison. Closed loops come first: they tell how much an open one is offered."""
    return [
        Cell(workload, loop, level, share, num_runs)
        for workload in workloads
        for loop, level, num_runs in _levels(workload)
        for share in duplicate_shares
        if loop == "closed" or level == _HIGHEST_LOAD or share in _ENDS
    ]


def _levels(workload: Workload) -> Iterator[tuple[Loop, float, int]]:
    closed: Mapping[int, int] = _CLOSED if workload == "mixed" else {30: 60}
    opened: Mapping[float, int] = _OPEN if workload == "mixed" else {_HIGHEST_LOAD: 80}
    for clients, num_runs in closed.items():
        yield "closed", clients, num_runs
    for share, num_runs in opened.items():
        yield "open", share, num_runs


def quick_cells(workloads: Sequence[Workload]) -> list[Cell]:
    """A few runs of everything, to see that it works."""
    loops: tuple[tuple[Loop, float], ...] = (("closed", 4.0), ("open", _HIGHEST_LOAD))
    return [
        Cell(workload, loop, level, DUPLICATE_SHARES[-1], 8, limit_s=30.0)
        for workload in workloads
        for loop, level in loops
    ]


def expected_s(
    cells: Sequence[Cell], runs_per_s: Mapping[Workload, float], num_systems: int
) -> float:
    """About how long the cells take. runs_per_s: what the machine could do at most."""
    total_s = 0.0
    for cell in cells:
        rate = _REACHED * runs_per_s[cell.workload]
        if cell.loop == "open":
            rate *= cell.level
        total_s += num_systems * (_START_S + cell.num_runs / rate)
    return total_s


def fitted(
    cells: Sequence[Cell],
    runs_per_s: Mapping[Workload, float],
    *,
    num_systems: int,
    budget_s: float,
) -> list[Cell]:
    """The cells with fewer runs, if they would take longer than the budget.

    None gets fewer than a closed loop has clients, nor than a minimum; so a budget that is much
    too small is not kept.
    """
    fewer: list[Cell] = list(cells)
    for percent in range(100, 0, -5):
        fewer = [replace(cell, num_runs=_scaled(cell, percent / 100)) for cell in cells]
        if expected_s(fewer, runs_per_s, num_systems) <= budget_s:
            break
    return fewer


def _scaled(cell: Cell, scale: float) -> int:
    least = max(_MIN_RUNS, int(cell.level)) if cell.loop == "closed" else _MIN_RUNS
    return min(cell.num_runs, max(least, round(scale * cell.num_runs)))
