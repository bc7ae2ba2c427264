"""Pipelines as columns of the fleet's program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from placement.estimator import PipelineEstimate, Stage
from placement.hardware import Offer
from placement.optimizer.cluster import Cluster
from placement.optimizer.fixed import FixedMachines
from placement.optimizer.rates import Ints
from placement.optimizer.search import Search
from placement.plan import PlannedPipeline
from placement.roofline import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The best pipeline on a set of machines.

    nodes: class of each machine, by `Stage.node`. rps: effective, as the goal counts it.
    """

    stages: tuple[Stage, ...]
    nodes: tuple[int, ...]
    estimate: PipelineEstimate
    rps: float
    price_usd_per_hour: float

    @property
    def ratio(self) -> float:
        return self.rps / self.price_usd_per_hour

    def counts(self, num_classes: int) -> tuple[int, ...]:
        """[class]: machines used."""
        return tuple(np.bincount(self.nodes, minlength=num_classes))


# Columns, and how many pipelines of each are in a fleet.
Chosen = list[tuple[Column, int]]


def make_column(
    cluster: Cluster, stages: tuple[Stage, ...], nodes: Iterable[int], batch: int
) -> Column:
    nodes = tuple(nodes)
    classes = [cluster.classes[node] for node in nodes]
    estimate = cluster.estimator.evaluate(stages, batch)
    offers = [one.offers[0] for one in classes]
    return Column(
        stages=stages,
        nodes=nodes,
        estimate=estimate,
        rps=cluster.goal.effective_rps(estimate, offers),
        price_usd_per_hour=sum(one.price_usd_per_hour for one in classes),
    )


def search_sets(cluster: Cluster, sets: Ints, floor: Array | None = None) -> Search:
    """A search for the best pipeline of each set of machines, [set, class]; not yet run."""
    covers = FixedMachines(counts=sets, shapes=cluster.shape_of, num_layers=cluster.num_layers)
    return Search(covers, cluster.availability(sets), floor=floor, latency=cluster.latency)


def found_columns(cluster: Cluster, search: Search, groups: Iterable[int]) -> list[Column]:
    """The best pipelines of these groups, one for each set of machines really used."""
    best: dict[tuple[int, ...], Column] = {}
    for group in groups:
        if search.points[group] is None:
            continue
        stages, machines, batch = search.stages(group)
        column = make_column(cluster, stages, [one.column for one in machines], batch)
        key = column.counts(len(cluster.classes))
        if column.rps > 0 and (key not in best or column.rps > best[key].rps):
            best[key] = column
    return list(best.values())


def plan_pipelines(
    cluster: Cluster, columns: Iterable[tuple[Column, int]], *, taken: Sequence[Offer] = ()
) -> tuple[PlannedPipeline, ...]:
    """Each column as often as chosen, its machines rented from the offers of their classes.

    taken: an offer for each machine that is rented already.
    """
    rent = [one.rent(taken) for one in cluster.classes]
    return tuple(
        PlannedPipeline(
            stages=column.stages,
            offers=tuple(_next(rent[node]) for node in column.nodes),
            estimate=column.estimate,
        )
        for column, number in columns
        for _ in range(number)
    )


def _next(offers: Iterable[Offer]) -> Offer:
    return next(iter(offers))
