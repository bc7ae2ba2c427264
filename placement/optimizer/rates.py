"""What a layer costs each kind of stage, as seconds per request in flight.

A pipeline's throughput is 1 / Σ_r θ_r, where θ_r is the largest time of a stage in resource r,
divided by the batch. In reading `batch` the resources are prefill and decode (equation 5), in
`continuous` their sum alone. Divided so, the throughput does not depend on the batch at all, and
times hardly do: the search can bound a whole range of batches by one number.

The search asks for the least times of ranges of batches and depths. `Tabulated` knows those of
every batch; `placement.optimizer.bounded.Bounded` bounds them, and computes what is needed exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from placement.estimator import Estimator, StageKind
from placement.hardware import Shape
from placement.roofline import Array

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

# What a stage spends besides its layers: a hop inside its machine, to another one, or logits.
LAYER, NEAR, FAR, LOGITS = range(4)
# How many embeddings and heads a stage holds: none, one, both ends of the model.
NO_END, ONE_END, BOTH_ENDS = range(3)
# The depth of pipelines of any number of stages, where times do not depend on it.
ANY_DEPTH = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """low..high: batches; shallow..deep: numbers of stages, or `ANY_DEPTH` both. [range] each."""

    low: Ints
    high: Ints
    shallow: Ints
    deep: Ints

    def __len__(self) -> int:
        return len(self.low)

    def take(self, rows: Ints | Mask) -> Ranges:
        return Ranges(**{one.name: getattr(self, one.name)[rows] for one in fields(Ranges)})


@dataclass(frozen=True, slots=True)
class Hint:
    """A batch and depth, and [resource] limits of the stages' times, where a search found its best
    pipeline; another one, with other prices, may find its own there."""

    batch: int
    depth: int
    limits: Array

    @property
    def ranges(self) -> Ranges:
        batch, depth = np.array([self.batch]), np.array([self.depth])
        return Ranges(low=batch, high=batch, shallow=depth, deep=depth)


@dataclass(frozen=True, kw_only=True)
class Rates(ABC):
    """Times and memory of every kind of stage.

    tps: TP degrees; a kind is a pair of indices (shape, tp). An impossible kind takes ∞ for a
    layer. layers: [batch, ends, shape, tp], the most layers whose weights and KV fit, from batch 0
    (unused) to the largest. depths: numbers of stages, or `ANY_DEPTH` alone. hints: of the searches
    so far, the last ones last.
    """

    estimator: Estimator
    shapes: tuple[Shape, ...]
    tps: tuple[int, ...]
    layers: Array
    depths: tuple[int, ...]
    hints: list[Hint] = field(default_factory=list, repr=False)

    @property
    def num_layers(self) -> int:
        return self.estimator.model.num_layers

    @property
    def max_batch(self) -> int:
        return len(self.layers) - 1

    @property
    def num_gpus(self) -> Ints:
        """[shape]: GPUs of a machine."""
        return np.array([shape.num_gpus for shape in self.shapes])

    @abstractmethod
    def starts(self) -> Ranges:
        """Ranges that have all batches and depths in them."""

    @abstractmethod
    def least_times(self, ranges: Ranges) -> Array:
        """[range, resource, part, shape, tp]: no batch and depth of the range takes less time."""

    @abstractmethod
    def most_times(self) -> Array:
        """[resource]: no stage takes longer, whatever its layers."""

    @abstractmethod
    def lead(self, ranges: Ranges) -> Ranges:
        """The largest batches at the smallest depth of each, as far as they are told apart."""

    @abstractmethod
    def is_exact(self, ranges: Ranges) -> Mask:
        """[range]: whether `least_times` is what one of its batches does take, part by part."""

    @abstractmethod
    def can_load(self, ranges: Ranges) -> Mask:
        """[range]: which are narrow enough to be computed exactly."""

    @abstractmethod
    def load(self, ranges: Ranges) -> None:
        """Compute times of these ranges exactly, so that `is_exact` holds for them."""


@dataclass(frozen=True, kw_only=True)
class Tabulated(Rates):
    """Exact times of all batches. Nothing is assumed of how they depend on the batch.

    least: by depth; minima over ranges of batches by powers of two (a sparse table) of times,
    [batch, resource, part, shape, tp].
    """

    least: dict[int, tuple[Array, ...]]

    def starts(self) -> Ranges:
        depths = np.array(self.depths)
        low = np.ones_like(depths)
        return Ranges(low=low, high=low * self.max_batch, shallow=depths, deep=depths)

    def least_times(self, ranges: Ranges) -> Array:
        stack = np.empty((len(ranges), *self.least[self.depths[0]][0].shape[1:]))
        for depth in np.unique(ranges.shallow):
            rows = np.flatnonzero(ranges.shallow == depth)
            stack[rows] = range_minima(self.least[int(depth)], ranges.low[rows], ranges.high[rows])
        return stack

    def most_times(self) -> Array:
        most = np.array([self._most(tables[0][1:]) for tables in self.least.values()])
        return np.asarray(most.max(axis=0))

    def _most(self, times: Array) -> Array:
        layer = np.where(np.isfinite(times[:, :, LAYER]), times[:, :, LAYER], 0.0)
        ends = times[:, :, NEAR : LOGITS + 1].max(axis=(0, 2, 3, 4))
        return np.asarray(self.num_layers * layer.max(axis=(0, 2, 3)) + ends)

    def lead(self, ranges: Ranges) -> Ranges:
        return replace(ranges, low=ranges.high)

    def is_exact(self, ranges: Ranges) -> Mask:
        return np.ones(len(ranges), dtype=bool)

    def can_load(self, ranges: Ranges) -> Mask:
        return np.zeros(len(ranges), dtype=bool)

    def load(self, ranges: Ranges) -> None:
        """Nothing is left to compute."""


def tabulate(
    estimator: Estimator, shapes: Sequence[Shape], layers: Array, depths: Sequence[int]
) -> Tabulated:
    """The tables of all kinds of stages. depths: [ANY_DEPTH] in reading `batch`.

    layers: of `layer_limits`. Batches that no kind can hold are left out.
    """
    tps = allowed_tps(estimator, shapes)
    batch = np.maximum(np.arange(len(layers)), 1)
    return Tabulated(
        estimator=estimator,
        shapes=tuple(shapes),
        tps=tps,
        layers=layers,
        depths=tuple(depths),
        least={
            depth: sparse_minima(
                point_times(estimator, shapes, tps, batch, np.full_like(batch, depth))
            )
            for depth in depths
        },
    )


def point_times(
    estimator: Estimator, shapes: Sequence[Shape], tps: Sequence[int], batch: Ints, depth: Ints
) -> Array:
    """[point, resource, part, shape, tp]: seconds per request. batch, depth: [point]."""
    num_resources = 2 if estimator.fidelity.reading == "batch" else 1
    times = np.zeros((len(batch), num_resources, 4, len(shapes), len(tps)))
    times[:, :, LAYER] = np.inf
    sizes = batch.astype(np.float64)
    for column, row, kind in kinds(shapes, tps):
        if estimator.fidelity.reading == "batch":
            phases = [estimator.prefill_times(kind, sizes), estimator.decode_times(kind, sizes, 1)]
        else:
            phases = [estimator.continuous_times(kind, sizes, depth.astype(np.float64))]
        for resource, phase in enumerate(phases):
            for part, seconds in enumerate(phase.parts):
                times[:, resource, part, column, row] = seconds / sizes
    return times


def kinds(shapes: Sequence[Shape], tps: Sequence[int]) -> list[tuple[int, int, StageKind]]:
    """(shape's index, TP's index, kind) of all that are possible."""
    return [
        (column, row, StageKind(shape=shape, tp=tp))
        for column, shape in enumerate(shapes)
        for row, tp in enumerate(tps)
        if tp <= shape.num_gpus
    ]


def allowed_tps(estimator: Estimator, shapes: Sequence[Shape]) -> tuple[int, ...]:
    """TP degrees that the model allows on the largest of the shapes."""
    most = max(shape.num_gpus for shape in shapes)
    return tuple(tp for tp in range(1, most + 1) if estimator.model.allows_tp(tp))


def layer_limits(estimator: Estimator, shapes: Sequence[Shape]) -> Array:
    """[batch, ends, shape, tp]: the most layers that fit, up to the largest batch that fits at all.

    Equation 6 turned round: for each number of layers the largest batch, in the estimator's own
    arithmetic, then for each batch the number of layers that still allow it.
    """
    tps = allowed_tps(estimator, shapes)
    batches = np.zeros((3, len(shapes), len(tps), estimator.model.num_layers))
    for column, row, kind in kinds(shapes, tps):
        batches[:, column, row] = _batch_limits(estimator, kind)
    max_batch = int(batches.max())
    limits = np.zeros((max_batch + 1, *batches.shape[:3]))
    for batch in range(max_batch + 1):
        limits[batch] = (batches >= max(batch, 1)).sum(axis=-1)
    return limits


def _batch_limits(estimator: Estimator, kind: StageKind) -> Array:
    """[ends, layers − 1]: the largest batch of a stage of this kind, 0 where none fits."""
    memory = estimator.stage_memory(kind)
    count = np.arange(1, estimator.model.num_layers + 1, dtype=np.float64)
    limits = []
    for is_first, is_last in ((False, False), (True, False), (True, True)):
        weights = np.array(
            [
                estimator.weight_bytes(kind, int(layers), is_first=is_first, is_last=is_last)
                for layers in count
            ]
        )
        fits = np.floor((memory.available - weights) / (count * memory.layer_kv_per_request))
        limits.append(np.clip(fits, 0, estimator.fidelity.max_batch))
    return np.minimum.accumulate(np.array(limits), axis=1)


def sparse_minima(times: Array) -> tuple[Array, ...]:
    """Minima over rows i .. i + 2^k − 1 of the first axis, for each k."""
    tables = [times]
    width = 1
    while 2 * width <= len(times):
        last = tables[-1]
        tables.append(np.minimum(last[:-width], last[width:]))
        width *= 2
    return tuple(tables)


def range_minima(least: tuple[Array, ...], low: Ints, high: Ints) -> Array:
    """[range, ...]: the least of rows low..high. least: of `sparse_minima`."""
    level = np.frexp(high - low + 1)[1] - 1
    stack = np.empty((len(low), *least[0].shape[1:]))
    for power in np.unique(level):
        rows = np.flatnonzero(level == power)
        table = least[power]
        stack[rows] = np.minimum(table[low[rows]], table[high[rows] - (1 << power) + 1])
    return stack
