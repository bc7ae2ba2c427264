"""Simulated time: what happens when, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Timeline:
    """A heap of moments. Things due at the same moment happen in the order in which they were put
    in, so a simulation repeats itself exactly."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_added = 0

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        """Do something then, or now if that is past."""
        self._num_added += 1
        heappush(self._heap, (max(at_s, self.now_s), self._num_added, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, action)

    def step(self) -> bool:
        """Let the next thing happen. Returns whether there was one."""
        if not self._heap:
            return False
        self.now_s, _, action = heappop(self._heap)
        action()
        return True
