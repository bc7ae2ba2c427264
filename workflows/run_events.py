"""What happened in a run, numbered, for those who watch it now and those who come later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
    """The events of one run. Readers never hold up the run: each reads the list at its pace.

    past: those of a run that was interrupted. on_add: is told of each new event; readers then see
    events only as far as `show` has been called. Without it they see each at once.
    """

    def __init__(self, past: Iterable[RunEvent] = ()) -> None:
        self._events: list[RunEvent] = list(past)
        self._num_shown = len(self._events)
        self._changed = anyio.Event()
        self._is_closed = False
        self._is_cut = False
        self.on_add: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._events)

    @property
    def all_shown(self) -> bool:
        return self._num_shown == len(self._events)

    def since(self, number: int) -> list[RunEvent]:
        """All events with a higher number, shown or not."""
        return self._events[number:]

    def add(self, kind: str, node_id: str | None, data: Mapping[str, Any], *, now_s: float) -> None:
        """Append an event. Does nothing after `cut`."""
        if self._is_cut:
            return
        self._events.append(
            RunEvent(
                sequence_number=len(self._events) + 1,
                type=kind,
                at_s=now_s,
                node_id=node_id,
                data=data,
            )
        )
        if self.on_add is None:
            self.show(len(self._events))
        else:
            self.on_add()

    def show(self, number: int) -> None:
        """Let readers see the events up to this number."""
        self._num_shown = max(self._num_shown, number)
        self._wake()

    def close(self) -> None:
        """No event follows."""
        self._is_closed = True
        self._wake()

    def cut(self) -> None:
        """What readers have not seen has not happened, and nothing follows here: somebody else goes
        on from what is on record."""
        self._is_cut = True
        del self._events[self._num_shown :]
        self.close()

    async def after(self, number: int) -> list[RunEvent]:
        """All events with a higher number; waits until there is one. Empty if none will come."""
        while self._num_shown <= number and not (self._is_closed and self.all_shown):
            await self._changed.wait()
        return self._events[number : self._num_shown]

    async def until_all_shown(self) -> None:
        """Wait until readers see all that has happened."""
        while not self.all_shown:
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
