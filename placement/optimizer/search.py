"""Branch and bound over batches and limits of a stage's time.

Any pipeline whose batch and largest stage times lie in a box has a throughput of at most
1 / Σ_r least θ_r, and its machines hold no more layers than they do at the largest θ, the least
memory and the least times of the box. So the cheapest machines that hold the model there bound the
value of all of them. At one batch the machines found do hold the model within the largest θ, and
reach 1 / Σ_r most θ_r. Both bounds meet when the ranges have shrunk to one possible stage time.

Nothing is assumed of how times depend on the batch: minima over ranges are looked up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from placement.estimator import Stage
from placement.optimizer.arrangements import Arrangement, Arranger
from placement.optimizer.assembly import assemble
from placement.optimizer.boxes import (
    Boxes,
    is_as_good,
    join,
    largest_times,
    smallest_times,
    split,
    whole,
)
from placement.optimizer.capacity import SLACK, StageLayers, stage_layers
from placement.optimizer.latency import LatencyLimits
from placement.optimizer.places import Machine
from placement.optimizer.rates import Hint, Ints, Mask, Rates
from placement.optimizer.seeds import even_points, known_points
from placement.roofline import Array

# Values are equal within this share; bounds are proven up to it.
TOLERANCE = 1e-9
_BOXES_PER_ROUND = 128
_PROMISING_PER_ROUND = 64
# A round costs hardly more for so many boxes than for one.
_BOXES_WORTHWHILE = 64
# Boxes are split again so often while a round has few of them.
_MAX_SPLITS = 6
# Ranges of which times are made exact at most; the others may be closed by what is found there.
_LOADS_PER_ROUND = 32
# Ranges of batches in which a pipeline is sought, not only a bound.
_TRIALS_PER_ROUND = 8
# Points that are kept beside the best: of a round, and in the end.
_SEEN_PER_ROUND, _MAX_SEEN = 6, 10
# Points of earlier searches that are tried first: the last ones of each, and no more than so many.
_HINTS_KEPT, _MAX_HINTS = 4, 64
# Points that are tried to begin with where there are none.
_SEEDS = 96
# Share of the best value that a box has to promise for it.
_PROMISING = 0.97
# Boxes times classes whose costs are taken at once: after that many, the time is looked at.
_COSTS_AT_ONCE = 50_000


class Covers(Protocol):
    """Sets of machines that may hold the model, and what they cost."""

    @property
    def shapes(self) -> Ints:
        """[class]: index of its shape."""
        ...

    @property
    def is_given(self) -> bool:
        """Whether a group is one set of machines; else it is all sets of some."""
        ...

    def counts_of(self, group: int) -> Ints:
        """[class]: the machines that a group may use."""
        ...

    def used(self, group: Ints) -> Mask:
        """[box, shape]: which shapes the group of the box may use."""
        ...

    def cost(
        self, group: Ints, rates: Rates, stages: StageLayers, limit: Array, certainty: Array
    ) -> Array:
        """[box]: the least cost of machines that hold all layers; ∞ where none do.

        Where it exceeds `limit`, any lower bound that does so will do; where `certainty` is below
        1, any.
        """
        ...

    def machines(self, group: int, rates: Rates, stages: StageLayers) -> list[Machine]:
        """The machines of that cost in the one box that `stages` are of, first to last."""
        ...


@dataclass(frozen=True, slots=True)
class Point:
    """Where the best value of a group was found."""

    rates: Rates
    hint: Hint
    found: Arrangement | None = None


class Search:
    """The best value = gain · throughput / cost of each group, over all calls of `run`.

    gain: [group]. floor: [group], values up to which nothing is of interest.
    best, bound: [group]; bound is proven once `run` has ended, and holds if it was cut off.
    points: where the best of each group is. seen: of the only group, where machines are not given:
    by batch and depth, the best value there and where it is.
    """

    def __init__(
        self,
        covers: Covers,
        gain: Array,
        *,
        floor: Array | None = None,
        latency: LatencyLimits | None = None,
        tolerance: float = TOLERANCE,
        cap_rps: float = np.inf,
        is_joint: bool = False,
    ) -> None:
        self.covers = covers
        self.latency = latency
        self.tolerance = tolerance
        self.cap_rps = cap_rps
        self.is_joint = is_joint
        self.gain = gain
        self.floor = np.zeros(len(gain)) if floor is None else floor
        self.best = np.zeros(len(gain))
        self.bound = np.zeros(len(gain))
        self.points: list[Point | None] = [None] * len(gain)
        self.seen: dict[tuple[int, int], tuple[float, Point]] = {}
        self._is_over: Callable[[], bool] = lambda: False
        # Where a run was cut off: its boxes, and the bounds without them.
        self._left: tuple[Boxes, Array] | None = None

    def run(
        self,
        rates: Rates,
        *,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Search all pipelines; those that are left, if the last run was cut off.

        is_over: asked whether to stop, between rounds and between slow steps of one; what a round
        that is cut off has not recorded is sought again.
        """
        if rates.max_batch < 1:
            return
        self._is_over = is_over
        boxes = self._begin(rates)
        while len(boxes):
            bounds = self._bounds(boxes)
            if is_over():
                self._left = boxes, self.bound.copy()
                np.maximum.at(self.bound, boxes.group, bounds)
                break
            chosen = _highest(bounds, _BOXES_PER_ROUND) | _highest(
                bounds * boxes.certainty, _PROMISING_PER_ROUND
            )
            try:
                new = self._round(rates, boxes.take(chosen))
            except TimeoutError:
                continue
            boxes = join([boxes.take(~chosen), new])
            boxes = boxes.take(self._is_open(boxes))
        if not self.covers.is_given:
            rates.hints.extend(point.hint for point in self.points_of_interest()[-_HINTS_KEPT:])
        reached = np.maximum(self.best, self.floor) * (1 + self._given_away)
        self.bound = np.maximum(self.bound, reached)

    def _begin(self, rates: Rates) -> Boxes:
        """The boxes to be searched."""
        if self._left is not None:
            boxes, self.bound = self._left
            self._left = None
            return boxes.take(self._is_open(boxes))
        boxes = whole(rates, np.arange(len(self.gain)))
        if not self.covers.is_given and self.latency is None:
            with contextlib.suppress(TimeoutError):
                self._seed(rates, boxes)
        return boxes

    @property
    def _given_away(self) -> float:
        """How much more than the best, as a share, was not sought: none if only for rounding."""
        return self.tolerance if self.tolerance > TOLERANCE else 0.0

    def points_of_interest(self) -> list[Point]:
        """Of the only group: the best of several batches and depths, the best of all last."""
        seen = sorted(self.seen.values(), key=lambda entry: entry[0])
        best = self.points[0]
        others = [point for _, point in seen[-_MAX_SEEN:] if point is not best]
        return [*others, *([] if best is None else [best])]

    def _reached(self, boxes: Boxes) -> Array:
        """[box]: the value that a pipeline of the box has to exceed."""
        reached = np.maximum(self.best, self.floor)[boxes.group]
        return np.maximum(reached, self.best.max()) if self.is_joint else reached

    def _bounds(self, boxes: Boxes) -> Array:
        rate = np.minimum(boxes.rate_bound, self.cap_rps)
        with np.errstate(over="ignore"):
            return np.asarray(self.gain[boxes.group] * boxes.factor * rate / boxes.cost)

    def _is_open(self, boxes: Boxes) -> Mask:
        return self._bounds(boxes) > self._reached(boxes) * (1 + self.tolerance)

    def _round(self, rates: Rates, boxes: Boxes) -> Boxes:
        """The halves of the boxes, as far as they are still open."""
        boxes, stages = self._weigh(rates, self._clip(boxes))
        is_single = rates.is_exact(boxes.ranges) & (boxes.low == boxes.high)
        single = self._visit_single(rates, boxes.take(is_single), stages.take(is_single))
        ranges = self._visit_ranges(rates, boxes.take(~is_single), stages.take(~is_single))
        kept = join([single, ranges])
        return self._divide(rates, kept.take(self._is_open(kept)))

    def _divide(self, rates: Rates, boxes: Boxes) -> Boxes:
        """Boxes split, or their times made exact where that says more."""
        wholes = []
        for _ in range(_MAX_SPLITS):
            ranges = boxes.ranges
            boxes, whole_ones = split(boxes, rates.can_load(ranges) & ~rates.is_exact(ranges))
            wholes.append(whole_ones)
            if len(boxes) >= _BOXES_WORTHWHILE:
                break
        ready = join(wholes)
        best = _highest(self._bounds(ready), _LOADS_PER_ROUND)
        if len(ready):
            rates.load(ready.ranges.take(best))
        parts = join([boxes, ready])
        return parts.take(self._is_open(parts))

    def _clip(self, boxes: Boxes) -> Boxes:
        """Boxes without the limits that leave no room for a better value; those that keep none are
        left out.

        Better means Σ θ below gain / (cost · best), so one θ is below that less the others' least.
        """
        with np.errstate(divide="ignore", over="ignore"):
            gain = self.gain[boxes.group] * boxes.factor
            room = gain / (boxes.cost * self._reached(boxes))
        others = boxes.least.sum(axis=1, keepdims=True) - boxes.least
        boxes = replace(boxes, most=np.minimum(boxes.most, room[:, None] - others))
        return boxes.take(np.asarray((boxes.least <= boxes.most * (1 + SLACK)).all(axis=1)))

    def _visit_single(self, rates: Rates, boxes: Boxes, stages: StageLayers) -> Boxes:
        """Boxes of one batch: their limits drawn in to stage times that are possible."""
        if not len(boxes):
            return boxes
        used = self.covers.used(boxes.group)
        boxes = replace(
            boxes,
            most=np.minimum(boxes.most, largest_times(stages, used)),
            least=np.maximum(boxes.least, smallest_times(stages, used, boxes.least)),
        )
        if self.latency is None or not self.latency.has_sums:
            self._record(rates, boxes, boxes.cost)
        else:
            boxes = self._drop_closed(self._arrange(rates, boxes, stages))
        # Limits between two possible times that are neighbours hold nothing.
        is_open = np.asarray((boxes.least <= boxes.most * (1 + SLACK)).all(axis=1))
        return boxes.take(is_open)

    def _visit_ranges(self, rates: Rates, boxes: Boxes, stages: StageLayers) -> Boxes:
        """Boxes of several batches. Where the largest can do all that any can, it leads them, and
        only it stays if its times are exact."""
        if self.latency is not None or not len(boxes):
            return boxes
        lead = rates.lead(boxes.ranges)
        is_exact = rates.is_exact(boxes.ranges)
        is_led = is_as_good(
            stage_layers(rates, lead, boxes.most), stages, self.covers.used(boxes.group)
        )
        self._try(rates, boxes)
        low = np.where(is_led & is_exact, lead.low, boxes.low)
        return replace(boxes, low=low, is_led=is_led & ~is_exact)

    def _try(self, rates: Rates, boxes: Boxes, num: int = _TRIALS_PER_ROUND) -> None:
        """Pipelines at the largest batch and smallest depth of the boxes that promise most.

        A promise: the value of the machines of a box, as slow as its pipelines may be.
        """
        promise = self._bounds(boxes) * boxes.certainty
        is_worthwhile = promise > self._reached(boxes) * _PROMISING
        tried = boxes.take(is_worthwhile)
        tried = tried.take(_highest(promise[is_worthwhile], num))
        if len(tried):
            self._reach(rates, replace(tried, low=tried.high, deep=tried.shallow))

    def _seed(self, rates: Rates, boxes: Boxes) -> None:
        """Pipelines to begin with: where other searches found theirs, or where all stages of a
        pipeline are of one kind and hold equally many layers."""
        if rates.hints:
            self._reach(rates, known_points(boxes, rates.hints[-_MAX_HINTS:]))
        if not self.best.any():
            tried = even_points(boxes, rates, self.covers.used(boxes.group[:1])[0])
            stages = stage_layers(rates, tried.ranges, tried.most)
            cost = self._cost(rates, tried, stages, np.zeros(len(tried), dtype=bool))
            self._try(rates, replace(tried, cost=np.maximum(tried.cost, cost)), _SEEDS)

    def _reach(self, rates: Rates, tried: Boxes) -> None:
        """Record what machines reach at the points of these boxes, [box]: one batch and depth."""
        rates.load(tried.ranges)
        held = stage_layers(rates, tried.ranges, tried.most)
        cost = self._cost(rates, tried, held, np.ones(len(tried), dtype=bool))
        # Above the limit it may be a bound that no machines reach.
        cost = np.where(cost <= self._limit(tried), cost, np.inf)
        used = self.covers.used(tried.group)
        most = np.minimum(tried.most, largest_times(held, used))
        self._record(rates, replace(tried, most=most), cost)

    def _weigh(self, rates: Rates, boxes: Boxes) -> tuple[Boxes, StageLayers]:
        """Boxes that are open once their cost and latency are bounded, with their stages."""
        stages = stage_layers(rates, boxes.ranges, boxes.most)
        is_point = rates.is_exact(boxes.ranges) & (boxes.low == boxes.high)
        cost = self._cost(rates, boxes, stages, is_point)
        boxes = replace(boxes, cost=np.maximum(cost, boxes.cost))
        if self.latency is not None:
            factor = self.latency.bound(boxes, rates, stages, self.covers.used(boxes.group))
            boxes = replace(boxes, factor=np.minimum(boxes.factor, factor))
        is_open = np.flatnonzero(self._is_open(boxes))
        return boxes.take(is_open), stages.take(is_open)

    def _cost(self, rates: Rates, boxes: Boxes, stages: StageLayers, is_point: Mask) -> Array:
        """Of the covers, as far as a box is worth it: wide ones will be split anyway.

        Raises TimeoutError when time is over.
        """
        certainty, limit = np.where(is_point, 1.0, boxes.certainty), self._limit(boxes)
        costs = [np.zeros(0)]
        size = max(1, _COSTS_AT_ONCE // len(self.covers.shapes))
        for begin in range(0, len(boxes), size):
            if self._is_over():
                raise TimeoutError
            rows = np.arange(begin, min(begin + size, len(boxes)))
            cost = self.covers.cost(
                boxes.group[rows], rates, stages.take(rows), limit[rows], certainty[rows]
            )
            costs.append(cost)
        return np.concatenate(costs)

    def _limit(self, boxes: Boxes) -> Array:
        """[box]: machines that cost more are of no interest."""
        with np.errstate(divide="ignore"):
            return np.asarray(self.gain[boxes.group] * boxes.rate_bound / self._reached(boxes))

    def _record(self, rates: Rates, boxes: Boxes, cost: Array) -> None:
        """Machines found hold the model at the largest batch, within the largest limits."""
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = np.minimum(1 / boxes.most.sum(axis=1), self.cap_rps)
            value = np.where(np.isfinite(cost), self.gain[boxes.group] * rate / cost, 0.0)
        if self.latency is not None:
            value = value * self.latency.batch_factor(boxes.high, boxes.most)
        for row in np.argsort(-value):
            self._keep(float(value[row]), boxes, int(row), rates)
        if not self.covers.is_given:
            for row in np.argsort(-value)[:_SEEN_PER_ROUND]:
                self._see(float(value[row]), boxes, int(row), rates)

    def _see(self, value: float, boxes: Boxes, row: int, rates: Rates) -> None:
        """Remember a point of interest: the best of its batch and depth."""
        key = int(boxes.high[row]), int(boxes.shallow[row])
        if value > max(self.floor[0], self.seen.get(key, (0.0, None))[0]):
            self.seen[key] = value, Point(rates, _hint(boxes, row), None)

    def _keep(
        self, value: float, boxes: Boxes, row: int, rates: Rates, found: Arrangement | None = None
    ) -> None:
        group = int(boxes.group[row])
        if value > max(self.best[group], self.floor[group]):
            self.best[group] = value
            point = Point(rates, _hint(boxes, row), found)
            self.points[group] = point

    def _arrange(self, rates: Rates, boxes: Boxes, stages: StageLayers) -> Boxes:
        """Boxes of one batch, the sums of their latencies made exact where machines are given.

        Where the cheapest are sought, they are tried in a few boxes; others might be faster.
        """
        latency = self.latency
        assert latency is not None
        shares = latency.part_shares(stages.times, boxes.low)
        factor = boxes.factor.copy()
        by_batch = latency.batch_factor(boxes.high, boxes.most)
        is_given = self.covers.is_given
        for row in np.argsort(-self._bounds(boxes))[: None if is_given else _TRIALS_PER_ROUND]:
            one = np.array([row])
            if not self._is_open(boxes.take(one))[0]:
                factor[row] = 0.0
                continue
            counts = self._counts(rates, int(boxes.group[row]), stages.take(one))
            arranger = Arranger(
                rates, stages.take(one), shares[row], latency.max_share, self._is_over
            )
            try:
                found = arranger.best(counts, self.covers.shapes)
            except TimeoutError:
                break
            reached = 0.0 if found is None else float(latency.factor(np.array(found.share)))
            if is_given:
                factor[row] = min(factor[row], reached)
            if found is not None:
                rate = min(1 / float(boxes.most[row].sum()), self.cap_rps)
                worth = self.gain[boxes.group[row]] * rate / boxes.cost[row]
                self._keep(worth * min(reached, by_batch[row]), boxes, int(row), rates, found)
        return replace(boxes, factor=factor)

    def _counts(self, rates: Rates, group: int, stages: StageLayers) -> Ints:
        """[class]: the machines to be arranged for a box."""
        if self.covers.is_given:
            return self.covers.counts_of(group)
        machines = self.covers.machines(group, rates, stages)
        columns = [machine.column for machine in machines]
        return np.bincount(columns, minlength=len(self.covers.shapes))

    def _drop_closed(self, boxes: Boxes) -> Boxes:
        """Boxes that can still be split; the bounds of others stay as they are."""
        is_closed = (boxes.most <= boxes.least * (1 + SLACK)).all(axis=1) & self._is_open(boxes)
        np.maximum.at(self.bound, boxes.group[is_closed], self._bounds(boxes)[is_closed])
        return boxes.take(~is_closed)

    def stages(
        self, group: int, point: Point | None = None
    ) -> tuple[tuple[Stage, ...], list[Machine], int]:
        """The best pipeline of a group, or that of a point: stages, machines by node, batch."""
        point = point or self.points[group]
        assert point is not None, "something was found"
        batch = point.hint.batch
        if point.found is not None:
            return point.found.stages, point.found.machines, batch
        held = stage_layers(point.rates, point.hint.ranges, point.hint.limits[None])
        machines = self.covers.machines(group, point.rates, held)
        stages, machines = assemble(point.rates, held, machines, self.covers.shapes)
        return stages, machines, batch


def _hint(boxes: Boxes, row: int) -> Hint:
    return Hint(int(boxes.high[row]), int(boxes.shallow[row]), boxes.most[row].copy())


def _highest(bounds: Array, num: int) -> Mask:
    """A mask of the `num` boxes with the highest bounds."""
    chosen = np.ones(len(bounds), dtype=bool)
    if len(bounds) > num:
        chosen[np.argpartition(-bounds, num)[num:]] = False
    return chosen
