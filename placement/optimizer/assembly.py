"""From machines and limits to the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from placement.estimator import Stage
from placement.hardware import Shape
from placement.optimizer.capacity import (
    ALONE,
    CLOSING,
    MIDDLE,
    NEAR_STAGE,
    OPENING,
    StageLayers,
    may_open,
)
from placement.optimizer.places import Machine
from placement.optimizer.rates import Ints, Rates


@dataclass(slots=True, kw_only=True)
class Slot:
    """A stage to be filled with 1..most layers.

    is_spare: whether it may be left out; is_last_spare: once it is the last one of its machine.
    """

    shape: Shape
    tp: int
    node: int
    most: int
    is_spare: bool
    is_last_spare: bool
    num_layers: int = 0


def assemble(
    rates: Rates, stages: StageLayers, machines: Sequence[Machine], shapes: Ints
) -> tuple[tuple[Stage, ...], list[Machine]]:
    """Stages of machines in order, each no fuller than `stages` (of one box) allow.

    shapes: [class]. The machines hold the model, as `machine_layers` tells. Returned with the
    stages are the machines needed, by `Stage.node`.
    """
    slots: list[Slot] = []
    for node, one in enumerate(machines):
        shape, is_free = int(shapes[one.column]), one.num_stages is None
        split = max(
            _splits(rates, stages, shape, one.place, one.num_stages),
            key=lambda split: sum(most for _, most, _ in split),
        )
        slots += [
            Slot(
                shape=rates.shapes[shape],
                tp=tp,
                node=node,
                most=most,
                is_spare=is_spare and is_free,
                is_last_spare=one.place == MIDDLE and is_free,
            )
            for tp, most, is_spare in split
        ]
    slots = _fill(slots, rates.num_layers)
    nodes = sorted({slot.node for slot in slots})
    filled = tuple(
        Stage(shape=slot.shape, tp=slot.tp, num_layers=slot.num_layers, node=nodes.index(slot.node))
        for slot in slots
    )
    return filled, [machines[node] for node in nodes]


_Split = list[tuple[int, int, bool]]


def _splits(
    rates: Rates, stages: StageLayers, shape: int, place: int, num_stages: int | None
) -> Iterator[_Split]:
    """Ways to cut a machine, each a list of (tp, most layers, whether it can be left out)."""
    gpus = rates.shapes[shape].num_gpus
    layers = stages.layers[0]

    def options(stage_place: int, gpus: int) -> Iterator[tuple[int, int]]:
        for row, tp in enumerate(rates.tps):
            if tp <= gpus and layers[stage_place, shape, row] >= 1:
                yield tp, int(layers[stage_place, shape, row])

    @cache
    def near(gpus: int, count: int | None) -> _Split | None:
        best: _Split | None = [] if not count else None
        if count == 0:
            return best
        for tp, most in options(NEAR_STAGE, gpus):
            rest = near(gpus - tp, None if count is None else count - 1)
            if rest is not None and (best is None or most + _total(rest) > _total(best)):
                best = [(tp, most, True), *rest]
        return best

    def closed(before: _Split, stage_place: int, gpus: int) -> Iterator[_Split]:
        for tp, most in options(stage_place, gpus):
            count = None if num_stages is None else num_stages - 1 - len(before)
            rest = None if count is not None and count < 0 else near(gpus - tp, count)
            if rest is not None:
                yield [*before, *rest, (tp, most, False)]

    if place not in OPENING:
        yield from closed([], CLOSING[place], gpus)
        return
    if num_stages in (None, 1):
        for tp, most in options(ALONE[place], gpus):
            yield [(tp, most, False)]
    if num_stages is None and not may_open(place, rates.num_layers):
        return
    for tp, most in options(OPENING[place], gpus):
        yield from closed([(tp, most, False)], CLOSING[place], gpus - tp)


def _total(split: _Split) -> int:
    return sum(most for _, most, _ in split)


def _fill(slots: list[Slot], num_layers: int) -> list[Slot]:
    """Slots with layers that add up, the surplus taken from those that are left with most."""
    for slot in slots:
        slot.num_layers = slot.most
    surplus = sum(slot.most for slot in slots) - num_layers
    assert surplus >= 0, "the machines hold the model"
    for _ in range(surplus):
        fullest = max(slots, key=lambda slot: (slot.num_layers > 1, slot.num_layers))
        if fullest.num_layers > 1:
            fullest.num_layers -= 1
        else:
            slots.remove(next(slot for slot in slots if _can_go(slot, slots)))
    return slots


def _can_go(slot: Slot, slots: Sequence[Slot]) -> bool:
    is_last = sum(other.node == slot.node for other in slots) == 1
    return slot.is_spare or (is_last and slot.is_last_spare)
