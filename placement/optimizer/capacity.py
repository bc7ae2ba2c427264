"""How many layers a machine can hold, by its place in the pipeline.

For a batch and limits θ_r of a stage's time per request, a stage of one kind holds
n = min_r ⌊(θ_r − ends_r) / layer_r⌋ layers, and no more than its memory does. A machine holds the
most that any split of its GPUs into stages does. Arrays run over many boxes of limits at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.optimizer.rates import (
    BOTH_ENDS,
    FAR,
    LAYER,
    LOGITS,
    NEAR,
    NO_END,
    ONE_END,
    Ints,
    Mask,
    Ranges,
    Rates,
)
from placement.roofline import Array

# A machine's place in its pipeline; the values are two bits, so that places add up.
MIDDLE, FIRST, LAST, ONLY = range(4)
NUM_PLACES = 4

# A stage's place: hands on inside the machine or to another one, holds an end of the model.
NEAR_STAGE, _FAR, _FIRST_NEAR, _FIRST_FAR, _LAST, _ONLY = range(6)
STAGE_ENDS = (
    (NEAR, NO_END),
    (FAR, NO_END),
    (NEAR, ONE_END),
    (FAR, ONE_END),
    (LOGITS, ONE_END),
    (LOGITS, BOTH_ENDS),
)
# The stage that closes a machine's part of the pipeline, after any number of ordinary ones. Where
# the part begins with the model's first stage, that one opens it, or does both alone.
CLOSING = {MIDDLE: _FAR, FIRST: _FAR, LAST: _LAST, ONLY: _LAST}
OPENING = {FIRST: _FIRST_NEAR, ONLY: _FIRST_NEAR}
ALONE = {FIRST: _FIRST_FAR, ONLY: _ONLY}

# Rounding in θ must not cost a layer.
SLACK = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """times: [box, resource, part, shape, tp]. layers: [box, place of stage, shape, tp]; 0 or less
    where a stage cannot hold one layer. shallow..deep: [box], numbers of stages of the pipelines
    meant; `ANY_DEPTH` where they are not counted."""

    times: Array
    layers: Array
    shallow: Ints
    deep: Ints

    def take(self, rows: Ints | Mask) -> StageLayers:
        return StageLayers(
            times=self.times[rows],
            layers=self.layers[rows],
            shallow=self.shallow[rows],
            deep=self.deep[rows],
        )


def stage_layers(rates: Rates, ranges: Ranges, most: Array) -> StageLayers:
    """The most layers of a stage of each kind, for all of a range, and limits `most`."""
    times = rates.least_times(ranges)
    limit = (most * (1 + SLACK))[:, :, None, None]
    by_end = [
        np.floor((limit - times[:, :, end]) / times[:, :, LAYER]).min(axis=1)
        for end in (NEAR, FAR, LOGITS)
    ]
    fits = rates.layers[ranges.low]
    layers = np.stack(
        [np.minimum(by_end[end - NEAR], fits[:, ends]) for end, ends in STAGE_ENDS], axis=1
    )
    return StageLayers(times=times, layers=layers, shallow=ranges.shallow, deep=ranges.deep)


def machine_layers(rates: Rates, stages: StageLayers) -> Array:
    """[box, place, shape]: the most layers of a machine, over all splits; −∞ where none.

    Pipelines of any number of stages: where there are more stages than layers, stages that hand on
    inside a machine, or machines in the middle, can be left out. Only what opens and closes the
    ends cannot, which matters to models of one or two layers.
    """
    near = _best_near(rates, stages)
    held = np.where(stages.layers >= 1, stages.layers, -np.inf)
    places = []
    for place in range(NUM_PLACES):
        close = held[:, CLOSING[place]]
        if place not in OPENING:
            places.append(_with_rest(rates, close, near))
            continue
        best = held[:, ALONE[place]].max(axis=2)
        if may_open(place, rates.num_layers):
            best = np.maximum(best, _with_opening(rates, held[:, OPENING[place]], close, near))
        places.append(best)
    if rates.num_layers == 1:
        places[MIDDLE] = places[FIRST] = places[LAST] = np.full_like(places[ONLY], -np.inf)
    return np.stack(places, axis=1)


def counted_layers(rates: Rates, stages: StageLayers, depth: int) -> Array:
    """[box, place, stages − 1, shape]: as `machine_layers`, by the number of the machine's stages.

    Up to `depth` stages. Each stage holds a layer at least, so none can be left out.
    """
    most = min(depth, max(shape.num_gpus for shape in rates.shapes))
    near = _best_near_counted(rates, stages, most)
    held = np.where(stages.layers >= 1, stages.layers, -np.inf)
    counted = np.full((len(held), NUM_PLACES, most, len(rates.shapes)), -np.inf)
    for place in range(NUM_PLACES):
        close = held[:, CLOSING[place]]
        for num in range(1, most + 1):
            if place not in OPENING:
                best = _with_rest(rates, close, near[num - 1])
            elif num == 1:
                best = held[:, ALONE[place]].max(axis=2)
            else:
                best = _with_opening(rates, held[:, OPENING[place]], close, near[num - 2])
            counted[:, place, num - 1] = best
    return counted


def _best_near_counted(rates: Rates, stages: StageLayers, most: int) -> list[Array]:
    """As `_best_near`, for exactly 0, 1, .. most − 1 stages."""
    num_gpus = max(shape.num_gpus for shape in rates.shapes)
    held = np.where(stages.layers[:, NEAR_STAGE] >= 1, stages.layers[:, NEAR_STAGE], -np.inf)
    best = [np.zeros((*held.shape[:2], num_gpus + 1))]
    for _ in range(1, most):
        new = np.full_like(best[0], -np.inf)
        for gpus in range(1, num_gpus + 1):
            for row, tp in enumerate(rates.tps):
                if tp <= gpus:
                    option = best[-1][:, :, gpus - tp] + held[:, :, row]
                    np.maximum(new[:, :, gpus], option, out=new[:, :, gpus])
        best.append(new)
    return best


def may_open(place: int, num_layers: int) -> bool:
    """Whether a machine with a stage of its own for the model's beginning, one that closes it, and
    a last machine where there is one, can each be given a layer."""
    return num_layers > (1 if place == ONLY else 2)


def _best_near(rates: Rates, stages: StageLayers) -> Array:
    """[box, shape, GPUs]: the most layers on so many GPUs in stages that hand on inside."""
    most = max(shape.num_gpus for shape in rates.shapes)
    held = np.maximum(stages.layers[:, NEAR_STAGE], 0.0)
    best = np.zeros((*held.shape[:2], most + 1))
    for gpus in range(1, most + 1):
        options = [
            best[:, :, gpus - tp] + held[:, :, row]
            for row, tp in enumerate(rates.tps)
            if tp <= gpus
        ]
        if options:
            best[:, :, gpus] = np.maximum(best[:, :, gpus - 1], np.maximum.reduce(options))
    return best


def _with_rest(rates: Rates, close: Array, near: Array) -> Array:
    """[box, shape]: the best closing stage, with the rest of the GPUs."""
    rest = rates.num_gpus[:, None] - np.array(rates.tps)
    return np.asarray(_fitting(close + _at(near, rest), rest).max(axis=2))


def _with_opening(rates: Rates, opening: Array, close: Array, near: Array) -> Array:
    """[box, shape]: the best opening and closing stages, with the rest of the GPUs."""
    rest = rates.num_gpus[:, None, None] - np.add.outer(rates.tps, rates.tps)
    total = opening[..., None] + close[:, :, None] + _at(near, rest)
    return np.asarray(_fitting(total, rest).max(axis=(2, 3)))


def _at(near: Array, gpus: Ints) -> Array:
    """[box, shape, ...]: entries of `near` for numbers of GPUs, [shape, ...]."""
    shape = np.arange(len(gpus)).reshape(-1, *[1] * (gpus.ndim - 1))
    return near[:, shape, np.maximum(gpus, 0)]


def _fitting(total: Array, rest: Ints) -> Array:
    return np.where(rest >= 0, total, -np.inf)
