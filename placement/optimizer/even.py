"""Fleets that need no search: pipelines over machines of one shape, their layers in equal parts.

A start for searches, and the answer where they have no time. Each shape has two designs: the one
with the most throughput per machine, and the one of the fewest machines. The machines of a shape,
cheapest first, are taken in turn for each design, whatever they are offered as; which of these
pipelines make the fleet is the fleet's program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from placement.estimator import PipelineEstimate, Stage
from placement.hardware import Shape
from placement.optimizer.cluster import Cluster
from placement.optimizer.columns import Chosen, Column
from placement.optimizer.fleet import Fleet, best_fleet, make_packing
from placement.optimizer.rates import allowed_tps
from placement.optimizer.seeds import DEPTHS

# The fleet's program may take no longer, in seconds.
_PACKING_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Design:
    stages: tuple[Stage, ...]
    estimate: PipelineEstimate
    rps: float

    @property
    def num_machines(self) -> int:
        return self.stages[-1].node + 1


def even_fleet(cluster: Cluster) -> tuple[Chosen, Fleet] | None:
    """The best fleet of `even_columns`, its bound not known; None where none meets the goal."""
    columns = even_columns(cluster)
    fleet = best_fleet(make_packing(cluster, columns), time_limit_s=_PACKING_S)
    if fleet is None:
        return None
    unproven = 0.0 if cluster.goal.objective == "cost-for-load" else np.inf
    return list(zip(columns, fleet.numbers, strict=True)), replace(fleet, bound=unproven)


def even_columns(cluster: Cluster) -> list[Column]:
    """Pipelines of both designs of every shape, one for each set of machines."""
    columns = []
    for index, shape in enumerate(cluster.shapes):
        classes = [int(one) for one in np.flatnonzero(cluster.shape_of == index)]
        classes.sort(key=lambda one: _order(cluster, one))
        runs = [(one, cluster.classes[one].count) for one in classes]
        for design in _designs(cluster, shape, sum(count for _, count in runs)):
            sets = _in_turn(runs, design.num_machines)
            columns += [_column(cluster, design, nodes) for nodes in sets]
    return [column for column in columns if column.rps > 0]


def _order(cluster: Cluster, index: int) -> tuple[str, bool, float]:
    """By what shares of zones and markets tell apart, then by cost."""
    one = cluster.classes[index]
    return one.zone, one.is_spot, one.cost


def _in_turn(runs: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[int, ...]]:
    """The different sets of `size` machines, taken in turn. runs: (class, machines of it)."""
    begun: tuple[int, ...] = ()
    for one, count in runs:
        missing = min(count, -len(begun) % size)
        begun, count = begun + (one,) * missing, count - missing
        if len(begun) == size:
            yield begun
            begun = ()
        if count >= size:
            yield (one,) * size
        begun += (one,) * (count % size)


def _column(cluster: Cluster, design: _Design, nodes: tuple[int, ...]) -> Column:
    classes = [cluster.classes[node] for node in nodes]
    return Column(
        stages=design.stages,
        nodes=nodes,
        estimate=design.estimate,
        rps=cluster.goal.effective_rps(design.estimate, [one.offers[0] for one in classes]),
        price_usd_per_hour=sum(one.price_usd_per_hour for one in classes),
    )


def _designs(cluster: Cluster, shape: Shape, num_machines: int) -> list[_Design]:
    """The design of most throughput per machine, and that of the fewest machines if another."""
    designs = [
        design
        for stages in _even_stages(cluster, shape, num_machines)
        for design in [_best_batch(cluster, stages)]
        if design is not None
    ]
    if not designs:
        return []
    densest = max(designs, key=lambda one: one.rps / one.num_machines)
    smallest = max(designs, key=lambda one: (-one.num_machines, one.rps))
    return [densest] if densest is smallest else [densest, smallest]


def _even_stages(cluster: Cluster, shape: Shape, num_machines: int) -> Iterator[tuple[Stage, ...]]:
    """Pipelines of stages of one TP degree."""
    num_layers = cluster.num_layers
    for tp in allowed_tps(cluster.estimator, [shape]):
        per_machine = shape.num_gpus // tp
        for depth in DEPTHS:
            if depth > min(num_layers, per_machine * num_machines):
                break
            yield tuple(
                Stage(
                    shape=shape,
                    tp=tp,
                    num_layers=(index + 1) * num_layers // depth - index * num_layers // depth,
                    node=index // per_machine,
                )
                for index in range(depth)
            )


def _best_batch(cluster: Cluster, stages: Sequence[Stage]) -> _Design | None:
    """As many requests as fit, or half as often as no latency is too long; None if none do."""
    best: _Design | None = None
    batch = cluster.estimator.max_batch(stages)
    factor = 0.0
    while batch >= 1 and factor < 1:
        estimate = cluster.estimator.evaluate(stages, batch)
        factor = cluster.goal.latency_factor(estimate)
        rps = factor * estimate.throughput_rps
        if rps > (best.rps if best is not None else 0.0):
            best = _Design(stages=tuple(stages), estimate=estimate, rps=rps)
        batch //= 2
    return best
