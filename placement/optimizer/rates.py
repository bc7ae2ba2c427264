"""What a layer costs each kind of stage, as seconds per request in flight.

A pipeline's throughput is 1 / Σ_r θ_r, where θ_r is the largest time of a stage in resource r,
divided by the batch. In reading `batch` the resources are prefill and decode (equation 5), in
`continuous` their sum alone. Divided so, the throughput does not depend on the batch at all, and
times hardly do: the search can bound a whole range of batches by one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.estimator import Estimator, StageKind
from placement.hardware import Shape
from placement.roofline import Array

Ints = NDArray[np.int64]

# What a stage spends besides its layers: a hop inside its machine, to another one, or logits.
LAYER, NEAR, FAR, LOGITS = range(4)
# How many embeddings and heads a stage holds: none, one, both ends of the model.
NO_END, ONE_END, BOTH_ENDS = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Times and memory of every kind of stage, by batch, for pipelines of one depth.

    tps: TP degrees; a kind is a pair of indices (shape, tp). depth: None where times do not
    depend on it. max_batch: B_max; batch indices run from 0 (unused) to B_max.
    times: [batch, resource, part, shape, tp], seconds per request; an impossible kind takes ∞.
    least: the same, minima over ranges of batches by powers of two (a sparse table).
    layers: [batch, ends, shape, tp], the most layers whose weights and KV fit.
    """

    shapes: tuple[Shape, ...]
    tps: tuple[int, ...]
    depth: int | None
    num_layers: int
    max_batch: int
    times: Array
    least: tuple[Array, ...]
    layers: Array

    @property
    def num_gpus(self) -> Ints:
        """[shape]: GPUs of a machine."""
        return np.array([shape.num_gpus for shape in self.shapes])

    def least_times(self, low: Ints, high: Ints) -> Array:
        """[box, resource, part, shape, tp]: the least time of any batch in low..high."""
        level = np.frexp(high - low + 1)[1] - 1
        stack = np.empty((len(low), *self.times.shape[1:]))
        for power in np.unique(level):
            rows = np.flatnonzero(level == power)
            table = self.least[power]
            stack[rows] = np.minimum(table[low[rows]], table[high[rows] - (1 << power) + 1])
        return stack


def tabulate(
    estimator: Estimator, shapes: Sequence[Shape], layers: Array, depth: int | None
) -> Rates:
    """The tables of all kinds of stages. depth: stages of the pipeline; None in reading `batch`.

    layers: of `layer_limits`. Batches that no kind can hold are left out.
    """
    model = estimator.model
    max_batch = int(layers.shape[0]) - 1
    tps = allowed_tps(estimator, shapes)
    num_resources = 1 if depth is not None else 2
    times = np.zeros((max_batch + 1, num_resources, 4, len(shapes), len(tps)))
    times[:, :, LAYER] = np.inf
    batch = np.maximum(np.arange(max_batch + 1, dtype=np.float64), 1.0)
    for column, shape in enumerate(shapes):
        for row, tp in enumerate(tps):
            if tp <= shape.num_gpus:
                times[..., column, row] = _kind_times(
                    estimator, StageKind(shape=shape, tp=tp), batch, depth
                )
    return Rates(
        shapes=tuple(shapes),
        tps=tps,
        depth=depth,
        num_layers=model.num_layers,
        max_batch=max_batch,
        times=times,
        least=_sparse_minima(times),
        layers=layers,
    )


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
    for column, shape in enumerate(shapes):
        for row, tp in enumerate(tps):
            if tp <= shape.num_gpus:
                kind = StageKind(shape=shape, tp=tp)
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


def _kind_times(estimator: Estimator, kind: StageKind, batch: Array, depth: int | None) -> Array:
    """[batch, resource, part] of one kind."""
    phases = [
        np.stack(
            [
                np.broadcast_to(part / batch, batch.shape)
                for part in (times.layer_s, times.near_s, times.far_s, times.logits_s)
            ],
            axis=-1,
        )
        for times in (
            estimator.prefill_times(kind, batch),
            estimator.decode_times(kind, batch, depth or 1),
        )
    ]
    return np.stack(phases if depth is None else [phases[0] + phases[1]], axis=1)


def _sparse_minima(times: Array) -> tuple[Array, ...]:
    """Minima over batches b .. b + 2^k − 1, for each k."""
    tables = [times]
    width = 1
    while 2 * width <= len(times):
        last = tables[-1]
        tables.append(np.minimum(last[:-width], last[width:]))
        width *= 2
    return tuple(tables)
