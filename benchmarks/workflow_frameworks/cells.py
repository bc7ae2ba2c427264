"""Which measurements there are, how many runs each has, and how that fits into a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.workflow_frameworks.workload import Workload

Loop = Literal["closed", "open"]
DUPLICATE_SHARES = (0.0, 0.05, 0.15)
_START_S = 6.0  # of a process with a framework, its warm-up and its end
_REACHED = 0.6  # of what the machine could do at most, before anything is measured


@dataclass(frozen=True, slots=True)
class Level:
    """Of load. level: see `Cell`. num_runs: if time allows; min_runs: in any case.

    is_extreme: of its kind the one that counts; lighter ones are measured with the fewest and the
    most duplicates only.
    """

    loop: Loop
    level: float
    num_runs: int
    min_runs: int
    is_extreme: bool = False


HIGHEST_LOAD = Level("open", 0.95, 150, 60, is_extreme=True)
_LEVELS: Mapping[Workload, Sequence[Level]] = {
    "mixed": (
        Level("closed", 6, 40, 20),
        Level("closed", 30, 60, 30),
        Level("closed", 100, 120, 100, is_extreme=True),
        Level("open", 0.5, 40, 20),
        Level("open", 0.8, 60, 20),
        HIGHEST_LOAD,
    ),
    "research": (
        Level("closed", 30, 60, 30),
        Level("open", 0.95, 80, 30),
    ),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison of all systems.

    level: the number of clients of a closed loop; of an open one, the share of the saturation
    throughput of the best framework. limit_s: after it no further run begins. repeats: how often
    each system is measured.
    """

    workload: Workload
    loop: Loop
    level: float
    duplicate_share: float
    num_runs: int
    min_runs: int = 1
    limit_s: float = 60.0
    repeats: int = 1

    @property
    def name(self) -> str:
        level = f"{self.level:.0f} clients" if self.loop == "closed" else f"{self.level:.0%} load"
        return f"{self.workload}, {level}, {self.duplicate_share:.0%} duplicates"


def all_cells(
    workloads: Sequence[Workload],
    duplicate_shares: Sequence[float],
    *,
    heaviest_only: bool = False,
    repeats: int = 1,
) -> list[Cell]:
    """The full comparison. Closed loops come first: they tell how much an open one is offered.

    heaviest_only: of each loop the level that counts, where there are several. repeats: of those
    levels; others are measured once.
    """
    ends = (min(duplicate_shares), max(duplicate_shares))
    return [
        Cell(
            *(workload, one.loop, one.level, share, one.num_runs, one.min_runs),
            repeats=repeats if _counts(workload, one) else 1,
        )
        for workload in workloads
        for one in _LEVELS[workload]
        if _counts(workload, one) or not heaviest_only
        for share in (duplicate_shares if one.is_extreme else sorted(set(ends)))
    ]


def _counts(workload: Workload, level: Level) -> bool:
    """Whether it is the level of its loop, or one of several that are alike."""
    return level.is_extreme or not any(one.is_extreme for one in _LEVELS[workload])


def quick_cells(workloads: Sequence[Workload]) -> list[Cell]:
    """A few runs of everything, to see that it works."""
    loops: tuple[tuple[Loop, float], ...] = (("closed", 4.0), ("open", HIGHEST_LOAD.level))
    return [
        Cell(workload, loop, level, DUPLICATE_SHARES[-1], num_runs=8, limit_s=30.0)
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
        total_s += num_systems * cell.repeats * (_START_S + cell.num_runs / rate)
    return total_s


def fitted(
    cells: Sequence[Cell],
    runs_per_s: Mapping[Workload, float],
    *,
    num_systems: int,
    budget_s: float,
) -> list[Cell]:
    """The cells with fewer runs, if they would take longer than the budget.

    None gets fewer than its minimum; so a budget that is much too small is not kept.
    """
    fewer: list[Cell] = list(cells)
    for percent in range(100, 0, -5):
        fewer = [replace(cell, num_runs=_scaled(cell, percent / 100)) for cell in cells]
        if expected_s(fewer, runs_per_s, num_systems) <= budget_s:
            break
    return fewer


def _scaled(cell: Cell, scale: float) -> int:
    return max(cell.min_runs, round(scale * cell.num_runs))
