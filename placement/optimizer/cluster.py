"""A cluster as the search sees it: classes of machines, their shapes, and tables of their times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from placement.estimator import Estimator
from placement.hardware import Offer, Shape
from placement.optimizer.bounded import bound_rates
from placement.optimizer.latency import LatencyLimits, latency_limits
from placement.optimizer.machines import MachineClass, merge_offers
from placement.optimizer.rates import ANY_DEPTH, Ints, Rates, layer_limits, tabulate
from placement.plan import Goal
from placement.roofline import Array


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """classes: of machines. shapes: the distinct ones; `shape_of`, [class], points to them.

    layers: of `rates.layer_limits`, for all shapes.
    """

    estimator: Estimator
    goal: Goal
    classes: tuple[MachineClass, ...]
    shapes: tuple[Shape, ...]
    shape_of: Ints
    layers: Array
    latency: LatencyLimits | None

    @property
    def num_layers(self) -> int:
        return self.estimator.model.num_layers

    @property
    def counts(self) -> Ints:
        """[class]: machines of it."""
        return np.array([one.count for one in self.classes])

    @property
    def prices(self) -> Array:
        """[class]: dollars per hour of one machine."""
        return np.array([one.price_usd_per_hour for one in self.classes])

    @property
    def costs(self) -> Array:
        """[class]: `MachineClass.cost`, positive."""
        return np.array([one.cost for one in self.classes])

    @property
    def interruptions(self) -> Array:
        """[class]: expected per hour, of one machine."""
        return np.array([one.interruptions_per_hour for one in self.classes])

    @property
    def has_depths(self) -> bool:
        """Whether times depend on the number of stages."""
        return self.estimator.fidelity.reading == "continuous"

    @property
    def depths(self) -> Sequence[int]:
        """Numbers of stages that a pipeline may have; [ANY_DEPTH] where they are not counted."""
        if not self.has_depths:
            return [ANY_DEPTH]
        num_gpus = sum(one.count * one.shape.num_gpus for one in self.classes)
        return range(1, min(num_gpus, self.num_layers) + 1)

    @cached_property
    def rates(self) -> Rates:
        """The times of all kinds of stages. Times that were computed once are kept."""
        if self.has_depths and self.estimator.fidelity.is_monotone:
            return bound_rates(self.estimator, self.shapes, self.layers, max(self.depths))
        return tabulate(self.estimator, self.shapes, self.layers, self.depths)

    def availability(self, counts: Ints) -> Array:
        """[set]: of the machines in each row of `counts`, [set, class]."""
        rates = counts @ self.interruptions
        return np.array([self.goal.availability(float(rate)) for rate in rates])

    def num_sets(self) -> int:
        """How many different sets of machines there are."""
        return math.prod(min(one.count, self.num_layers) + 1 for one in self.classes) - 1

    def sets(self) -> Ints:
        """[set, class]: all sets of machines that are not more than there are layers."""
        axes = [np.arange(min(one.count, self.num_layers) + 1) for one in self.classes]
        grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
        size = grid.sum(axis=1)
        return np.asarray(grid[(size > 0) & (size <= self.num_layers)])


def make_cluster(offers: Sequence[Offer], estimator: Estimator, goal: Goal) -> Cluster:
    classes = merge_offers(offers, goal)
    shapes = tuple(dict.fromkeys(one.shape for one in classes))
    return Cluster(
        estimator=estimator,
        goal=goal,
        classes=tuple(classes),
        shapes=shapes,
        shape_of=np.array([shapes.index(one.shape) for one in classes]),
        layers=layer_limits(estimator, shapes),
        latency=latency_limits(goal, estimator, shapes),
    )
