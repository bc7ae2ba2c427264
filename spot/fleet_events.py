"""What happened to the pipelines, for those who watch."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

import anyio

EventKind = Literal[
    "added", "ready", "down", "stalled", "draining", "gone", "weight", "migrated", "lost"
]


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """One thing that happened. pipeline_id: where; for a migration, the new place."""

    kind: EventKind
    pipeline_id: str
    detail: str = ""


class FleetEvents:
    """The last events, numbered from 1 on. Watchers that fall behind miss the oldest."""

    def __init__(self, *, max_kept: int = 1024) -> None:
        self._kept: deque[tuple[int, FleetEvent]] = deque(maxlen=max_kept)
        self._num_added = 0
        self._added = anyio.Event()

    def add(self, event: FleetEvent) -> None:
        self._num_added += 1
        self._kept.append((self._num_added, event))
        self._added.set()
        self._added = anyio.Event()

    async def after(self, number: int) -> AsyncIterator[tuple[int, FleetEvent]]:
        """Events with a higher number, for ever."""
        while True:
            added = self._added
            fresh = [item for item in self._kept if item[0] > number]
            for item in fresh:
                number = item[0]
                yield item
            if not fresh:
                await added.wait()
