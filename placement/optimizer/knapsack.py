"""The cheapest machines that hold a model: a knapsack cover with places.

table[state, stages, box, j] is the least cost of machines that hold j layers or more; the state
says with two bits whether a first and a last machine are among them. Where the depth of the
pipeline does not matter, stages are not counted (the axis has one entry).
"""

from __future__ import annotations

from collections.abc import Iterator
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
from placement.optimizer.places import BEFORE, DONE, Machine, in_order
from placement.optimizer.rates import ANY_DEPTH, Ints, Rates
from placement.roofline import Array

# Boxes whose tables are held at once, in entries.
_MAX_ENTRIES = 4_000_000
# How much of a box's throughput bound must be certain before its stages are counted, and before
# machines get their places.
COUNTED, PLACED = 0.8, 0.97
# Layers that an end is known to hold less, at most.
_MOST_LOST = 8
# States from which a machine in each place may be added, and to which it leads (as in `BEFORE`).
_FROM = {MIDDLE: slice(None), FIRST: slice(0, None, 2), LAST: slice(0, 2)}
_TO = {MIDDLE: slice(None), FIRST: slice(1, None, 2), LAST: slice(2, None)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheapestMachines:
    """All sets of machines of a cluster, with a price for each class. One group only.

    counts, prices, shapes: [class]; shapes holds the index of the class's shape.
    """

    counts: Ints
    prices: Array
    shapes: Ints
    num_layers: int

    @property
    def is_given(self) -> bool:
        return False

    def counts_of(self, group: int) -> Ints:
        del group
        return self.counts

    def used(self, groups: Ints) -> NDArray[np.bool_]:
        """[box, shape]: the shapes of which there is a machine."""
        used = np.zeros(int(self.shapes.max()) + 1, dtype=bool)
        used[self.shapes[self.counts > 0]] = True
        return np.tile(used, (len(groups), 1))

    def cost(
        self, groups: Ints, rates: Rates, stages: StageLayers, limit: Array, certainty: Array
    ) -> Array:
        """[box]: the least price of machines that hold all layers.

        A lower bound where it exceeds `limit`, and where the box is wide: there stages are not
        counted, or any machines may be the ends.
        """
        held = machine_layers(rates, stages)
        free = self._quick_cost(held, is_bound=True)
        is_worthwhile = free <= limit
        rows = np.flatnonzero(is_worthwhile)
        if len(rows):
            # Mostly machines are so many that it makes no difference which of them are the ends.
            reached = self._quick_cost(held[rows], is_bound=False)
            is_rough = (certainty[rows] < COUNTED) & np.isfinite(reached)
            rows = rows[(reached > free[rows]) & ~is_rough]
        if len(rows):
            free[rows] = self._free_cost(held[rows][:, :, None])
        is_counted = (free <= limit) & (stages.deep != ANY_DEPTH) & (certainty >= COUNTED)
        for depth in np.unique(stages.deep[is_counted]):
            rows = np.flatnonzero(is_counted & (stages.deep == depth))
            counted, shallow = counted_layers(rates, stages.take(rows), depth), stages.shallow[rows]
            free[rows] = np.maximum(free[rows], self._any_ends_cost(counted, shallow, depth))
            left = np.flatnonzero((free[rows] <= limit[rows]) & (certainty[rows] >= PLACED))
            if len(left):
                free[rows[left]] = self._counted_cost(counted[left], shallow[left], depth)
        return free

    def machines(self, group: int, rates: Rates, stages: StageLayers) -> list[Machine]:
        """The machines of `cost` of one box."""
        del group
        depth = int(stages.deep[0])
        if depth == ANY_DEPTH:
            return self._cheapest(machine_layers(rates, stages)[:, :, None], 0)
        return self._cheapest(counted_layers(rates, stages, depth), depth)

    def _quick_cost(self, held: Array, *, is_bound: bool) -> Array:
        """[box]: a lower bound: the two ends may be machines that are in the middle as well.

        Else an upper one: two machines of each class are kept for the ends.
        """
        table = np.full((len(held), self.num_layers + 1), np.inf)
        table[:, 0] = 0.0
        layers = np.arange(self.num_layers + 1)
        start = np.arange(len(held))[:, None] * len(layers)
        counts = self.counts if is_bound else np.maximum(self.counts - 2, 0)
        for column, size in self._middles(counts):
            middle = np.maximum(held[:, MIDDLE, self.shapes[column], None], 0).astype(np.int64)
            before = start + np.maximum(layers - size * middle, 0)
            table = np.minimum(table, table.reshape(-1)[before] + size * self.prices[column])
        ends = self._ends()
        first, last = held[:, FIRST][:, self.shapes[ends]], held[:, LAST][:, self.shapes[ends]]
        rest = self.num_layers - first[:, :, None] - last[:, None, :]
        index = np.clip(rest, 0, self.num_layers).astype(np.int64)
        prices = self.prices[ends]
        chain = table.reshape(-1)[start[:, :, None] + index] + np.add.outer(prices, prices)
        is_pair = np.isfinite(rest)
        if not is_bound:
            is_pair = is_pair & ~np.diag(self.counts[ends] < 2)
        chain = np.where(is_pair, chain, np.inf).min(axis=(1, 2))
        return np.asarray(np.minimum(chain, self._cost_alone(held[:, :, None], 0)))

    def _ends(self) -> Ints:
        """Classes that the ends may be of: the two cheapest of each shape are never worse."""
        order = np.argsort(self.prices, kind="stable")
        there = order[self.counts[order] > 0]
        of_shape = [there[self.shapes[there] == shape][:2] for shape in np.unique(self.shapes)]
        return np.sort(np.concatenate(of_shape))

    def _free_cost(self, held: Array) -> Array:
        table = self._start(len(held), 0)
        for column, size in self._bundles(0):
            table = self._add(table, held[..., self.shapes[column]], column, size, 0)
        return np.asarray(np.minimum(table[DONE, 0, :, -1], self._cost_alone(held, 0)))

    def _any_ends_cost(self, counted: Array, shallow: Ints, depth: int) -> Array:
        """[box]: a lower bound of `_counted_cost`: any machines are the ends, for the layers that
        it takes the cheapest ends away from what they hold in the middle."""
        alone = counted
        counted = counted[..., self.shapes[self.counts > 0]]
        held = np.maximum(counted[:, [MIDDLE, FIRST, LAST]].max(axis=1), 0.0).astype(np.int64)
        lost = np.zeros(len(held), dtype=np.int64)
        for place in (FIRST, LAST):
            end = counted[:, place]
            gap = np.where(end >= 1, held - end, np.inf).min(axis=(1, 2))
            lost += np.minimum(gap, _MOST_LOST).astype(np.int64)
        size = self.num_layers + 2 * _MOST_LOST + 1
        table = np.full((depth + 1, len(held), size), np.inf)
        table[0, :, 0] = 0.0
        layers, start = np.arange(size), np.arange(len(held))[:, None] * size
        used = np.flatnonzero(self.counts)
        for column, _ in self._bundles(depth):
            more = held[:, :, np.searchsorted(used, column)]
            new = table.copy()
            for num in range(1, held.shape[1] + 1):
                if not more[:, num - 1].any():
                    continue
                before = start + np.maximum(layers - more[:, num - 1, None], 0)
                option = table[: depth + 1 - num].reshape(depth + 1 - num, -1)[:, before]
                option += self.prices[column]
                np.minimum(new[num:], option, out=new[num:])
            table = new
        needed = table[:, np.arange(len(held)), self.num_layers + lost]
        for num in range(1, depth + 1):
            needed[num] = np.minimum(needed[num], self._cost_alone(alone, num))
        is_meant = np.arange(depth + 1)[:, None] >= shallow
        return np.asarray(np.where(is_meant, needed, np.inf).min(axis=0))

    def _counted_cost(self, held: Array, shallow: Ints, depth: int) -> Array:
        """[box]: the least price of machines in shallow..depth stages."""
        costs = []
        num = max(1, _MAX_ENTRIES // (NUM_PLACES * (depth + 1) * (self.num_layers + 1)))
        for begin in range(0, len(held), num):
            part = held[begin : begin + num]
            table = self._start(len(part), depth)
            for column, size in self._bundles(depth):
                table = self._add(table, part[..., self.shapes[column]], column, size, depth)
            by_depth = table[DONE, :, :, -1]
            for num in range(1, depth + 1):
                by_depth[num] = np.minimum(by_depth[num], self._cost_alone(part, num))
            is_meant = np.arange(depth + 1)[:, None] >= shallow[begin : begin + len(part)]
            costs.append(np.where(is_meant, by_depth, np.inf).min(axis=0))
        return np.concatenate(costs)

    def _cost_alone(self, held: Array, depth: int) -> Array:
        """[box]: the least price of a machine that holds all layers without others."""
        return np.asarray(self._alone(held, depth).min(axis=1))

    def _alone(self, held: Array, depth: int) -> Array:
        """[box, class]: the price of one machine where it holds all layers, else ∞."""
        if depth > held.shape[2]:
            return np.full((len(held), len(self.counts)), np.inf)
        holds = held[:, ONLY, max(depth - 1, 0)][:, self.shapes] >= self.num_layers
        return np.where(holds & (self.counts > 0), self.prices, np.inf)

    def _bundles(self, depth: int) -> Iterator[tuple[int, int]]:
        """(class, machines) to be taken as one; more than one only in the middle.

        Any number of machines is a sum of bundles: two that may take any place, and powers of two
        of the rest. Where stages are counted, machines of a class may differ, and come singly.
        More machines of a class than there are layers or stages are never of use.
        """
        for column, count in enumerate(self.counts):
            rest = min(int(count), depth or self.num_layers)
            singles = rest if depth else min(rest, 2)
            yield from [(column, 1)] * singles
            yield from [(column, size) for size in _powers(rest - singles)]

    def _middles(self, counts: Ints) -> Iterator[tuple[int, int]]:
        """As `_bundles`, of machines in the middle alone."""
        for column, count in enumerate(counts):
            for size in _powers(min(int(count), self.num_layers)):
                yield column, size

    def _start(self, num: int, depth: int) -> Array:
        table = np.full((NUM_PLACES, depth + 1, num, self.num_layers + 1), np.inf)
        table[0, 0, :, 0] = 0.0
        return table

    def _add(self, table: Array, held: Array, column: int, size: int, depth: int) -> Array:
        """The table with one more bundle. held: [box, place, stages − 1], layers of a machine."""
        new = table.copy()
        flat = table.reshape(*table.shape[:2], -1)
        price = size * self.prices[column]
        num_layers = self.num_layers + 1
        layers = np.arange(num_layers)
        rows = np.arange(len(held))[:, None] * num_layers
        fits = held >= 1
        more = (size * np.where(fits, held, 0)).astype(np.int64)
        bought = np.where(fits, price, np.inf)
        is_way = np.asarray(fits.any(axis=0))
        for place, index in self._ways(held.shape[2], size):
            num = index + 1 if depth else 0
            if not is_way[place, index] or num > depth:
                continue
            before = rows + np.maximum(layers - more[:, place, index, None], 0)
            option = flat[_FROM[place], : depth + 1 - num][..., before]
            option += bought[:, place, index, None]
            after = new[_TO[place], num:]
            np.minimum(after, option, out=after)
        return new

    def _ways(self, max_stages: int, size: int) -> Iterator[tuple[int, int]]:
        """(place, stages − 1) in which a bundle may be taken."""
        for place in BEFORE if size == 1 else (MIDDLE,):
            for index in range(max_stages):
                yield place, index

    def _cheapest(self, held: Array, depth: int) -> list[Machine]:
        """The machines on the way to the least cost of one box, by the tables gone back."""
        tables = [self._start(1, depth)]
        bundles = list(self._bundles(depth))
        for column, size in bundles:
            one = held[..., self.shapes[column]]
            tables.append(self._add(tables[-1], one, column, size, depth))
        alone = self._alone(held, depth)[0]
        if alone.min() < tables[-1][DONE, depth, 0, -1]:
            return [Machine(int(alone.argmin()), ONLY, depth or None)]
        state, left, need = DONE, depth, self.num_layers
        chosen: list[Machine] = []
        for (column, size), table in zip(reversed(bundles), reversed(tables[:-1]), strict=True):
            best, taken = table[state, left, 0, need], None
            for place, index in self._ways(held.shape[2], size):
                more = held[0, place, index, self.shapes[column]]
                num = index + 1 if depth else 0
                if more < 1 or state & place != place or num > left:
                    continue
                way = (state & ~place, left - num, max(need - int(size * more), 0))
                cost = table[way[0], way[1], 0, way[2]] + size * self.prices[column]
                if cost < best:
                    best, taken = cost, (place, num, way)
            if taken is not None:
                place, num, (state, left, need) = taken
                chosen += [Machine(column, place, num or None)] * size
        return in_order(chosen)


def _powers(count: int) -> Iterator[int]:
    """Numbers whose sums of some are all from 0 to `count`: 1, 2, 4, .. and the rest."""
    power = 1
    while count > 0:
        yield min(power, count)
        count -= power
        power *= 2
