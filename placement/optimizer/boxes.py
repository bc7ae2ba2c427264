"""Boxes of batches and limits: what they can reach, how they shrink, how they split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from placement.optimizer.capacity import SLACK, STAGE_ENDS, StageLayers
from placement.optimizer.rates import FAR, LAYER, LOGITS, NEAR, Ints, Mask, Ranges, Rates
from placement.roofline import Array

# Above this ratio of its ends, a range of limits is split at the geometric mean.
_WIDE = 4.0
# Bounds of times are about so far below them: half of a step of the grid and of a block.
_LOOSE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """Ranges of batches, of depths and of limits of a stage's time per request.

    group: [box], which candidate it belongs to. low..high, shallow..deep: batches and depths,
    [box], as in `Ranges`. least..most: limits, [box, resource]; the largest stage times of the
    pipelines meant lie between them. cost: [box], no machines meant are cheaper. factor: [box], by
    which latencies lower the value at least. is_led: [box], whether the `lead` of its ranges is as
    good as all of them, so that parts of the ranges are not told apart by their bounds.
    """

    group: Ints
    low: Ints
    high: Ints
    shallow: Ints
    deep: Ints
    least: Array
    most: Array
    cost: Array
    factor: Array
    is_led: Mask

    def __len__(self) -> int:
        return len(self.low)

    def take(self, rows: Ints | Mask) -> Boxes:
        return Boxes(**{name: getattr(self, name)[rows] for name in _FIELDS})

    @property
    def ranges(self) -> Ranges:
        return Ranges(low=self.low, high=self.high, shallow=self.shallow, deep=self.deep)

    @property
    def rate_bound(self) -> Array:
        """[box]: no pipeline meant has a higher throughput, in requests per second."""
        return np.asarray(1.0 / self.least.sum(axis=1))

    @property
    def certainty(self) -> Array:
        """[box]: share of its throughput bound that a pipeline within its limits has at least."""
        return np.asarray(self.least.sum(axis=1) / self.most.sum(axis=1))


_FIELDS = tuple(field.name for field in fields(Boxes))


def join(parts: Sequence[Boxes]) -> Boxes:
    return Boxes(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS}
    )


def whole(rates: Rates, groups: Ints) -> Boxes:
    """Boxes for each group with all that is possible."""
    starts = rates.starts()
    group = np.repeat(groups, len(starts))
    ranges = starts.take(np.tile(np.arange(len(starts)), len(groups)))
    least = rates.least_times(starts)[:, :, LAYER].min(axis=(2, 3))
    return Boxes(
        group=group,
        low=ranges.low,
        high=ranges.high,
        shallow=ranges.shallow,
        deep=ranges.deep,
        least=np.tile(least, (len(groups), 1)),
        most=np.tile(rates.most_times(), (len(group), 1)),
        cost=np.full(len(group), np.finfo(np.float64).tiny),
        factor=np.ones(len(group)),
        is_led=np.zeros(len(group), dtype=bool),
    )


def largest_times(stages: StageLayers, used: Mask) -> Array:
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


def smallest_times(stages: StageLayers, used: Mask, least: Array) -> Array:
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


def is_as_good(lead: StageLayers, stages: StageLayers, used: Mask) -> Mask:
    """[box]: whether the lead is as fast as any of the range, and holds as much."""
    unused = ~used[:, None, :, None]
    is_time = (lead.times <= stages.times) | unused[:, None]
    is_layers = (lead.layers >= stages.layers) | ((stages.layers < 1) | unused)
    return np.asarray(is_time.all(axis=(1, 2, 3, 4)) & is_layers.all(axis=(1, 2, 3)))


def split(boxes: Boxes, can_load: Mask) -> tuple[Boxes, Boxes]:
    """Each box in two, along the range that leaves most of its bound open; and those left whole.

    can_load: [box], where times of the batches are bounded, and can be made exact instead of the
    batches' being split: such boxes are left whole.
    """
    width = boxes.most - boxes.least
    limits = (width / boxes.least.sum(axis=1, keepdims=True)).max(axis=1)
    batches = 0.5 * (boxes.high - boxes.low) / boxes.high
    batches = np.where(can_load | (boxes.is_led & (batches > 0)), _LOOSE, batches)
    depths = 0.5 * (boxes.deep - boxes.shallow) / np.maximum(boxes.deep, 1)
    depths = np.where(boxes.is_led & (depths > 0), _LOOSE, depths)
    by_depth = (depths > 0) & (depths >= np.maximum(batches, limits))
    by_batch = ~by_depth & (batches > 0) & (batches >= limits)
    parts = [
        *_halve(boxes.take(by_depth), "shallow", "deep"),
        *_halve(boxes.take(by_batch & ~can_load), "low", "high"),
        *_halve_limits(boxes.take(~by_batch & ~by_depth)),
    ]
    return join(parts), boxes.take(by_batch & can_load)


def _halve(boxes: Boxes, low: str, high: str) -> tuple[Boxes, Boxes]:
    """By batch or depth, where the binary digits of its ends begin to differ: halves of the same
    number are the same whatever they were cut from, and are computed once."""
    least, most = getattr(boxes, low), getattr(boxes, high)
    bit = np.frexp(least ^ most)[1] - 1
    middle = most >> bit << bit
    boxes = replace(boxes, is_led=np.zeros(len(boxes), dtype=bool))
    return replace(boxes, **{high: middle - 1}), replace(boxes, **{low: middle})


def _halve_limits(boxes: Boxes) -> tuple[Boxes, Boxes]:
    rows = np.arange(len(boxes))
    side = (boxes.most - boxes.least).argmax(axis=1)
    least, most = boxes.least[rows, side], boxes.most[rows, side]
    middle = np.where(most > _WIDE * least, np.sqrt(least * most), (least + most) / 2)
    upper, lower = boxes.least.copy(), boxes.most.copy()
    upper[rows, side] = lower[rows, side] = middle
    return replace(boxes, most=lower), replace(boxes, least=upper)
