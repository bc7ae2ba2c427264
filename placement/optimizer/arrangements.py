"""The fastest way to lay a model over given machines, where latencies are sums over the stages.

Exact: partial pipelines are kept as long as no other with the same machines, layers and stages is
at least as fast in every limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from placement.estimator import Stage
from placement.optimizer.capacity import (
    ALONE,
    CLOSING,
    NEAR_STAGE,
    ONLY,
    OPENING,
    STAGE_ENDS,
    StageLayers,
)
from placement.optimizer.places import BEFORE, DONE, Machine, order
from placement.optimizer.rates import LAYER, Ints, Rates
from placement.roofline import Array

Shares = tuple[float, ...]
# Stages of one machine in order, as (tp, layers).
_Cut = tuple[tuple[int, int], ...]
_What = TypeVar("_What")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """share: the largest share of any limit that the sums over the stages reach."""

    share: float
    stages: tuple[Stage, ...]
    machines: list[Machine]


class _Front(Generic[_What]):
    """Entries by key, without those that another entry of their key is as good as."""

    def __init__(self, max_share: float) -> None:
        self.max_share = max_share
        self.entries: dict[tuple[int, ...], list[tuple[Shares, _What]]] = {}

    def add(self, key: tuple[int, ...], shares: Shares, what: _What) -> None:
        if max(shares) > self.max_share:
            return
        entries = self.entries.setdefault(key, [])
        if not any(_is_as_good(other, shares) for other, _ in entries):
            entries[:] = [one for one in entries if not _is_as_good(shares, one[0])]
            entries.append((shares, what))

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], Shares, _What]]:
        for key, entries in self.entries.items():
            for shares, what in entries:
                yield key, shares, what


def _is_as_good(one: Shares, other: Shares) -> bool:
    return all(mine <= its for mine, its in zip(one, other, strict=True))


def _sum(one: Shares, other: Shares) -> Shares:
    return tuple(mine + its for mine, its in zip(one, other, strict=True))


class Arranger:
    """Arranges machines within the stages' limits of one box of one batch.

    stages: of that box alone. shares: [limit, part, shape, tp], of `LatencyLimits.part_shares`.
    max_share: arrangements beyond are of no interest. is_over: when to raise TimeoutError.
    """

    def __init__(
        self,
        rates: Rates,
        stages: StageLayers,
        shares: Array,
        max_share: float,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rates = rates
        self.layers = stages.layers[0]
        self.depth = int(stages.deep[0])
        self.shares = shares
        self.max_share = max_share
        self.is_over = is_over
        self._cuts: dict[tuple[int, int], _Front[_Cut]] = {}

    def best(self, counts: Ints, shapes: Ints) -> Arrangement | None:
        """The arrangement of (some of) these machines with the least largest share, if any.

        counts, shapes: [class]. Raises TimeoutError.
        """
        depth, num_layers = self.depth, self.rates.num_layers
        front: _Front[tuple[tuple[Machine, _Cut], ...]] = _Front(self.max_share)
        front.add((0, 0, 0), (0.0,) * len(self.shares), ())
        for column, count in enumerate(counts):
            for _ in range(int(count)):
                front = self._with_machine(front, column, int(shapes[column]))
        done = front.entries.get((DONE, num_layers, depth), [])
        for column in np.flatnonzero(counts):
            cuts = self.cuts(int(shapes[column]), ONLY).entries.get((num_layers, depth), [])
            done += [(shares, ((Machine(int(column), ONLY, None), cut),)) for shares, cut in cuts]
        if not done:
            return None
        shares, laid = min(done, key=lambda entry: max(entry[0]))
        in_line = sorted(laid, key=lambda pair: order(pair[0]))
        return Arrangement(
            share=max(shares),
            machines=[machine for machine, _ in in_line],
            stages=tuple(
                Stage(shape=self.rates.shapes[shapes[one.column]], tp=tp, num_layers=num, node=node)
                for node, (one, cut) in enumerate(in_line)
                for tp, num in cut
            ),
        )

    def _with_machine(
        self, front: _Front[tuple[tuple[Machine, _Cut], ...]], column: int, shape: int
    ) -> _Front[tuple[tuple[Machine, _Cut], ...]]:
        new: _Front[tuple[tuple[Machine, _Cut], ...]] = _Front(self.max_share)
        depth = self.depth
        for (state, layers, num), shares, laid in front:
            self._check_time()
            new.add((state, layers, num), shares, laid)
            for place, befores in BEFORE.items():
                if state not in befores:
                    continue
                for (more, stages), added, cut in self.cuts(shape, place):
                    total, total_stages = layers + more, num + (stages if depth else 0)
                    if total <= self.rates.num_layers and total_stages <= depth:
                        machine = Machine(column, place, stages or None)
                        entry = (*laid, (machine, cut))
                        new.add((state | place, total, total_stages), _sum(shares, added), entry)
        return new

    def _check_time(self) -> None:
        if self.is_over():
            raise TimeoutError

    def cuts(self, shape: int, place: int) -> _Front[_Cut]:
        """Ways to lay so many (layers, stages) over one machine."""
        if (shape, place) not in self._cuts:
            self._cuts[shape, place] = self._find_cuts(shape, place)
        return self._cuts[shape, place]

    def _find_cuts(self, shape: int, place: int) -> _Front[_Cut]:
        near = self._near(shape)
        front: _Front[_Cut] = _Front(self.max_share)
        gpus = len(near) - 1

        def close(before: _Cut, shares: Shares, layers: int, left: int) -> None:
            for tp, num, last in self._stages(shape, CLOSING[place], left):
                self._check_time()
                for (more, stages), between, cut in near[left - tp]:
                    key = (layers + num + more, len(before) + stages + 1)
                    if key[0] <= self.rates.num_layers:
                        total = _sum(_sum(shares, between), last)
                        front.add(self._key(key), total, (*before, *cut, (tp, num)))

        if place not in OPENING:
            close((), (0.0,) * len(self.shares), 0, gpus)
            return front
        for tp, num, shares in self._stages(shape, ALONE[place], gpus):
            front.add(self._key((num, 1)), shares, ((tp, num),))
        for tp, num, shares in self._stages(shape, OPENING[place], gpus):
            close(((tp, num),), shares, num, gpus - tp)
        return front

    def _key(self, key: tuple[int, int]) -> tuple[int, int]:
        return key if self.depth else (key[0], 0)

    def _near(self, shape: int) -> list[_Front[_Cut]]:
        """By number of GPUs: stages that hand on inside the machine."""
        fronts: list[_Front[_Cut]] = []
        for gpus in range(self.rates.shapes[shape].num_gpus + 1):
            front: _Front[_Cut] = _Front(self.max_share)
            front.add((0, 0), (0.0,) * len(self.shares), ())
            for tp, num, shares in self._stages(shape, NEAR_STAGE, gpus):
                self._check_time()
                for (layers, stages), before, cut in fronts[gpus - tp]:
                    if layers + num <= self.rates.num_layers:
                        key = self._key((layers + num, stages + 1))
                        front.add(key, _sum(before, shares), (*cut, (tp, num)))
            fronts.append(front)
        return fronts

    def _stages(self, shape: int, stage_place: int, gpus: int) -> Iterator[tuple[int, int, Shares]]:
        """(tp, layers, shares) of each stage that fits so many GPUs."""
        end = STAGE_ENDS[stage_place][0]
        for row, tp in enumerate(self.rates.tps):
            if tp <= gpus:
                part = self.shares[:, :, shape, row]
                for num in range(1, int(max(self.layers[stage_place, shape, row], 0)) + 1):
                    yield tp, num, tuple(map(float, num * part[:, LAYER] + part[:, end]))
