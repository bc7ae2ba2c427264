"""The shortest latencies that any pipeline of some machines has: those of one request alone.

Latencies that are sums over the stages are a shortest path over machines and layers, as their
parts are of one criterion; the others are 1 / throughput of a batch of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from placement.estimator import Estimator
from placement.hardware import Offer
from placement.optimizer.capacity import (
    ALONE,
    CLOSING,
    NEAR_STAGE,
    NUM_PLACES,
    ONLY,
    OPENING,
    STAGE_ENDS,
)
from placement.optimizer.cluster import Cluster, make_cluster
from placement.optimizer.columns import search_sets
from placement.optimizer.places import BEFORE, DONE
from placement.optimizer.rates import ANY_DEPTH, LAYER, Ints, allowed_tps, point_times
from placement.plan import Goal
from placement.roofline import Array

Latency = Literal["slo_ttft_s", "slo_tpot_s", "slo_latency_s"]
LATENCIES: tuple[Latency, ...] = ("slo_ttft_s", "slo_tpot_s", "slo_latency_s")


def shortest_s(offers: Sequence[Offer], estimator: Estimator, latency: Latency) -> float:
    """The shortest latency of this kind, in seconds; infinite where no pipeline holds the model.

    Of a batch of one: longer ones take no less time.
    """
    single = replace(estimator, fidelity=replace(estimator.fidelity, max_batch=1))
    # With a limit of a second, shares of it are seconds.
    cluster = make_cluster(offers, single, _within_a_second(latency))
    assert cluster.latency is not None, "there is a limit"
    if len(cluster.layers) < 2:
        return np.inf
    if cluster.latency.has_sums:
        return _least_sum(cluster)
    search = search_sets(replace(cluster, latency=None), _all_machines(cluster))
    search.run(cluster.rates)
    batch_s = 1 / float(search.best[0]) if search.best[0] > 0 else np.inf
    return float(cluster.latency.per_batch_s * batch_s)


def _within_a_second(latency: Latency) -> Goal:
    limits: dict[str, Any] = {latency: 1.0}
    return Goal(objective="throughput", **limits)


def _all_machines(cluster: Cluster) -> Ints:
    return np.minimum(cluster.counts, cluster.num_layers)[None]


def _least_sum(cluster: Cluster) -> float:
    """The least sum over the stages of machines in their places."""
    num_layers = cluster.num_layers
    machines = [_Machine(cluster, shape) for shape in range(len(cluster.shapes))]
    table = np.full((NUM_PLACES, num_layers + 1), np.inf)
    table[0, 0] = 0.0
    least = np.inf
    for shape, count in zip(cluster.shape_of, cluster.counts, strict=True):
        by_place = machines[shape].by_place
        least = min(least, by_place[ONLY][num_layers])
        for _ in range(min(int(count), machines[shape].most_needed)):
            new = table.copy()
            for place, states in BEFORE.items():
                for state in states:
                    after = new[state | place]
                    np.minimum(after, _together(table[state], by_place[place]), out=after)
            table = new
    return float(min(least, table[DONE, num_layers]))


class _Machine:
    """by_place: [place][layers], the least time of a machine that holds just so many of them.
    most_needed: of such machines, where a layer takes as long on each.
    """

    def __init__(self, cluster: Cluster, shape: int) -> None:
        self.shape = cluster.shapes[shape]
        self.parts = _part_seconds(cluster)[:, shape]
        self.fits = cluster.layers[1][:, shape]
        self.tps = allowed_tps(cluster.estimator, cluster.shapes)
        self.count = np.arange(cluster.num_layers + 1)
        near = self._near()
        self.by_place = [self._in_place(place, near) for place in range(NUM_PLACES)]
        # One more than that for each end of the model, whose machine may hold fewer.
        held = max(1, int(np.flatnonzero(np.isfinite(near[-1])).max(initial=0)))
        self.most_needed = -(-cluster.num_layers // held) + 2

    def _stage(self, place: int, row: int) -> Array:
        """[layers]: the time of a stage in its place, of one TP degree; at least one layer."""
        end, ends = STAGE_ENDS[place]
        seconds = self.count * self.parts[LAYER, row] + self.parts[end, row]
        return np.where((self.count >= 1) & (self.count <= self.fits[ends, row]), seconds, np.inf)

    def _near(self) -> list[Array]:
        """[GPUs][layers]: in any number of stages that hand on inside, on at most so many GPUs."""
        nothing = np.where(self.count == 0, 0.0, np.inf)
        best = [nothing]
        for gpus in range(1, self.shape.num_gpus + 1):
            ways = [
                _together(best[gpus - tp], self._stage(NEAR_STAGE, row))
                for row, tp in enumerate(self.tps)
                if tp <= gpus
            ]
            best.append(np.minimum.reduce([best[-1], *ways]))
        return best

    def _in_place(self, place: int, near: Sequence[Array]) -> Array:
        """[layers]: a closing stage after others; where the model begins, after its first one."""
        gpus = self.shape.num_gpus
        ways = [np.full(len(self.count), np.inf)]
        for row, tp in enumerate(self.tps):
            if tp > gpus:
                continue
            closing = self._stage(CLOSING[place], row)
            if place not in OPENING:
                ways.append(_together(near[gpus - tp], closing))
                continue
            ways.append(self._stage(ALONE[place], row))
            for first, first_tp in enumerate(self.tps):
                if first_tp + tp <= gpus:
                    opening = self._stage(OPENING[place], first)
                    rest = _together(near[gpus - tp - first_tp], closing)
                    ways.append(_together(opening, rest))
        return np.asarray(np.minimum.reduce(ways))


def _part_seconds(cluster: Cluster) -> Array:
    """[part, shape, tp]: what each part of a stage adds to the sum, for one request."""
    limits = cluster.latency
    assert limits is not None, "there is a limit"
    if limits.alone is not None:
        return limits.alone
    one = np.ones(1, dtype=np.int64)
    tps = allowed_tps(cluster.estimator, cluster.shapes)
    times = point_times(cluster.estimator, cluster.shapes, tps, one, ANY_DEPTH * one)
    return np.asarray(limits.part_shares(times, one)[0, 0])


def _together(one: Array, other: Array) -> Array:
    """[layers]: the least sum of both with so many layers between them."""
    layers = np.arange(len(one))
    rest = layers[:, None] - layers
    both = np.where(rest >= 0, one[np.maximum(rest, 0)] + other, np.inf)
    return np.asarray(both.min(axis=1))
