"""Bounds that need no search: what each machine can add to a fleet's throughput at most.

A pipeline of throughput r gives a stage of l layers at most 1 / r seconds per request, so
r · l · t ≤ 1 with t the seconds of a layer per request. Summed over its stages, r · N_L is at most
Σ 1 / t: whatever machines it is made of, they add up. So a fleet's throughput is at most the sum of
its machines' shares, its ratio to dollars the best machine's, and its price for a load that of the
best machines for their shares. For a search that was cut off before it proved anything better.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from placement.hardware import Shape
from placement.optimizer.cluster import Cluster
from placement.optimizer.rates import LAYER, allowed_tps
from placement.optimizer.search import TOLERANCE
from placement.roofline import Array


def ceiling(cluster: Cluster) -> float:
    """No fleet of these machines has a better value of the goal's objective."""
    shares = machine_rps(cluster)
    prices, counts = cluster.prices, cluster.counts
    objective = cluster.goal.objective
    if objective == "throughput":
        return most_rps(cluster)
    ratios = shares / prices
    if objective == "throughput-per-dollar":
        return float(ratios.max())
    load = cluster.goal.load_rps
    assert load is not None
    price = 0.0
    for index in np.argsort(-ratios):
        taken = min(load, float(shares[index] * counts[index]))
        price += taken / float(ratios[index])
        load -= taken
    return price


def is_ruled_out(cluster: Cluster) -> bool:
    """Whether load or price are beyond what any machines can do."""
    goal = cluster.goal
    load, limit = goal.load_rps, goal.max_price_usd_per_hour
    if load is not None and most_rps(cluster) < load * (1 - TOLERANCE):
        return True
    if limit is None:
        return False
    least = float(cluster.prices.min())
    if load is not None:
        least = max(least, ceiling(replace(cluster, goal=replace(goal, objective="cost-for-load"))))
    return limit < least * (1 - TOLERANCE)


def most_rps(cluster: Cluster) -> float:
    """No fleet of these machines serves more requests per second."""
    return float(machine_rps(cluster) @ cluster.counts)


def machine_rps(cluster: Cluster) -> Array:
    """[class]: requests per second that a machine adds at most to those of a fleet."""
    shapes, tps = cluster.shapes, allowed_tps(cluster.estimator, cluster.shapes)
    layer_s = _least_layer_s(cluster)
    by_shape = np.zeros(len(shapes))
    for column, shape in enumerate(shapes):
        speed = {tp: 1 / float(layer_s[column, row]) for row, tp in enumerate(tps)}
        by_shape[column] = _best_split(shape, speed)
    return np.asarray(by_shape[cluster.shape_of] / cluster.num_layers)


def _best_split(shape: Shape, speed: dict[int, float]) -> float:
    """The largest sum of speeds of stages on so many GPUs."""
    best = [0.0] * (shape.num_gpus + 1)
    for gpus in range(1, shape.num_gpus + 1):
        options = [best[gpus - tp] + one for tp, one in speed.items() if tp <= gpus]
        best[gpus] = max([best[gpus - 1], *options])
    return best[-1]


def _least_layer_s(cluster: Cluster) -> Array:
    """[shape, tp]: seconds of a layer per request, no more than at any batch and depth."""
    rates = cluster.rates
    times = rates.least_times(rates.starts())[:, :, LAYER]
    return np.asarray(times.sum(axis=1).min(axis=0))
