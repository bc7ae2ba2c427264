"""Boxes of batches and limits: what they can reach, how they shrink, how they split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from placement.optimizer.capacity import SLACK, STAGE_ENDS, StageLayers
from placement.optimizer.rates import FAR, LAYER, LOGITS, NEAR, Ints, Rates
from placement.roofline import Array

# Above this ratio of its ends, a range of limits is split at the geometric mean.
_WIDE = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """Ranges of batches and of limits of a stage's time per request.

    group: [box], which candidate it belongs to. low..high: batches, [box]. least..most: limits,
    [box, resource]; the largest stage times of the pipelines meant lie between them. cost: [box],
    no machines meant are cheaper. factor: [box], by which latencies lower the value at least.
    """

    group: Ints
    low: Ints
    high: Ints
    least: Array
    most: Array
    cost: Array
    factor: Array

    def __len__(self) -> int:
        return len(self.low)

    def take(self, rows: Ints | NDArray[np.bool_]) -> Boxes:
        return Boxes(**{name: getattr(self, name)[rows] for name in _FIELDS})

    @property
    def rate_bound(self) -> Array:
        """[box]: no pipeline meant has a higher throughput, in requests per second."""
        return np.asarray(1.0 / self.least.sum(axis=1))


_FIELDS = tuple(field.name for field in fields(Boxes))


def join(parts: Sequence[Boxes]) -> Boxes:
    return Boxes(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS}
    )


def whole(rates: Rates, groups: Ints) -> Boxes:
    """One box for each group with all that is possible."""
    layer = rates.times[1:, :, LAYER]
    ends = rates.times[1:, :, NEAR : LOGITS + 1].max(axis=(0, 2, 3, 4))
    slowest = np.where(np.isfinite(layer), layer, 0.0).max(axis=(0, 2, 3))
    least = layer.min(axis=(0, 2, 3))
    num = len(groups)
    return Boxes(
        group=groups,
        low=np.ones(num, dtype=np.int64),
        high=np.full(num, rates.max_batch, dtype=np.int64),
        least=np.tile(least, (num, 1)),
        most=np.tile(rates.num_layers * slowest + ends, (num, 1)),
        cost=np.full(num, np.finfo(np.float64).tiny),
        factor=np.ones(num),
    )


def largest_times(stages: StageLayers, used: NDArray[np.bool_]) -> Array:
    """[box, resource]: the largest time of any stage that is filled as far as it may be."""
    largest = np.zeros((len(used), stages.times.shape[1]))
    for place, (end, _) in enumerate(STAGE_ENDS):
        layers = stages.layers[:, place]
        is_stage = (layers >= 1) & used[:, :, None]
        for resource in range(largest.shape[1]):
            layer = np.where(is_stage, stages.times[:, resource, LAYER], 0.0)
            time = layers * layer + np.where(is_stage, stages.times[:, resource, end], 0.0)
            np.maximum(largest[:, resource], time.max(axis=(1, 2)), out=largest[:, resource])
    return largest


def smallest_times(stages: StageLayers, used: NDArray[np.bool_], least: Array) -> Array:
    """[box, resource]: the least time of a possible stage that is not below `least`; else ∞."""
    floor = (least * (1 - SLACK))[:, :, None, None]
    smallest = np.full(least.shape, np.inf)
    for end in (NEAR, FAR, LOGITS):
        places = [place for place, (other, _) in enumerate(STAGE_ENDS) if other == end]
        most = stages.layers[:, places].max(axis=1)
        layer, rest = stages.times[:, :, LAYER], stages.times[:, :, end]
        is_kind = np.isfinite(layer)
        layer = np.where(is_kind, layer, 1.0)
        count = np.maximum(np.ceil((floor - rest) / layer), 1.0)
        is_possible = is_kind & (count <= most[:, None]) & used[:, None, :, None]
        time = np.where(is_possible, count * layer + rest, np.inf)
        np.minimum(smallest, time.min(axis=(2, 3)), out=smallest)
    return smallest


def is_no_better(
    any_batch: StageLayers,
    largest: StageLayers,
    used: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """[box]: whether the largest batch is as fast as any of the range, and holds as much."""
    unused = ~used[:, None, :, None]
    times, layers = any_batch.times, any_batch.layers
    is_time = (largest.times <= times) | unused[:, None]
    is_layers = (largest.layers >= layers) | ((layers < 1) | unused)
    return np.asarray(is_time.all(axis=(1, 2, 3, 4)) & is_layers.all(axis=(1, 2, 3)))


def split(boxes: Boxes) -> Boxes:
    """Each box in two, along the range that leaves most of its bound open."""
    width = boxes.most - boxes.least
    share = width / boxes.least.sum(axis=1, keepdims=True)
    batches = 0.5 * (boxes.high - boxes.low) / boxes.high
    by_batch = (boxes.high > boxes.low) & (batches >= share.max(axis=1))
    parts = [*_halve_batches(boxes.take(by_batch)), *_halve_limits(boxes.take(~by_batch))]
    return join(parts)


def _halve_batches(boxes: Boxes) -> tuple[Boxes, Boxes]:
    middle = (boxes.low + boxes.high) // 2
    return replace(boxes, high=middle), replace(boxes, low=middle + 1)


def _halve_limits(boxes: Boxes) -> tuple[Boxes, Boxes]:
    rows = np.arange(len(boxes))
    side = (boxes.most - boxes.least).argmax(axis=1)
    least, most = boxes.least[rows, side], boxes.most[rows, side]
    middle = np.where(most > _WIDE * least, np.sqrt(least * most), (least + most) / 2)
    upper, lower = boxes.least.copy(), boxes.most.copy()
    upper[rows, side] = lower[rows, side] = middle
    return replace(boxes, most=lower), replace(boxes, least=upper)
