"""The best fleet, with the proof of it: which method answers which goal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from placement.errors import OutOfTime, Unmet
from placement.estimator import Estimator
from placement.hardware import Offer
from placement.optimizer.ceilings import ceiling, is_ruled_out
from placement.optimizer.clock import Clock, OnProgress, nothing_meets
from placement.optimizer.cluster import Cluster, make_cluster
from placement.optimizer.columns import Chosen, Column, found_columns, plan_pipelines, search_sets
from placement.optimizer.even import even_fleet
from placement.optimizer.fleet import Fleet, best_fleet, is_better, make_packing
from placement.optimizer.large import Generation
from placement.optimizer.latency import latency_limits
from placement.optimizer.machines import check_offers
from placement.optimizer.pricing import Priced, best_ratio, ratio_bound
from placement.optimizer.search import TOLERANCE
from placement.optimizer.shortage import does_not_fit, fits
from placement.plan import Goal, Plan

# Clusters with fewer sets of machines are solved by the best pipeline of each.
MAX_LISTED = 40
# So many where loads and prices are limited: one pipeline more or less matters there, and column
# generation leaves a gap.
MAX_LISTED_LIMITED = 200
# So many are still listed where pipelines of machines given differ from the cheapest: latencies
# that are sums over the stages, interruptions, shares; and to close a gap of column generation.
MAX_CLOSED = 2000
_ROUGH, _FINE = 0.2, 1e-3


def solve(
    offers: Sequence[Offer],
    estimator: Estimator,
    goal: Goal,
    *,
    time_limit_s: float = 60.0,
    on_progress: OnProgress | None = None,
) -> Plan:
    """The fleet with the best value of the goal's objective, and a bound on any fleet's.

    The plan's value counts `Goal.effective_rps`. A set of machines is always used by its best
    pipeline; shares of markets and zones are not met by slowing one down. Among fleets of equal
    value the one with more throughput, or fewer dollars, is taken.
    time_limit_s: after it, the best fleet found is returned with the bound proven so far.
    on_progress: told the best value and the bound, where they improve.
    Raises InvalidInput for offers that mean nothing; Infeasible, with what is missing, if no
    pipeline holds the model or no fleet meets the goal.
    """
    clock = Clock(time_limit_s=time_limit_s, on_progress=on_progress)
    check_offers(offers, goal)
    cluster = make_cluster(offers, estimator, goal)
    if not fits(cluster):
        raise does_not_fit(cluster)
    if is_ruled_out(cluster):
        raise Unmet
    chosen, fleet = _choose(cluster, clock)
    if fleet.bound != fleet.value:
        fleet = replace(fleet, bound=_tighter(fleet, goal, ceiling(cluster)))
    return Plan(
        pipelines=plan_pipelines(cluster, chosen),
        goal=goal,
        value=fleet.value,
        bound=fleet.bound,
        solve_s=clock.passed_s,
        solver="exact",
    )


def _tighter(fleet: Fleet, goal: Goal, other: float) -> float:
    """The better of two bounds, and no better than what was found."""
    if goal.objective == "cost-for-load":
        return min(max(fleet.bound, other), fleet.value)
    return max(min(fleet.bound, other), fleet.value)


def _choose(cluster: Cluster, clock: Clock) -> tuple[Chosen, Fleet]:
    """What the search finds, or the even fleet, where time is over and it has found nothing better.

    Raises Infeasible.
    """
    even = even_fleet(cluster)
    try:
        chosen, fleet = _choose_within(cluster, clock)
    except OutOfTime:
        if even is None:
            raise
        return even
    if even is not None and is_better(even[1], fleet, cluster.goal):
        return even[0], replace(even[1], bound=fleet.bound)
    return chosen, fleet


def _choose_within(cluster: Cluster, clock: Clock) -> tuple[Chosen, Fleet]:
    """The best fleet within latencies that are sums over stages, which are hard to bound.

    Often they bind nothing. So the best fleet without them is sought first: if it keeps them, it is
    the best with them too; if not, its bound still holds. After half of the time this goes on only
    as long as what it finds keeps them.
    """
    if cluster.latency is None or not cluster.latency.has_sums:
        return _method(cluster, clock)()
    goal, half = cluster.goal, clock.half()
    search = _method(_without_sums(cluster), half)
    kept: tuple[Chosen, Fleet] | None = None
    bound = 0.0 if goal.objective == "cost-for-load" else np.inf
    with contextlib.suppress(OutOfTime):
        chosen, free = search()
        while all(goal.latency_factor(column.estimate) == 1 for column, _ in chosen):
            if not half.is_over() or clock.is_over():
                return chosen, free
            kept = chosen, free
            half.time_limit_s = clock.time_limit_s
            chosen, free = search()
        bound = free.bound
    try:
        chosen, fleet = _method(cluster, clock)()
    except OutOfTime:
        if kept is None:
            raise
        chosen, fleet = kept
    if kept is not None and is_better(kept[1], fleet, goal):
        chosen, fleet = kept[0], replace(kept[1], bound=fleet.bound)
    return chosen, replace(fleet, bound=_tighter(fleet, goal, bound))


def _without_sums(cluster: Cluster) -> Cluster:
    """The same without limits on latencies that are sums over the stages."""
    if cluster.estimator.fidelity.reading == "batch":
        goal = replace(cluster.goal, slo_ttft_s=None, slo_tpot_s=None, slo_latency_s=None)
    else:
        goal = replace(cluster.goal, slo_ttft_s=None)
    latency = latency_limits(goal, cluster.estimator, cluster.shapes)
    return replace(cluster, goal=goal, latency=latency)


def _method(cluster: Cluster, clock: Clock) -> Callable[[], tuple[Chosen, Fleet]]:
    """The search for this goal. Where time was over, another call goes on with what was found."""
    goal = cluster.goal
    is_free = (
        goal.load_rps is None
        and goal.max_price_usd_per_hour is None
        and goal.on_demand_share == 0
        and goal.max_zone_share == 1
    )
    has_sums = cluster.latency is not None and cluster.latency.has_sums
    is_plain = not has_sums and not (goal.recovery_s and cluster.interruptions.any())
    num_sets = cluster.num_sets()
    if is_free and is_plain and goal.objective == "throughput-per-dollar":
        return partial(best_pipeline_repeated, cluster, clock)
    has_shares = goal.on_demand_share > 0 or goal.max_zone_share < 1
    max_listed = MAX_LISTED if goal.objective == "throughput" and is_free else MAX_LISTED_LIMITED
    if num_sets <= (max_listed if is_plain and not has_shares else MAX_CLOSED):
        return Listing(cluster, clock).run
    return Generation(cluster, clock).run


def best_pipeline_repeated(cluster: Cluster, clock: Clock) -> tuple[Chosen, Fleet]:
    """Throughput per dollar without limits: no fleet's ratio exceeds its best pipeline's.

    The best pipeline as often as machines allow, then others of the same ratio, if any.
    """
    counts = cluster.counts.copy()
    chosen: Chosen = []
    first = best_ratio(cluster, counts, cluster.prices, is_over=clock.is_over)
    priced = first
    while priced.columns:
        column = priced.columns[-1]
        used = np.array(column.counts(len(counts)))
        number = int((counts[used > 0] // used[used > 0]).min())
        chosen.append((column, number))
        counts = counts - number * used
        floor = chosen[0][0].ratio * (1 - TOLERANCE)
        priced = best_ratio(cluster, counts, cluster.prices, floor=floor, is_over=clock.is_over)
    if not chosen:
        raise nothing_meets(clock)
    rps = sum(number * column.rps for column, number in chosen)
    price = sum(number * column.price_usd_per_hour for column, number in chosen)
    bound = max(first.bound, rps / price)
    return chosen, Fleet(numbers=(), value=rps / price, bound=bound)


class Listing:
    """A fleet of the best pipelines of all sets of machines: `run` answers with it and its bound.

    Searches that were cut off go on when they are asked again.
    """

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self.cluster = cluster
        self.clock = clock
        self._search = search_sets(cluster, cluster.sets())
        self._first: Priced | None = None

    def columns(self) -> list[Column]:
        """The best pipeline of every set of machines."""
        self._search.run(self.cluster.rates, is_over=self.clock.is_over)
        return found_columns(self.cluster, self._search, range(len(self._search.points)))

    def run(self) -> tuple[Chosen, Fleet]:
        cluster, clock = self.cluster, self.clock
        if self._first is None and not clock.is_over():
            # Something to fall back on, should there be no time for all.
            self._first = best_ratio(
                cluster,
                cluster.counts,
                cluster.prices,
                tolerance=_ROUGH if len(self._search.points) <= MAX_LISTED_LIMITED else _FINE,
                is_over=clock.is_over,
            )
        columns = self.columns()
        if clock.is_over() and self._first is not None:
            columns += self._first.columns
        fleet = best_fleet(make_packing(cluster, columns))
        if fleet is None:
            raise nothing_meets(clock)
        if clock.is_over():
            # Some sets were not searched: nothing is proven of fleets of several pipelines.
            fleet = replace(fleet, bound=ratio_bound(cluster.goal, self._first))
        return list(zip(columns, fleet.numbers, strict=True)), fleet
