"""Times of reading `continuous`, bounded for ranges of batches and depths, exact where needed.

There are as many tables as depths, and most of either are of no use to a search. But what takes
long, the operations of a step, depends on the batch B and the depth D by the size of a group
g = B / D alone. With the time d of a step that decodes, m of one with prompts, s the share of those
and φ(D, g) how often they count (`placement.pacing`), a request takes

    S_out / g · (d(g) + s(g) · φ(D, g) · max(m(g) − d(g), 0)).

d, m and s grow with g, and φ with D, and falls with g. So on a grid of g, values at the ends of an
interval bound the time of all between them, and minima over intervals that of ranges of batches and
depths. Where the search has narrowed a range to few batches of one depth, they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from placement.estimator import Estimator
from placement.hardware import Shape
from placement.optimizer.rates import (
    LAYER,
    Ints,
    Mask,
    Ranges,
    Rates,
    allowed_tps,
    kinds,
    point_times,
    range_minima,
    sparse_minima,
)
from placement.pacing import pace, times_counted
from placement.roofline import Array

# Ratio of neighbours on the grid of groups.
_STEP = 1.03
# Batches are computed by blocks: 2^_BLOCK_BITS of them between a power of two and the next.
_BLOCK_BITS = 5
# Bounds are tabulated for depths of so many binary digits, and hold for those above.
_DEPTH_BITS = 3
# Rounding must not lift a bound above the time.
_SAFE = 1 - 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBounds:
    """Bounds by intervals of groups: edges[i]..edges[i + 1].

    decode, mixed: [interval, part, shape, tp], seconds per request that its own step takes at
    least, and what prompts add each time that they count. spread: [interval], the largest. most_s:
    no stage takes longer.
    """

    edges: Array
    decode: Array
    mixed: Array
    spread: Array
    most_s: float

    def at(self, depth: int) -> Array:
        """[interval, part, shape, tp]: seconds per request, for this depth and all above."""
        counted = times_counted(depth, self.spread)[:, None, None, None]
        return np.asarray((self.decode + counted * self.mixed) * _SAFE)


def group_bounds(
    estimator: Estimator, shapes: Sequence[Shape], tps: Sequence[int], smallest: float, largest: int
) -> GroupBounds:
    """Bounds for groups from `smallest` to `largest`."""
    num = int(np.ceil(np.log(largest / smallest) / np.log(_STEP))) + 1
    edges = np.geomspace(smallest * (1 - 1e-9), largest * (1 + 1e-9), num + 1)
    output = estimator.workload.output_tokens
    groups = pace(edges, 1, estimator.workload, estimator.fidelity.max_tokens_per_pass)
    prompts = groups.num_prompts
    # They rise and then fall: the fewest of an interval are at an end. The last is for most_s.
    fewest = np.append(np.minimum(prompts[:-1], prompts[1:]), prompts.max())
    decode = np.zeros((num, 4, len(shapes), len(tps)))
    mixed = np.zeros_like(decode)
    decode[:, LAYER] = np.inf
    most_s = 0.0
    for column, row, kind in kinds(shapes, tps):
        alone, both = estimator.group_times(kind, edges, fewest)
        for part, (one, other) in enumerate(zip(alone.parts, both.parts, strict=True)):
            decode[:, part, column, row] = output * one[:-1] / edges[1:]
            added = groups.share_mixed[:-1] * np.maximum(other[:-1] - one[1:], 0.0)
            mixed[:, part, column, row] = output * added / edges[1:]
            count = estimator.model.num_layers if part == LAYER else 1
            most_s = max(most_s, count * float(one[-1] + groups.share_mixed[-1] * other[-1]))
    return GroupBounds(
        edges=edges,
        decode=decode,
        mixed=mixed,
        spread=groups.spread[1:],
        # Of a layer and an end; a mixed step counts no more often than there are stages.
        most_s=2 * most_s * output / smallest**2,
    )


@dataclass(frozen=True, kw_only=True)
class Bounded(Rates):
    """Bounds for all, exact times of the batches that were loaded.

    exact: by depth, [batch, resource, part, shape, tp], of batches that are_loaded, [depth, batch].
    """

    groups: GroupBounds
    are_loaded: Mask
    exact: dict[int, Array] = field(default_factory=dict)
    minima: dict[int, tuple[Array, ...]] = field(default_factory=dict)

    def starts(self) -> Ranges:
        # By depths that bounds tell apart: where stages cost nothing, few are far too good.
        shallow = np.unique(_floor_depth(np.array(self.depths)))
        low = np.ones_like(shallow)
        return Ranges(
            low=low,
            high=low * self.max_batch,
            shallow=shallow,
            deep=np.append(shallow[1:] - 1, max(self.depths)),
        )

    def least_times(self, ranges: Ranges) -> Array:
        num_parts = self.groups.decode.shape[1:]
        stack = np.empty((len(ranges), 1, *num_parts))
        is_exact = self.is_exact(ranges)
        for depth in np.unique(ranges.shallow[is_exact]):
            rows = np.flatnonzero(is_exact & (ranges.shallow == depth))
            times = self.exact[int(depth)][_batches(ranges.take(rows))]
            stack[rows] = times.min(axis=1)
        known = _floor_depth(ranges.shallow)
        edges = self.groups.edges
        first = np.searchsorted(edges, ranges.low / ranges.deep, side="right") - 1
        last = np.searchsorted(edges, ranges.high / ranges.shallow, side="left") - 1
        for depth in np.unique(known[~is_exact]):
            rows = np.flatnonzero(~is_exact & (known == depth))
            minima = self._minima(int(depth))
            stack[rows, 0] = range_minima(minima, first[rows], np.maximum(last, first)[rows])
        return stack

    def _minima(self, depth: int) -> tuple[Array, ...]:
        if depth not in self.minima:
            self.minima[depth] = sparse_minima(self.groups.at(depth))
        return self.minima[depth]

    def most_times(self) -> Array:
        return np.array([self.groups.most_s])

    def lead(self, ranges: Ranges) -> Ranges:
        size = _block_size(ranges.high)
        start = np.where(self.is_exact(ranges), ranges.high, ranges.high // size * size)
        return replace(ranges, low=np.maximum(ranges.low, start), deep=ranges.shallow)

    def is_exact(self, ranges: Ranges) -> Mask:
        is_exact = self.can_load(ranges)
        rows = np.flatnonzero(is_exact)
        batches = _batches(ranges.take(rows))
        is_exact[rows] = self.are_loaded[ranges.shallow[rows, None], batches].all(axis=1)
        return is_exact

    def can_load(self, ranges: Ranges) -> Mask:
        size = _block_size(ranges.low)
        is_block = ranges.low // size == ranges.high // size
        return np.asarray((ranges.shallow == ranges.deep) & is_block)

    def load(self, ranges: Ranges) -> None:
        is_wanted = np.zeros_like(self.are_loaded)
        is_wanted[ranges.shallow[:, None], _batches(ranges)] = True
        depth, batch = np.nonzero(is_wanted & ~self.are_loaded)
        if not len(depth):
            return
        times = point_times(self.estimator, self.shapes, self.tps, batch, depth)
        for one in np.unique(depth):
            if one not in self.exact:
                self.exact[int(one)] = np.empty((self.max_batch + 1, *times.shape[1:]))
            rows = depth == one
            self.exact[int(one)][batch[rows]] = times[rows]
        self.are_loaded[depth, batch] = True


def _batches(ranges: Ranges) -> Ints:
    """[range, ...]: all batches of each; the last one again where others have more."""
    width = int((ranges.high - ranges.low).max(initial=0)) + 1
    return np.asarray(np.minimum(ranges.low[:, None] + np.arange(width), ranges.high[:, None]))


def bound_rates(
    estimator: Estimator, shapes: Sequence[Shape], layers: Array, max_depth: int
) -> Bounded:
    """Bounds for pipelines of up to `max_depth` stages; nothing exact yet. Needs an estimator of
    reading `continuous` whose fidelity `is_monotone`. layers: of `layer_limits`."""
    tps = allowed_tps(estimator, shapes)
    max_batch = len(layers) - 1
    return Bounded(
        estimator=estimator,
        shapes=tuple(shapes),
        tps=tps,
        layers=layers,
        depths=tuple(range(1, max_depth + 1)),
        groups=group_bounds(estimator, shapes, tps, 1 / max_depth, max(max_batch, 1)),
        are_loaded=np.zeros((max_depth + 1, max_batch + 1), dtype=bool),
    )


def _floor_depth(depth: Ints) -> Ints:
    """The largest depth not above with bounds of its own."""
    low_bits = np.maximum(np.frexp(depth)[1] - _DEPTH_BITS, 0)
    return np.asarray(depth >> low_bits << low_bits)


def _block_size(batch: Ints) -> Ints:
    """Batches of the block in which each is."""
    return np.asarray(1 << np.maximum(np.frexp(batch)[1] - 1 - _BLOCK_BITS, 0))
