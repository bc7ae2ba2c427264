"""Column generation: fleets over sets of machines too many to list.

The fleet's program without integrality is solved over the columns known; its duals put a price on
each class of machines and a worth on each request per second, and the search for pipelines either
finds a column that is worth more than its machines, or proves that there is none. Then the
program's value bounds every fleet. The best integral fleet of the columns known is the answer.

Shares of markets and zones change what a request is worth, by the machines that a pipeline uses:
columns are sought in pools of classes, in each of which the worth is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from placement.optimizer.ceilings import machine_rps
from placement.optimizer.cluster import Cluster
from placement.optimizer.columns import Column
from placement.optimizer.fleet import Packing, make_packing
from placement.optimizer.pricing import best_ratio
from placement.optimizer.programs import Program, solve_program
from placement.roofline import Array

# Columns are sought until no ratio of worth to cost exceeds 1 by more than this.
_TOLERANCE = 1e-9
# Classes without a dual price cost this share of the mean, so that ratios stay finite.
_LEAST_COST = 1e-7
# The mean where nothing has a price: what is divided by it stays finite.
_NO_COST = 1e-200
_MAX_ROUNDS = 200
# Share of the duals of the best bound in those that are priced next: the program's alone jump far
# (Wentges, Weighted Dantzig-Wolfe decomposition, 1997).
_SMOOTHING = 0.5
_LEAST_EXCESS = 0.2
# Pipelines are priced up to this share of the gap that is left, and no more roughly than that.
_GAP_SHARE, _ROUGHEST = 0.25, 0.05


@dataclass(slots=True)
class Pool:
    """Columns found so far, one for each set of machines."""

    cluster: Cluster
    columns: dict[tuple[int, ...], Column] = field(default_factory=dict)

    def add(self, columns: list[Column]) -> int:
        """How many of them are new or better."""
        num = 0
        for column in columns:
            key = column.counts(len(self.cluster.classes))
            if key not in self.columns or column.rps > self.columns[key].rps * (1 + _TOLERANCE):
                self.columns[key] = column
                num += 1
        return num

    @property
    def packing(self) -> Packing:
        return make_packing(self.cluster, list(self.columns.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What a fleet is worth: Σ (rps_worth · rps − price_worth · price)."""

    rps_worth: float
    price_worth: float

    def profit(self, packing: Packing) -> Array:
        return self.rps_worth * packing.rps - self.price_worth * packing.price


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """bound: no fleet is worth more. costs: [class], duals that prove it: no pipeline's throughput
    is worth more than its machines cost, at `worth` for a request per second. duals: [row] of the
    program, from which they come."""

    bound: float
    costs: Array
    worth: float
    duals: Array


def generate(
    pool: Pool,
    aim: Aim,
    *,
    tolerance: float = _TOLERANCE,
    best: Relaxed | None = None,
    is_over: Callable[[], bool],
) -> Relaxed | None:
    """Add columns until none can help; None where the columns known meet no limits of the goal.

    best: what is proven so far for the same aim.
    """
    smoothing, roughest = _SMOOTHING, _ROUGHEST
    for _ in range(_MAX_ROUNDS):
        packing = pool.packing
        program = packing.program(aim.profit(packing))
        solution = solve_program(program, is_integer=False)
        if solution is None:
            return best
        known = _guess(pool.cluster, aim, program) if best is None else best.duals
        gap = np.inf
        if best is not None:
            gap = (best.bound - solution.value) / max(abs(solution.value), 1e-300)
        if gap <= tolerance:
            break
        share = 1.0 if best is None else smoothing
        duals = share * known + (1 - share) * solution.duals
        rough = min(max(_GAP_SHARE * gap, tolerance / 2), roughest)
        relaxed, num_new = _improve(pool, packing, program, duals, aim, rough, is_over)
        is_better = best is None or relaxed.bound < best.bound
        if is_better:
            best = relaxed
        if is_over():
            break
        if num_new == 0 and not is_better and smoothing == 0.0:
            if rough <= tolerance / 2:
                break
            # What is missing may be worth less than pricing has told apart.
            roughest = rough / 4
        # Duals in between are worth something as long as they lead on.
        smoothing = _SMOOTHING if num_new or is_better else 0.0
    return best


def _guess(cluster: Cluster, aim: Aim, program: Program) -> Array:
    """Duals to begin with: a machine is worth the throughput that it adds at most."""
    duals = np.zeros(len(program.limits))
    worth = aim.rps_worth * machine_rps(cluster) - aim.price_worth * cluster.prices
    duals[: len(cluster.classes)] = np.maximum(worth, 0.0)
    return duals


def _improve(
    pool: Pool,
    packing: Packing,
    program: Program,
    dual_values: Array,
    aim: Aim,
    tolerance: float,
    is_over: Callable[[], bool],
) -> tuple[Relaxed, int]:
    """One round of pricing in every pool of classes: the bound, and how many columns are new."""
    cluster, goal = pool.cluster, pool.cluster.goal
    duals = packing.duals(dual_values)
    costs = np.maximum(duals.counts, 0) + (aim.price_worth + duals.price) * cluster.prices
    floored = np.maximum(costs, _LEAST_COST * max(float(costs.mean()), _NO_COST))
    # Duals that are too high all over can be lowered, but for those that prices set a floor.
    least = 1.0 if aim.price_worth + duals.price else _LEAST_EXCESS
    num_new, excess, most_worth = 0, least, 0.0
    for classes, worth in duals.pools(cluster, aim.rps_worth):
        if worth <= 0:
            continue
        most_worth = max(most_worth, worth)
        priced = best_ratio(
            cluster,
            np.where(classes, cluster.counts, 0),
            floored,
            floor=least / worth,
            tolerance=tolerance,
            cap_rps=np.inf if aim.rps_worth else goal.load_rps or np.inf,
            is_over=is_over,
        )
        num_new += pool.add(priced.columns)
        excess = max(excess, priced.bound * worth)
    slack = float(cluster.counts @ (excess * floored - costs))
    if goal.max_price_usd_per_hour is not None:
        # What dollars are worth may be raised instead of what each machine is.
        budget = goal.max_price_usd_per_hour * (aim.price_worth + duals.price)
        owned = float(cluster.counts @ np.maximum(duals.counts, 0))
        spare = float(cluster.counts @ (floored - costs))
        slack = min(slack, (excess - 1) * (owned + budget) + excess * spare)
    if aim.rps_worth == 0 and not duals.on_demand and not any(duals.zones.values()):
        # All worth is the load's: it may be lowered instead of costs raised.
        slack = min(
            slack, duals.load * (1 - 1 / excess) + float(cluster.counts @ (floored - costs))
        )
    return Relaxed(
        bound=float(program.limits @ dual_values) + slack,
        costs=excess * floored,
        worth=most_worth,
        duals=dual_values,
    ), num_new
