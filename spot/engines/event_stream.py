"""Server-sent events, from bytes as they arrive."""

from __future__ import annotations


class EventTooLarge(ValueError):
    """One event is longer than allowed."""


class EventStream:
    """Cuts a byte stream into the data of its events. Comments and other fields are passed over.

    max_event_bytes: how much is kept of an event that has not ended.
    """

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._line: list[bytes] = []
        self._data: list[bytes] = []
        self._num_kept_bytes = 0

    def feed(self, received: bytes) -> list[bytes]:
        """The data of each event that `received` completes. Raises EventTooLarge."""
        events: list[bytes] = []
        first, *others = received.split(b"\n")
        self._keep(first)
        for piece in others:
            line = b"".join(self._line).removesuffix(b"\r")
            self._line.clear()
            self._take(line, events)
            self._keep(piece)
        return events

    def _keep(self, piece: bytes) -> None:
        self._num_kept_bytes += len(piece)
        if self._num_kept_bytes > self._max_event_bytes:
            raise EventTooLarge(f"an event is longer than {self._max_event_bytes} bytes")
        self._line.append(piece)

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line:
            if self._data:
                events.append(b"\n".join(self._data))
            self._data.clear()
            self._num_kept_bytes = 0
