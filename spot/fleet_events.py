"""What happened to the pipelines, for those who watch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import anyio

EventKind = Literal[
    "added", "ready", "down", "stalled", "draining", "gone", "weight", "migrated", "lost"
]


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """One thing that happened.

    number: counts from 1 on. at_s: on the event loop's clock. pipeline_id: where; for a migration
    the new place; empty for a generation that found none.
    """

    number: int
    at_s: float
    kind: EventKind
    pipeline_id: str
    detail: str = ""


class FleetEvents:
    """The last events. Watchers that fall behind miss the oldest."""

    def __init__(self, *, max_kept: int = 1024) -> None:
        self._kept: deque[FleetEvent] = deque(maxlen=max_kept)
        self._num_added = 0
        self._added = anyio.Event()

    def add(self, kind: EventKind, pipeline_id: str, detail: str = "") -> None:
        self._num_added += 1
        event = FleetEvent(self._num_added, anyio.current_time(), kind, pipeline_id, detail)
        self._kept.append(event)
        self._added.set()
        self._added = anyio.Event()

    async def after(self, number: int) -> list[FleetEvent]:
        """The events with a higher number; waits until there is one.

        A number from the future is of another run of the server: then all events are new.
        """
        if number > self._num_added:
            number = 0
        while True:
            fresh = [event for event in self._kept if event.number > number]
            if fresh:
                return fresh
            await self._added.wait()
