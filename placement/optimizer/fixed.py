"""Whether given machines hold the model, whatever their order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.optimizer.capacity import (
    FIRST,
    LAST,
    MIDDLE,
    NUM_PLACES,
    ONLY,
    StageLayers,
    counted_layers,
    machine_layers,
)
from placement.optimizer.knapsack import COUNTED
from placement.optimizer.places import BEFORE, DONE, Machine, in_order
from placement.optimizer.rates import ANY_DEPTH, Ints, Rates
from placement.roofline import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedMachines:
    """Candidate sets of machines. counts: [group, class], how many machines of each class.

    shapes: [class], the index of its shape. A machine may stay idle: such a set is dominated by a
    smaller one, and counted so that more machines never hold less.
    """

    counts: Ints
    shapes: Ints
    num_layers: int

    @property
    def is_given(self) -> bool:
        return True

    def counts_of(self, group: int) -> Ints:
        return np.asarray(self.counts[group])

    def used(self, groups: Ints) -> NDArray[np.bool_]:
        """[box, shape]: which shapes stages may run on."""
        num_shapes = int(self.shapes.max()) + 1
        used = np.zeros((len(groups), num_shapes), dtype=bool)
        for column, shape in enumerate(self.shapes):
            used[:, shape] |= self.counts[groups, column] > 0
        return used

    def cost(
        self, groups: Ints, rates: Rates, stages: StageLayers, limit: Array, certainty: Array
    ) -> Array:
        """[box]: 1 where the group of the box holds all layers, else ∞.

        Stages are not counted where the box is wide.
        """
        del limit
        counts = self.counts[groups]
        held = total_layers(counts, machine_layers(rates, stages)[:, :, self.shapes])
        holds = held >= self.num_layers
        is_counted = holds & (stages.deep != ANY_DEPTH) & (certainty >= COUNTED)
        for depth in np.unique(stages.deep[is_counted]):
            rows = np.flatnonzero(is_counted & (stages.deep == depth))
            counted = counted_layers(rates, stages.take(rows), depth)[..., self.shapes]
            held = total_counted(counts[rows], counted, stages.shallow[rows], depth)
            holds[rows] = held >= self.num_layers
        return np.where(holds, 1.0, np.inf)

    def machines(self, group: int, rates: Rates, stages: StageLayers) -> list[Machine]:
        """The machines of a group in the order that holds most. stages: of one box."""
        counts, depth = self.counts[group], int(stages.deep[0])
        if depth == ANY_DEPTH:
            places = machine_layers(rates, stages)[0][:, self.shapes]
            return [Machine(column, place, None) for column, place in arrange(counts, places)]
        counted = counted_layers(rates, stages, depth)[..., self.shapes]
        return arrange_counted(counts, counted, depth)


def total_layers(counts: Ints, places: Array) -> Array:
    """[box]: the most layers of `counts` machines, [box, class], in their best order.

    places: [box, place, class]. Of two or more machines, one is first and another last.
    """
    middle = np.maximum(places[:, MIDDLE], 0.0)
    has = counts > 0
    as_first = np.where(has, places[:, FIRST] - middle, -np.inf)
    as_last = np.where(has, places[:, LAST] - middle, -np.inf)
    chain = (counts * middle).sum(axis=1) + _best_pair(counts, as_first, as_last)
    alone = np.where(has, places[:, ONLY], -np.inf).max(axis=1)
    return np.asarray(np.maximum(chain, alone))


def _best_pair(counts: Ints, as_first: Array, as_last: Array) -> Array:
    """The largest sum of an entry of each for two machines that are not the same one."""
    rows = np.arange(len(counts))
    first, last = as_first.argmax(axis=1), as_last.argmax(axis=1)
    best_first, best_last = as_first[rows, first], as_last[rows, last]
    is_clash = (first == last) & (counts[rows, first] < 2)
    other_first, other_last = as_first.copy(), as_last.copy()
    other_first[rows, first] = other_last[rows, last] = -np.inf
    apart = np.maximum(other_first.max(axis=1) + best_last, best_first + other_last.max(axis=1))
    return np.where(is_clash, apart, best_first + best_last)


def total_counted(counts: Ints, counted: Array, shallow: Ints, depth: int) -> Array:
    """As `total_layers`, for pipelines of shallow..depth stages. shallow: [box]."""
    by_depth = stage_table(counts, counted, depth)[-1][:, DONE].copy()
    for num in range(1, depth + 1):
        alone = _alone(counts, counted, num).max(axis=1)
        by_depth[:, num] = np.maximum(by_depth[:, num], alone)
    is_meant = np.arange(depth + 1) >= shallow[:, None]
    return np.asarray(np.where(is_meant, by_depth, -np.inf).max(axis=1))


def _alone(counts: Ints, counted: Array, depth: int) -> Array:
    """[box, class]: the most layers that one machine holds in `depth` stages without others."""
    if depth > counted.shape[2]:
        return np.full(counts.shape, -np.inf)
    return np.where(counts > 0, counted[:, ONLY, depth - 1], -np.inf)


def stage_table(counts: Ints, counted: Array, depth: int) -> list[Array]:
    """The most layers of the machines so far, before the first one and after each.

    counts: [box, class]; counted: [box, place, stages − 1, class]. A table: [box, state, stages];
    the state says with two bits whether there is a first and a last machine.
    """
    start = np.full((len(counts), NUM_PLACES, depth + 1), -np.inf)
    start[:, 0, 0] = 0.0
    tables = [start]
    for column, copy in machines_of(counts):
        last = tables[-1]
        new = last.copy()
        for place, num, state in transitions(counted.shape[2]):
            more = counted[:, place, num - 1, column, None]
            option = last[:, state, : depth + 1 - num] + more
            after = new[:, state | place, num:]
            np.maximum(after, option, out=after)
        has = (counts[:, column] > copy)[:, None, None]
        tables.append(np.where(has, new, last))
    return tables


def machines_of(counts: Ints) -> list[tuple[int, int]]:
    """(class, copy) of every machine that any of the boxes has."""
    most = counts.max(axis=0, initial=0)
    return [(column, copy) for column, count in enumerate(most) for copy in range(count)]


def transitions(max_stages: int) -> list[tuple[int, int, int]]:
    """(place, stages, state before) of each way to add a machine."""
    return [
        (place, num, state)
        for place, states in BEFORE.items()
        for num in range(1, max_stages + 1)
        for state in states
    ]


def arrange(counts: Ints, places: Array) -> list[tuple[int, int]]:
    """The best order of one set of machines: (class, place), first to last.

    counts: [class]; places: [place, class].
    """
    middle = np.maximum(places[MIDDLE], 0.0)
    has = np.flatnonzero(counts)
    alone = max((float(places[ONLY, one]), int(one)) for one in has)
    best, pair = -np.inf, (-1, -1)
    for first in has:
        for last in has:
            if first != last or counts[first] > 1:
                ends = places[FIRST, first] - middle[first] + places[LAST, last] - middle[last]
                if ends > best:
                    best, pair = float(ends), (int(first), int(last))
    if (counts * middle).sum() + best < alone[0]:
        return [(alone[1], ONLY)]
    left = counts.copy()
    left[pair[0]] -= 1
    left[pair[1]] -= 1
    between = [(int(one), MIDDLE) for one in has for _ in range(left[one]) if middle[one] >= 1]
    return [(pair[0], FIRST), *between, (pair[1], LAST)]


def arrange_counted(counts: Ints, counted: Array, depth: int) -> list[Machine]:
    """As `arrange`, for pipelines of exactly `depth` stages. counted: of one box."""
    tables = stage_table(counts[None], counted, depth)
    alone = _alone(counts[None], counted, depth)[0]
    if alone.max() > tables[-1][0, DONE, depth]:
        return [Machine(int(alone.argmax()), ONLY, depth)]
    state, left = DONE, depth
    chosen: list[Machine] = []
    steps = zip(reversed(machines_of(counts[None])), reversed(tables[:-1]), strict=True)
    for (column, _), before in steps:
        ways: list[tuple[float, Machine | None]] = [(float(before[0, state, left]), None)]
        for place, num, old in transitions(counted.shape[2]):
            if old | place == state and num <= left:
                layers = before[0, old, left - num] + counted[0, place, num - 1, column]
                ways.append((float(layers), Machine(column, place, num)))
        _, machine = max(ways, key=lambda way: way[0])
        if machine is not None:
            chosen.append(machine)
            state, left = state & ~machine.place, left - (machine.num_stages or 0)
    return in_order(chosen)
