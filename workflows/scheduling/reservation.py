"""Slots for the heavy nodes of long runs (skewing, eq. 6 and 19), without idle ones."""

from __future__ import annotations

from math import ceil


class Reservation:
    """Whether the next free slot of a resource is for heavy work.

    The equation's share is of a count: ρ·cap is 0.4 of two slots. We keep ceil(ρ·slots) of them,
    but never all: where that would be, and with a single slot, heavy work has every 1/ρ-th
    dispatch instead. It holds only while heavy work is ready, which then takes the slot at once;
    so nothing idles for it, and it never delays other work by more than the reserved slots do.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit = 0.0

    def num_reserved(self, num_slots: int) -> int:
        return min(ceil(self._share * num_slots), max(0, num_slots - 1))

    def is_due(self, *, num_slots: int, num_running_heavy: int) -> bool:
        """For a moment in which heavy and other work is ready, and a slot is free."""
        if num_slots == 1:
            return self._credit + self._share >= 1 - 1e-9
        return num_running_heavy < self.num_reserved(num_slots)

    def count(self, *, is_heavy: bool) -> None:
        """A slot was given while both kinds were ready."""
        if is_heavy:
            self._credit = max(0.0, self._credit - 1 + self._share)
        else:
            self._credit = min(1.0, self._credit + self._share)
