"""What happened in a run, numbered, for those who watch it now and those who come later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """sequence_number: from 1, without gaps. at_s: of the event loop's clock."""

    sequence_number: int
    type: str
    at_s: float
    node_id: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


class RunEvents:
    """The events of one run. Readers never hold up the run: each reads the list at its pace."""

    def __init__(self) -> None:
        self._events: list[RunEvent] = []
        self._changed = anyio.Event()
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._events)

    def add(self, kind: str, node_id: str | None, data: Mapping[str, Any], *, now_s: float) -> None:
        """Append an event."""
        self._events.append(
            RunEvent(
                sequence_number=len(self._events) + 1,
                type=kind,
                at_s=now_s,
                node_id=node_id,
                data=data,
            )
        )
        self._wake()

    def close(self) -> None:
        """No event follows."""
        self.is_closed = True
        self._wake()

    async def after(self, number: int) -> list[RunEvent]:
        """All events with a higher number; waits until there is one. Empty if none will come."""
        while len(self._events) <= number and not self.is_closed:
            await self._changed.wait()
        return self._events[number:]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
