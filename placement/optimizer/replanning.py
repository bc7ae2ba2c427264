"""What to do with a running fleet when machines come or go.

A pipeline that goes on unchanged costs nothing. A new one, or one that changes, serves nothing
while it starts: over the horizon until the next change it counts for its throughput less that
share. So a move is made only where it pays within the horizon.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from placement.errors import Infeasible, InvalidInput
from placement.estimator import Estimator
from placement.hardware import Offer
from placement.optimizer.clock import Clock, nothing_meets
from placement.optimizer.cluster import Cluster, make_cluster
from placement.optimizer.columns import Chosen, Column, make_column, plan_pipelines
from placement.optimizer.fleet import best_fleet, make_packing
from placement.optimizer.large import Generation
from placement.optimizer.machines import check_offers
from placement.optimizer.solver import MAX_CLOSED, all_columns
from placement.plan import Goal, Plan, PlannedPipeline

# ShuntServe, section 7.2: a node up and loaded, engines started beside it.
START_UP_S = 111.3
HORIZON_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """plan: the fleet from now on, pipelines that go on first. Its value counts what starting
    costs; its bound is that of a fleet that starts at once. kept: indices in the current plan.
    """

    plan: Plan
    kept: tuple[int, ...]


def replan(
    current: Plan,
    offers: Sequence[Offer],
    estimator: Estimator,
    goal: Goal,
    *,
    broken: Collection[int] = (),
    start_up_s: float = START_UP_S,
    horizon_s: float = HORIZON_S,
    time_limit_s: float = 60.0,
) -> Replan:
    """The fleet that serves best until `horizon_s` from now, given what runs.

    offers: all machines there are now, running ones included; a machine runs on if its shape,
    market and zone are still offered. broken: pipelines of `current` that have lost a machine.
    Optimal over all sets of machines where they are few; else over the columns that were generated
    for a fleet that starts anew. Raises Infeasible and InvalidInput as `solve` does.
    """
    if not 0 <= start_up_s < horizon_s:
        raise InvalidInput("start_up_s", f"must lie between 0 and the horizon of {horizon_s:g} s")
    check_offers(offers, goal)
    clock = Clock(time_limit_s=time_limit_s)
    cluster = make_cluster(offers, estimator, goal)
    share = 1 - start_up_s / horizon_s
    new, bound = _new_columns(cluster, clock)
    running = [
        (index, pipeline, column)
        for index, pipeline in enumerate(current.pipelines)
        if index not in broken and (column := _running(cluster, pipeline)) is not None
    ]
    columns = [
        *(column for _, _, column in running),
        *(replace(column, rps=share * column.rps) for column in new),
    ]
    packing = make_packing(cluster, columns)
    once = [(row, 1.0) for row in np.eye(len(columns))[: len(running)]]
    fleet = best_fleet(replace(packing, extra=tuple(once)))
    if fleet is None:
        raise nothing_meets(clock)
    goes_on = [one for one, number in zip(running, fleet.numbers, strict=False) if number]
    kept = tuple(_with_offers(cluster, pipeline) for _, pipeline, _ in goes_on)
    taken = [offer for pipeline in kept for offer in pipeline.offers]
    chosen: Chosen = list(zip(new, fleet.numbers[len(running) :], strict=True))
    is_cost = goal.objective == "cost-for-load"
    plan = Plan(
        pipelines=(*kept, *plan_pipelines(cluster, chosen, taken=taken)),
        goal=goal,
        value=fleet.value,
        bound=min(bound, fleet.value) if is_cost else max(bound, fleet.value),
        solve_s=clock.passed_s,
        solver="exact",
    )
    return Replan(plan=plan, kept=tuple(index for index, _, _ in goes_on))


def _new_columns(cluster: Cluster, clock: Clock) -> tuple[list[Column], float]:
    """Pipelines that might be started, and a bound on any fleet's value without a start-up."""
    is_cost = cluster.goal.objective == "cost-for-load"
    trivial = 0.0 if is_cost else np.inf
    if cluster.num_sets() <= MAX_CLOSED:
        columns = all_columns(cluster, clock)
        fleet = best_fleet(make_packing(cluster, columns))
        return columns, trivial if fleet is None or clock.is_over() else fleet.bound
    try:
        generation = Generation(cluster, clock)
        _, fleet = generation.run()
    except Infeasible:
        return list(generation.pool.columns.values()), trivial
    return list(generation.pool.columns.values()), fleet.bound


def _running(cluster: Cluster, pipeline: PlannedPipeline) -> Column | None:
    """A pipeline as a column; None where one of its machines is offered no more."""
    nodes = [_class_of(cluster, offer) for offer in pipeline.offers]
    known = [node for node in nodes if node is not None]
    if len(known) < len(nodes):
        return None
    return make_column(cluster, pipeline.stages, known, pipeline.estimate.batch)


def _class_of(cluster: Cluster, offer: Offer) -> int | None:
    for index, one in enumerate(cluster.classes):
        if any(_is_same(offer, other) for other in one.offers):
            return index
    return None


def _with_offers(cluster: Cluster, pipeline: PlannedPipeline) -> PlannedPipeline:
    """The pipeline with the offers of today in place of those it was rented by."""
    now = [offer for one in cluster.classes for offer in one.offers]
    offers = tuple(next(new for new in now if _is_same(old, new)) for old in pipeline.offers)
    return replace(pipeline, offers=offers)


def _is_same(one: Offer, other: Offer) -> bool:
    return (one.shape, one.market, one.zone) == (other.shape, other.market, other.zone)
