"""The pipeline with the best ratio of throughput to any linear cost of its machines.

The one question that the fleet's search asks of the search for pipelines: with prices as costs it
finds the best throughput per dollar, with duals of the fleet's program the next column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from placement.optimizer.cluster import Cluster
from placement.optimizer.columns import Column, make_column
from placement.optimizer.knapsack import CheapestMachines
from placement.optimizer.rates import Ints
from placement.optimizer.search import TOLERANCE, Search
from placement.plan import Goal
from placement.roofline import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """columns: those found on the way, best last. bound: no pipeline has a higher ratio."""

    columns: list[Column]
    bound: float


def best_ratio(
    cluster: Cluster,
    counts: Ints,
    costs: Array,
    *,
    floor: float = 0.0,
    tolerance: float = TOLERANCE,
    cap_rps: float = np.inf,
    is_over: Callable[[], bool] = lambda: False,
) -> Priced:
    """The best effective throughput per cost on at most `counts` machines of each class.

    costs: [class], positive. floor: ratios up to it are of no interest. tolerance, cap_rps: as in
    `Search`. Interruptions lower the columns' throughput; the bound knows only those of the safest
    class.
    """
    usable = counts > 0
    if not usable.any():
        return Priced(columns=[], bound=floor)
    covers = CheapestMachines(
        counts=counts, prices=costs, shapes=cluster.shape_of, num_layers=cluster.num_layers
    )
    safest = cluster.goal.availability(float(cluster.interruptions[usable].min()))
    search = Search(
        covers,
        np.array([safest]),
        floor=np.array([floor]),
        latency=cluster.latency,
        tolerance=tolerance,
        cap_rps=cap_rps,
    )
    search.run(cluster.rates, is_over=is_over)
    columns = []
    for point in search.points_of_interest():
        stages, machines, batch = search.stages(0, point)
        column = make_column(cluster, stages, [one.column for one in machines], batch)
        if column.rps > 0:
            columns.append(column)
    return Priced(columns=columns, bound=float(search.bound[0]))


def ratio_bound(goal: Goal, priced: Priced | None) -> float:
    """No fleet has a better value of the goal's objective than that of pipelines of the best ratio
    of throughput to price, whatever else limits it. priced: those ratios, if they are known."""
    if goal.objective == "cost-for-load":
        assert goal.load_rps is not None, "the objective needs it"
        return 0.0 if priced is None else goal.load_rps / priced.bound
    if goal.objective == "throughput" or priced is None:
        return np.inf
    return priced.bound
