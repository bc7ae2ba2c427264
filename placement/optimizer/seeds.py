"""Points at which a search looks first: a pipeline found early closes most of the boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from placement.optimizer.boxes import Boxes
from placement.optimizer.rates import ANY_DEPTH, LAYER, LOGITS, NEAR, Hint, Mask, Ranges, Rates
from placement.roofline import Array

# Numbers of stages and requests in flight that are tried.
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
BATCHES = (1, 4, 16, 48, 96, 192, 384, 768)


def known_points(whole: Boxes, hints: Sequence[Hint]) -> Boxes:
    """The hints as boxes. whole: all that is possible."""
    batch = np.array([hint.batch for hint in hints])
    depth = np.array([hint.depth for hint in hints])
    return _points(
        whole,
        Ranges(low=batch, high=batch, shallow=depth, deep=depth),
        np.array([hint.limits for hint in hints]),
    )


def even_points(whole: Boxes, rates: Rates, used: Mask) -> Boxes:
    """Limits of pipelines of which all stages are of one kind and hold equally many layers.

    used: [shape], those that may be.
    """
    stages = np.array(DEPTHS)
    if rates.depths[0] != ANY_DEPTH:
        stages = stages[stages <= max(rates.depths)]
    batches = np.array([batch for batch in BATCHES if batch <= rates.max_batch])
    stages, batch = (axis.ravel() for axis in np.meshgrid(stages, batches))
    depth = np.where(rates.depths[0] == ANY_DEPTH, ANY_DEPTH, stages)
    ranges = Ranges(low=batch, high=batch, shallow=depth, deep=depth)
    times = rates.least_times(ranges)[:, :, :, used]
    share = -(-rates.num_layers // stages)[:, None, None, None]
    ends = times[:, :, NEAR : LOGITS + 1].max(axis=2)
    limits = np.moveaxis(share * times[:, :, LAYER] + ends, 1, -1)
    point, *_ = is_kind = np.nonzero(np.isfinite(limits).all(axis=-1))
    return _points(whole, ranges.take(point), limits[is_kind])


def _points(whole: Boxes, ranges: Ranges, limits: Array) -> Boxes:
    """Boxes of a search of one group up to these limits, [box, resource]."""
    rows = np.zeros(len(ranges), dtype=np.int64)
    return replace(
        whole.take(rows),
        low=ranges.low,
        high=ranges.high,
        shallow=ranges.shallow,
        deep=ranges.deep,
        least=np.minimum(whole.least.min(axis=0), limits),
        most=limits,
    )
