"""Which pipelines make the fleet: a packing of columns under the numbers of machines.

Objectives are linear but for throughput per dollar, which is found by Dinkelbach's method: the
best ratio λ is the one at which max Σ (rps − λ · price) is 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placement.optimizer.cluster import Cluster
from placement.optimizer.columns import Column
from placement.optimizer.programs import Program, Solution, solve_program
from placement.plan import Goal
from placement.roofline import Array

_TIES = 1e-9
_MAX_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The fleet's program without its objective.

    rps, price, counts: [column], [column], [column, class]. has_spot: [column]; in_zone: by zone,
    [column], whether a pipeline needs it. extra: further rows, each with its limit.
    """

    goal: Goal
    rps: Array
    price: Array
    counts: Array
    limits: Array
    has_spot: Array
    in_zone: dict[str, Array]
    extra: tuple[tuple[Array, float], ...] = ()

    def program(self, profit: Array, extra: Sequence[tuple[Array, float]] = ()) -> Program:
        """Maximise profit · x under the goal's limits and extra ones, row · x ≤ limit."""
        limited = [
            *zip(self.counts.T, self.limits, strict=True),
            *self._goal_rows(),
            *self.extra,
            *extra,
        ]
        return Program(
            profit=profit,
            rows=np.array([row for row, _ in limited]),
            limits=np.array([limit for _, limit in limited]),
        )

    def _goal_rows(self) -> list[tuple[Array, float]]:
        """Rows of the goal's limits, in the order in which `duals` reads them."""
        goal = self.goal
        rows = []
        if goal.max_price_usd_per_hour is not None:
            rows.append((self.price, goal.max_price_usd_per_hour))
        if goal.load_rps is not None:
            # More than the whole load counts for nothing: a tighter relaxation.
            rows.append((-np.minimum(self.rps, goal.load_rps) / goal.load_rps, -1.0))
        if goal.on_demand_share > 0:
            rows.append(((goal.on_demand_share - 1 + self.has_spot) * self.rps, 0.0))
        if goal.max_zone_share < 1:
            shares = [needs - goal.max_zone_share for needs in self.in_zone.values()]
            rows += [(share * self.rps, 0.0) for share in shares]
        return rows

    def duals(self, values: Array) -> Duals:
        """A program's duals by what they are of."""
        goal, rest = self.goal, [float(dual) for dual in values[self.counts.shape[1] :]]
        return Duals(
            goal=goal,
            counts=values[: self.counts.shape[1]],
            price=rest.pop(0) if goal.max_price_usd_per_hour is not None else 0.0,
            load=rest.pop(0) if goal.load_rps is not None else 0.0,
            on_demand=rest.pop(0) if goal.on_demand_share > 0 else 0.0,
            zones=dict(zip(self.in_zone, rest, strict=True)) if goal.max_zone_share < 1 else {},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Duals:
    """What one more unit of each limit is worth: [class] machines, a dollar, the load, shares."""

    goal: Goal
    counts: Array
    price: float
    load: float
    on_demand: float
    zones: dict[str, float]

    def pools(
        self, cluster: Cluster, rps_worth: float
    ) -> Iterator[tuple[NDArray[np.bool_], float]]:
        """Classes, [class], and what a request per second of a pipeline that uses all markets and
        zones among them is worth; pipelines that use fewer are worth no less in another pool."""
        is_spot = np.array([one.is_spot for one in cluster.classes])
        zone = np.array([one.zone for one in cluster.classes])
        markets = (False, True) if self.on_demand and is_spot.any() else (bool(is_spot.any()),)
        for has_spot in markets:
            for zones in self._zone_sets():
                classes = np.full(len(zone), True) if zones is None else np.isin(zone, zones)
                classes &= has_spot | ~is_spot
                if classes.any():
                    yield classes, self._worth(rps_worth, has_spot, zones or ())

    def _zone_sets(self) -> Iterator[tuple[str, ...] | None]:
        dual = [zone for zone, worth in self.zones.items() if worth]
        if not dual:
            yield None
            return
        names = sorted(self.zones)
        for size in range(1, len(names) + 1):
            yield from itertools.combinations(names, size)

    def _worth(self, rps_worth: float, has_spot: bool, zones: Sequence[str]) -> float:
        goal = self.goal
        worth = rps_worth
        if goal.load_rps is not None:
            worth += self.load / goal.load_rps
        worth -= self.on_demand * (goal.on_demand_share - 1 + has_spot)
        for zone, dual in self.zones.items():
            worth -= dual * ((zone in zones) - goal.max_zone_share)
        return worth


def make_packing(cluster: Cluster, columns: Sequence[Column]) -> Packing:
    num = len(cluster.classes)
    zones = sorted({one.zone for one in cluster.classes})
    counts = np.array([column.counts(num) for column in columns], dtype=np.float64)
    counts = counts.reshape(len(columns), num)
    spot = np.array([one.is_spot for one in cluster.classes])
    return Packing(
        goal=cluster.goal,
        rps=np.array([column.rps for column in columns]),
        price=np.array([column.price_usd_per_hour for column in columns]),
        counts=counts,
        limits=cluster.counts.astype(np.float64),
        has_spot=(counts[:, spot].sum(axis=1) > 0).astype(np.float64),
        in_zone={
            zone: (counts[:, [one.zone == zone for one in cluster.classes]].sum(axis=1) > 0).astype(
                np.float64
            )
            for zone in zones
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """numbers: [column], pipelines of each. value, bound: of the goal's objective."""

    numbers: tuple[int, ...]
    value: float
    bound: float


def best_fleet(
    packing: Packing, *, time_limit_s: float = np.inf, known: Fleet | None = None
) -> Fleet | None:
    """The best fleet of these columns; None where no fleet meets the goal's limits.

    time_limit_s: of each of a few programs; after it the best found is taken, None if none was.
    known: a fleet of the first of these columns, for when that finds nothing better.
    """
    if not len(packing.rps):
        return None
    methods = {"throughput": _throughput, "cost-for-load": _cost, "throughput-per-dollar": _ratio}
    found = methods[packing.goal.objective](packing, time_limit_s)
    again = None if known is None else _again(packing, known)
    if again is None or (found is not None and not is_better(again, found, packing.goal)):
        return found
    return again if found is None else replace(again, bound=found.bound)


def _again(packing: Packing, fleet: Fleet) -> Fleet | None:
    """A fleet of the first of these columns, its bound not known; None if limits are exceeded."""
    x = np.zeros(len(packing.rps))
    x[: len(fleet.numbers)] = fleet.numbers
    program = packing.program(packing.rps)
    if (program.rows @ x > program.limits + _TIES * np.abs(program.limits)).any():
        return None
    return _fleet(packing, x, 0.0 if packing.goal.objective == "cost-for-load" else np.inf)


def is_better(one: Fleet, other: Fleet, goal: Goal) -> bool:
    return one.value < other.value if goal.objective == "cost-for-load" else one.value > other.value


def _throughput(packing: Packing, limit_s: float) -> Fleet | None:
    best = solve_program(packing.program(packing.rps), is_integer=True, time_limit_s=limit_s)
    if best is None:
        return None
    enough = (-packing.rps, -best.value * (1 - _TIES))
    return _fleet(packing, _prefer(packing, -packing.price, enough, best, limit_s), best.bound)


def _cost(packing: Packing, limit_s: float) -> Fleet | None:
    best = solve_program(packing.program(-packing.price), is_integer=True, time_limit_s=limit_s)
    if best is None:
        return None
    cheap = (packing.price, -best.value * (1 + _TIES))
    return _fleet(packing, _prefer(packing, packing.rps, cheap, best, limit_s), -best.bound)


def _ratio(packing: Packing, limit_s: float) -> Fleet | None:
    """Dinkelbach: from any fleet, raise λ to its ratio until no fleet gains at λ."""
    some = solve_program(packing.program(packing.rps), is_integer=True, time_limit_s=limit_s)
    if some is None or some.value <= 0:
        return None
    bound = np.inf
    for _ in range(_MAX_STEPS):
        ratio = float(packing.rps @ some.x / (packing.price @ some.x))
        gain = packing.rps - ratio * packing.price
        best = solve_program(packing.program(gain), is_integer=True, time_limit_s=limit_s)
        if best is None:
            break
        if best.value <= _TIES * float(packing.rps @ some.x) or not best.x.round().any():
            bound = ratio
            break
        some = best
    as_good = (-gain, _TIES * float(packing.rps @ some.x))
    return _fleet(packing, _prefer(packing, packing.rps, as_good, some, limit_s), bound)


def _prefer(
    packing: Packing, profit: Array, tie: tuple[Array, float], found: Solution, limit_s: float
) -> Array:
    """Of the fleets that are as good, the one with most profit."""
    best = solve_program(packing.program(profit, [tie]), is_integer=True, time_limit_s=limit_s)
    return found.x if best is None else best.x


def _fleet(packing: Packing, x: Array, bound: float) -> Fleet | None:
    numbers = x.round()
    if not numbers.any():
        return None
    rps, price = float(packing.rps @ numbers), float(packing.price @ numbers)
    return Fleet(
        numbers=tuple(int(number) for number in numbers),
        value=packing.goal.value(rps, price),
        bound=bound,
    )
