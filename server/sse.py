"""Server-sent events: framing, keep-alive comments, and readers that stall."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

import anyio
import anyio.abc
from starlette.types import Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def frame(payload: bytes) -> bytes:
    """One event. The payload is JSON without line breaks."""
    return b"data: " + payload + b"\n\n"


class EventStream:
    """One event-stream response. It starts with the first write: nothing is sent before that."""

    def __init__(self, send: Send, *, poke: Callable[[], None], now_s: Callable[[], float]) -> None:
        self._send = send
        self._now_s = now_s
        self.poke = poke
        self.started = False
        self.last_sent_s = now_s()
        self.sending_since_s: float | None = None
        self.abandon: Callable[[], None] | None = None

    async def write(self, data: bytes) -> None:
        """Send whole frames, after the start if need be. Waits while the client does not read."""
        await self._send_body(data, more_body=True)

    async def keep_alive(self) -> None:
        await self.write(KEEP_ALIVE)

    async def finish(self, data: bytes = b"") -> None:
        """Send the last frames and end the response. Waits as `write` does."""
        await self._send_body(data, more_body=False)

    async def _send_body(self, data: bytes, *, more_body: bool) -> None:
        self.sending_since_s = self._now_s()
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": more_body})
        self.sending_since_s = None
        self.last_sent_s = self._now_s()


class StreamKeeper:
    """Watches all open streams: pokes the idle ones, drops those whose reader has stalled.

    keep_alive_s: a stream that was silent for so long is poked to send a comment; 0 turns it off.
    stalled_reader_s: a write that the client has not taken for so long ends the request.
    """

    def __init__(self, *, keep_alive_s: float, stalled_reader_s: float) -> None:
        self._keep_alive_s = keep_alive_s
        self._stalled_reader_s = stalled_reader_s
        self._streams: set[EventStream] = set()
        self._group: anyio.abc.TaskGroup | None = None

    def add(self, stream: EventStream) -> None:
        self._streams.add(stream)

    def remove(self, stream: EventStream) -> None:
        self._streams.discard(stream)

    def check(self, now_s: float) -> None:
        """One round over all streams."""
        for stream in list(self._streams):
            since_s = stream.sending_since_s
            if since_s is not None:
                if now_s - since_s > self._stalled_reader_s and stream.abandon is not None:
                    stream.abandon()
            elif 0 < self._keep_alive_s <= now_s - stream.last_sent_s:
                stream.poke()

    async def __aenter__(self) -> Self:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._run)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._group is not None
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(exc_type, exc, traceback)

    async def _run(self) -> None:
        interval_s = min(1.0, self._keep_alive_s / 2 or 1.0, self._stalled_reader_s / 2)
        while True:
            await anyio.sleep(interval_s)
            self.check(anyio.current_time())
