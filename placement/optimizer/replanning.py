"""What to do with a running fleet when machines come or go.

A pipeline that goes on unchanged costs nothing. A new one, or one that changes, serves nothing
while it starts, though its machines are paid: over the horizon until the next change it counts for
its throughput less that share. So a move is made only where it pays within the horizon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from placement.errors import Infeasible, InvalidInput
from placement.estimator import Estimator
from placement.hardware import Offer
from placement.optimizer.ceilings import ceiling
from placement.optimizer.clock import Clock, OnProgress, nothing_meets
from placement.optimizer.cluster import Cluster, make_cluster
from placement.optimizer.columns import Chosen, Column, make_column, plan_pipelines
from placement.optimizer.fleet import Fleet, best_fleet, make_packing
from placement.optimizer.large import Generation
from placement.optimizer.machines import check_offers
from placement.optimizer.shortage import does_not_fit, fits
from placement.optimizer.solver import MAX_CLOSED, Listing
from placement.plan import Goal, Plan, PlannedPipeline
from placement.roofline import Array

# ShuntServe, section 7.2: a node up and loaded, engines started beside it.
START_UP_S = 111.3
HORIZON_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """plan: the fleet from now on, pipelines that go on first. Its value counts what starting
    costs, as the mean over the horizon; so does its bound.
    kept: indices of those in the running fleet.
    stay_value: the best value without starting anything; None where that does not meet the goal.
    """

    plan: Plan
    kept: tuple[int, ...]
    stay_value: float | None
    start_up_s: float
    horizon_s: float

    @property
    def started(self) -> tuple[PlannedPipeline, ...]:
        return self.plan.pipelines[len(self.kept) :]

    @property
    def effective_rps(self) -> float:
        """The mean over the horizon: what starts serves nothing at first."""
        share = 1 - self.start_up_s / self.horizon_s
        kept = self.plan.pipelines[: len(self.kept)]
        return self._rps(kept) + share * self._rps(self.started)

    @property
    def missed_requests(self) -> float:
        """What the pipelines that start would serve meanwhile."""
        return self._rps(self.started) * self.start_up_s

    @property
    def start_up_usd(self) -> float:
        """What the machines that start cost meanwhile, of those whose price is known."""
        price = sum(pipeline.price_usd_per_hour for pipeline in self.started)
        return price * self.start_up_s / 3600

    @property
    def gain(self) -> float | None:
        """Of moving against staying: relative, positive for the better."""
        if not self.stay_value:
            return None
        gain = self.plan.value / self.stay_value - 1
        return -gain if self.plan.goal.objective == "cost-for-load" else gain

    def _rps(self, pipelines: Sequence[PlannedPipeline]) -> float:
        return sum(self.plan.goal.effective_rps(one.estimate, one.offers) for one in pipelines)


def replan(
    running: Sequence[PlannedPipeline | None],
    offers: Sequence[Offer],
    estimator: Estimator,
    goal: Goal,
    *,
    start_up_s: float = START_UP_S,
    horizon_s: float = HORIZON_S,
    time_limit_s: float = 60.0,
    on_progress: OnProgress | None = None,
) -> Replan:
    """The fleet that serves best until `horizon_s` from now, given what runs.

    running: None for a pipeline that has lost a machine. offers: all machines there are now,
    running ones included; a machine runs on if its shape's name, market and zone are still
    offered, at today's price. A batch that does not fit any more counts as what fits.
    Optimal over all sets of machines where they are few; else over the columns that were generated
    for a fleet that starts anew, and for the machines that nothing runs on.
    Raises Infeasible and InvalidInput as `solve` does.
    """
    if not 0 <= start_up_s < horizon_s:
        default = ", the default" if start_up_s == START_UP_S else ""
        raise InvalidInput(
            "start_up_s",
            f"must lie between 0 and the horizon of {horizon_s:g} s, and is {start_up_s:g} s"
            f"{default}",
        )
    check_offers(offers, goal)
    clock = Clock(time_limit_s=time_limit_s, on_progress=on_progress)
    cluster = make_cluster(offers, estimator, goal)
    if not fits(cluster):
        raise does_not_fit(cluster)
    alike = _alike(_survivors(running, offers))
    old = [_running_column(cluster, pipeline) for pipeline in alike]
    each = [column for column, run in zip(old, alike.values(), strict=True) for _ in run]
    limits = _limits(alike, offers)
    stay = _fleet_of(cluster, old, [], limits)
    share = 1 - start_up_s / horizon_s
    new, bound = _new_columns(cluster, each, share, clock)
    fleet = _fleet_of(cluster, old, [replace(one, rps=share * one.rps) for one in new], limits)
    if fleet is None:
        raise nothing_meets(clock)
    numbers = fleet.numbers[: len(old)]
    goes_on = sorted(
        (
            (index, replace(pipeline, estimate=column.estimate))
            for (pipeline, run), column, number in zip(alike.items(), old, numbers, strict=True)
            for index in run[:number]
        ),
        key=lambda pair: pair[0],
    )
    kept = [pipeline for _, pipeline in goes_on]
    taken = [offer for pipeline in kept for offer in pipeline.offers]
    chosen: Chosen = list(zip(new, fleet.numbers[len(old) :], strict=True))
    proven = fleet.bound if bound is None else bound
    is_cost = goal.objective == "cost-for-load"
    plan = Plan(
        pipelines=(*kept, *plan_pipelines(cluster, chosen, taken=taken)),
        goal=goal,
        value=fleet.value,
        bound=min(proven, fleet.value) if is_cost else max(proven, fleet.value),
        solve_s=clock.passed_s,
        solver="exact",
    )
    return Replan(
        plan=plan,
        kept=tuple(index for index, _ in goes_on),
        stay_value=None if stay is None else stay.value,
        start_up_s=start_up_s,
        horizon_s=horizon_s,
    )


def _survivors(
    running: Sequence[PlannedPipeline | None], offers: Sequence[Offer]
) -> dict[int, PlannedPipeline]:
    """By index, those all of whose machines are still offered, as they are offered today.

    Of several offers of such a machine: one that is not used up, at the price it had if may be.
    """
    left = [offer.count for offer in offers]
    found = {}
    for index, pipeline in enumerate(running):
        if pipeline is None:
            continue
        alike = [
            [at for at, new in enumerate(offers) if new.count > 0 and new.kind == old.kind]
            for old in pipeline.offers
        ]
        if not all(alike):
            continue
        rented = []
        for old, places in zip(pipeline.offers, alike, strict=True):
            price = old.price_usd_per_hour
            at = max(places, key=lambda at: (left[at] > 0, offers[at].price_usd_per_hour == price))
            left[at] -= 1
            rented.append(offers[at])
        stages = tuple(replace(stage, shape=rented[stage.node].shape) for stage in pipeline.stages)
        found[index] = replace(pipeline, stages=stages, offers=tuple(rented))
    return found


def _alike(survivors: Mapping[int, PlannedPipeline]) -> dict[PlannedPipeline, list[int]]:
    """The different ones of them, each with the indices of those that are equal."""
    alike: dict[PlannedPipeline, list[int]] = {}
    for index, pipeline in survivors.items():
        alike.setdefault(pipeline, []).append(index)
    return alike


def _running_column(cluster: Cluster, pipeline: PlannedPipeline) -> Column:
    nodes = [
        next(index for index, one in enumerate(cluster.classes) if offer in one.offers)
        for offer in pipeline.offers
    ]
    batch = min(pipeline.estimate.batch, cluster.estimator.max_batch(pipeline.stages))
    return make_column(cluster, pipeline.stages, nodes, batch)


_Rows = list[tuple[Array, float]]


def _limits(running: Mapping[PlannedPipeline, Sequence[int]], offers: Sequence[Offer]) -> _Rows:
    """Rows over running pipelines: no more go on than run, on no more machines than offers have."""
    numbers = [float(len(run)) for run in running.values()]
    rows: _Rows = list(zip(np.eye(len(running)), numbers, strict=True))
    for offer in dict.fromkeys(one for pipeline in running for one in pipeline.offers):
        used = [float(pipeline.offers.count(offer)) for pipeline in running]
        rows.append((np.array(used), float(sum(one.count for one in offers if one == offer))))
    return rows


def _fleet_of(
    cluster: Cluster, old: Sequence[Column], new: Sequence[Column], limits: _Rows
) -> Fleet | None:
    rows = [(np.concatenate([row, np.zeros(len(new))]), limit) for row, limit in limits]
    return best_fleet(replace(make_packing(cluster, [*old, *new]), extra=tuple(rows)))


def _new_columns(
    cluster: Cluster, old: Sequence[Column], share: float, clock: Clock
) -> tuple[list[Column], float | None]:
    """Pipelines that might be started, and a bound; None where the columns are all there are."""
    if cluster.num_sets() <= MAX_CLOSED:
        columns = Listing(cluster, clock).columns()
        return columns, ceiling(cluster) if clock.is_over() else None
    beside = _columns_beside(
        cluster, old, replace(clock, time_limit_s=clock.time_limit_s / 2, on_progress=None)
    )
    generation = Generation(cluster, clock)
    generation.pool.add(beside)
    try:
        _, fleet = generation.run()
    except Infeasible:
        return list(generation.pool.columns.values()), ceiling(cluster)
    return list(generation.pool.columns.values()), _bound(cluster, fleet.bound, old, share)


def _columns_beside(cluster: Cluster, old: Sequence[Column], clock: Clock) -> list[Column]:
    """Pipelines for the machines that nothing runs on: the best use of them by itself."""
    used = np.bincount(
        [node for column in old for node in column.nodes], minlength=len(cluster.classes)
    )
    left = [
        replace(one, offers=(replace(one.offers[0], count=max(0, one.count - int(number))),))
        for one, number in zip(cluster.classes, used, strict=True)
    ]
    objective = cluster.goal.objective
    goal = replace(
        cluster.goal,
        objective="throughput" if objective == "throughput" else "throughput-per-dollar",
        load_rps=None,
        max_price_usd_per_hour=None,
        on_demand_share=0.0,
        max_zone_share=1.0,
    )
    beside = replace(cluster, goal=goal, classes=tuple(left))
    if not fits(beside):
        return []
    generation = Generation(beside, clock)
    try:
        generation.run()
    except Infeasible:
        return []
    return list(generation.pool.columns.values())


def _bound(cluster: Cluster, fresh: float, old: Sequence[Column], share: float) -> float:
    """No fleet has a better value over the horizon. fresh: bound of those that start at once.

    What goes on and what starts, at its full throughput, are a fleet that starts at once:
    K + s·N = s·(K + N) + (1 − s)·K, and K is at most all that runs. Shares of markets and zones
    may be met with s·N and not with N: then only the ceiling holds.
    """
    goal = cluster.goal
    highest = ceiling(cluster)
    if goal.on_demand_share > 0 or goal.max_zone_share < 1:
        return highest
    if goal.objective == "cost-for-load":
        return max(fresh, highest)
    if goal.objective == "throughput":
        most = sum(column.rps for column in old)
    else:
        most = max((column.ratio for column in old), default=0.0)
    return min(share * fresh + (1 - share) * most, highest)
