"""Fleets of clusters with too many sets of machines to list: column generation, aim by aim."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from placement.optimizer.ceilings import machine_rps
from placement.optimizer.clock import Clock, nothing_meets
from placement.optimizer.cluster import Cluster
from placement.optimizer.columns import Chosen, found_columns, search_sets
from placement.optimizer.even import even_columns
from placement.optimizer.fleet import Fleet, best_fleet
from placement.optimizer.generation import Aim, Pool, Relaxed, generate
from placement.optimizer.pricing import Priced, best_ratio, ratio_bound
from placement.optimizer.rates import Ints
from placement.optimizer.search import TOLERANCE

# Columns are sought to these shares of the bound, one after another; the next only as long as the
# gap is not closed.
_TOLERANCES = (5e-2, 1e-2, 1e-3)
_CLOSED = 1e-9
# The sets that could still matter are few enough below this gap.
_NARROW = 3e-3
_MAX_RATIO_STEPS = 20
_ROUGH = 0.02
# With so many sets of machines or fewer, those that could close the gap are searched one by one.
_MAX_CLOSED = 2000
# So many are looked through for those.
_MAX_SIFTED = 200_000
# A fleet's program may take so long, in seconds, when time is over.
_LAST_S = 0.5


class Generation:
    """A fleet by column generation: `run` answers with it and its bound.

    most_rps, most_found: where a load was hard to reach, the bound of what fleets within the other
    limits serve, and the most that one does.
    """

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self.cluster = cluster
        self.clock = clock
        self.pool = Pool(cluster)
        self.fleet: Fleet | None = None
        self.most_rps = np.inf
        self.most_found: float | None = None

    def run(self) -> tuple[Chosen, Fleet]:
        """Where time was over, another call starts from the columns that were found."""
        if not self.pool.columns:
            self.pool.add(even_columns(self.cluster))
        objective = self.cluster.goal.objective
        if objective == "throughput":
            bound = self._linear(Aim(rps_worth=1.0, price_worth=0.0), sign=1)
        elif objective == "cost-for-load":
            free = self._add_best_ratio(_ROUGH)
            self._reach_load()
            bound = self._linear(Aim(rps_worth=0.0, price_worth=1.0), sign=-1)
            bound = max(bound, ratio_bound(self.cluster.goal, free))
        else:
            self._reach_load()
            bound = self._ratio()
        fleet = self._best_fleet()
        if fleet is None:
            load, most = self.cluster.goal.load_rps, self.most_rps
            raise nothing_meets(
                self.clock, is_proven=load is None or most < load, most_found=self.most_found
            )
        is_lower = objective == "cost-for-load"
        proven = min(bound, fleet.value) if is_lower else max(bound, fleet.value)
        columns = list(self.pool.columns.values())
        return list(zip(columns, fleet.numbers, strict=True)), replace(fleet, bound=proven)

    def _best_fleet(self) -> Fleet | None:
        """The best fleet of all columns; where time is short, perhaps the one found before."""
        limit_s = max(self.clock.left_s, _LAST_S)
        self.fleet = best_fleet(self.pool.packing, time_limit_s=limit_s, known=self.fleet)
        return self.fleet

    def _linear(self, aim: Aim, *, sign: int) -> float:
        """The bound of a linear objective, columns for it generated on the way.

        sign: −1 where the aim is to lose little: its bound is that of a cost.
        """
        bound = np.inf
        relaxed = None
        for tolerance in _TOLERANCES:
            relaxed = generate(
                self.pool, aim, tolerance=tolerance, best=relaxed, is_over=self.clock.is_over
            )
            fleet = self._best_fleet()
            if relaxed is None:
                break
            bound = relaxed.bound
            if fleet is not None:
                self.clock.tell(fleet.value, sign * bound)
                if bound - sign * fleet.value <= _CLOSED * abs(bound) or self.clock.is_over():
                    break
                is_narrow = bound - sign * fleet.value <= _NARROW * abs(bound)
                if not is_narrow and tolerance > _TOLERANCES[-1]:
                    continue
                if self._close(aim, relaxed, sign * fleet.value):
                    closed = self._best_fleet()
                    assert closed is not None, "there was one before"
                    return closed.bound
        return sign * bound

    def _close(self, aim: Aim, relaxed: Relaxed, worth: float) -> bool:
        """Find every column that a better fleet could have; whether all were.

        A fleet's worth is the bound less what its columns cost more than they are worth. So one of
        a better fleet costs at most the gap more.
        """
        cluster = self.cluster
        if cluster.goal.max_zone_share < 1 or cluster.goal.on_demand_share > 0:
            return False
        if not aim.rps_worth:
            return False
        sets = self._open_sets(relaxed, worth)
        if sets is None:
            return False
        search = search_sets(cluster, sets)
        # Roughly at first: a better fleet leaves fewer sets to be searched to the end.
        for search.tolerance in (_ROUGH, TOLERANCE):
            floor = (sets @ relaxed.costs - (relaxed.bound - worth)) / relaxed.worth
            search.floor = np.maximum(floor * (1 - TOLERANCE), 0.0)
            search.run(cluster.rates, is_over=self.clock.is_over)
            self.pool.add(found_columns(cluster, search, range(len(sets))))
            fleet = self._best_fleet()
            worth = worth if fleet is None else max(worth, fleet.value)
        return not self.clock.is_over()

    def _open_sets(self, relaxed: Relaxed, worth: float) -> Ints | None:
        """[set, class]: those of which a better fleet may have a pipeline; None if too many."""
        cluster, budget = self.cluster, self.cluster.goal.max_price_usd_per_hour
        if cluster.num_sets() > _MAX_SIFTED:
            return None
        sets = cluster.sets()
        if budget is not None:
            sets = sets[sets @ cluster.prices <= budget * (1 + TOLERANCE)]
        most_rps = sets @ machine_rps(cluster)
        least_rps = (sets @ relaxed.costs - (relaxed.bound - worth)) / relaxed.worth
        sets = sets[most_rps * (1 + TOLERANCE) >= least_rps]
        return sets if len(sets) <= _MAX_CLOSED else None

    def _reach_load(self) -> None:
        """Generate columns for throughput until a fleet meets the goal's limits."""
        goal = self.cluster.goal
        if self._best_fleet() is not None or goal.load_rps is None:
            return
        without = Generation(
            replace(self.cluster, goal=replace(goal, objective="throughput", load_rps=None)),
            self.clock,
        )
        # The same columns, packed without the load.
        without.pool.columns = self.pool.columns
        self.most_rps = without._linear(Aim(rps_worth=1.0, price_worth=0.0), sign=1)
        self.most_found = None if without.fleet is None else without.fleet.value

    def _ratio(self) -> float:
        """Throughput per dollar under limits: Dinkelbach's steps, each with columns generated."""
        free = self._add_best_ratio(TOLERANCE)
        bound = free.bound
        fleet = self._best_fleet()
        for _ in range(_MAX_RATIO_STEPS):
            if fleet is None:
                break
            aim = Aim(rps_worth=1.0, price_worth=fleet.value)
            gain = self._gain(aim)
            bound = min(bound, fleet.value + gain / self._least_price(free.bound))
            better = self._best_fleet()
            assert better is not None, "there was one before"
            self.clock.tell(better.value, bound)
            if better.value <= fleet.value * (1 + _CLOSED) or self.clock.is_over():
                break
            fleet = better
        return bound

    def _add_best_ratio(self, tolerance: float) -> Priced:
        """The pipeline of the best throughput per dollar, whatever limits the fleet."""
        cluster = self.cluster
        free = best_ratio(
            cluster,
            cluster.counts,
            cluster.prices,
            tolerance=tolerance,
            is_over=self.clock.half().is_over,
        )
        self.pool.add(free.columns)
        return free

    def _gain(self, aim: Aim) -> float:
        """No fleet is worth more at this ratio."""
        found = None
        for tolerance in _TOLERANCES:
            found = generate(
                self.pool, aim, tolerance=tolerance, best=found, is_over=self.clock.is_over
            )
        return np.inf if found is None else max(found.bound, 0.0)

    def _least_price(self, most_ratio: float) -> float:
        """No fleet that meets the goal is cheaper."""
        load = self.cluster.goal.load_rps
        cheapest = float(self.cluster.prices.min())
        return max(cheapest, load / most_ratio) if load is not None else cheapest
