"""The best fleet, with the proof of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from placement.errors import Infeasible
from placement.estimator import Estimator
from placement.hardware import Offer
from placement.optimizer.cluster import Cluster, make_cluster
from placement.optimizer.columns import found_columns, plan_pipelines
from placement.optimizer.fixed import FixedMachines
from placement.optimizer.fleet import best_fleet, make_packing
from placement.optimizer.machines import check_offers
from placement.optimizer.search import Search
from placement.plan import Goal, Plan


def solve(
    offers: Sequence[Offer],
    estimator: Estimator,
    goal: Goal,
    *,
    time_limit_s: float = 60.0,
) -> Plan:
    """The fleet with the best value of the goal's objective."""
    started = time.perf_counter()
    check_offers(offers)
    cluster = make_cluster(offers, estimator, goal)
    sets = cluster.sets()
    covers = FixedMachines(counts=sets, shapes=cluster.shape_of, num_layers=cluster.num_layers)
    search = Search(covers, cluster.availability(sets), latency=cluster.latency)
    for rates in cluster.rates():
        search.run(rates, is_over=lambda: time.perf_counter() - started > time_limit_s)
    columns = found_columns(cluster, search, range(len(sets)))
    fleet = best_fleet(make_packing(cluster, columns))
    if fleet is None:
        raise Infeasible("nothing")
    return Plan(
        pipelines=plan_pipelines(cluster, zip(columns, fleet.numbers, strict=True)),
        goal=goal,
        value=fleet.value,
        bound=fleet.bound,
        solve_s=time.perf_counter() - started,
        solver="exact",
    )
