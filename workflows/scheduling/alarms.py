"""When something has to be done about a ticket although nothing happens to it."""

from __future__ import annotations

from heapq import heappop, heappush

from workflows.scheduling.live_ticket import LiveTicket


class Alarms:
    """Tickets by the time at which to look at them again. A ticket may stand here several times."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, LiveTicket]] = []
        self._num_added = 0

    @property
    def next_s(self) -> float | None:
        """The next one. Those of tickets that wait for nothing are dropped on the way."""
        while self._heap and not self._heap[0][2].is_queued:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def add(self, at_s: float, live: LiveTicket) -> None:
        self._num_added += 1
        heappush(self._heap, (at_s, self._num_added, live))

    def take_due(self, now_s: float) -> list[LiveTicket]:
        """Queued tickets whose time has come, each once."""
        due: dict[int, LiveTicket] = {}
        while self._heap and self._heap[0][0] <= now_s:
            live = heappop(self._heap)[2]
            if live.is_queued:
                due[live.order] = live
        return list(due.values())
