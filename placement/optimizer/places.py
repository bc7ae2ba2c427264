"""Machines in their places along a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from placement.optimizer.capacity import FIRST, LAST, MIDDLE, ONLY

# A table's state says with two bits whether there is a first and a last machine. From these states
# a machine in each place of a chain may be added; it leads to `state | place`.
BEFORE = {MIDDLE: (0, 1, 2, 3), FIRST: (0, 2), LAST: (0, 1)}
DONE = FIRST | LAST
_ORDER = {FIRST: 0, ONLY: 0, MIDDLE: 1, LAST: 2}


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of a class (its index) in a pipeline. num_stages: None where any number will do."""

    column: int
    place: int
    num_stages: int | None


def in_order(machines: Sequence[Machine]) -> list[Machine]:
    """First to last; those in the middle side by side by class."""
    return sorted(machines, key=order)


def order(machine: Machine) -> tuple[int, int]:
    """What machines of a pipeline are sorted by."""
    return _ORDER[machine.place], machine.column
