"""A run's events to a client, as they happen."""

from __future__ import annotations

from typing import Protocol

import anyio
from starlette.types import Send

from server.asgi import ClientGone
from server.gateway import Gateway
from server.record import RequestRecord
from server.sse import EventStream
from workflows.past_run import PastRun
from workflows.run import Run
from workflows.run_events import RunEvent


class EventWriter(Protocol):
    """How events look to the client."""

    def frames(self, event: RunEvent) -> bytes:
        """Whole frames, or nothing. What it raises before the first frame is answered plainly."""
        ...

    def ending(self) -> bytes:
        """The last frames, when no event follows."""
        ...


async def pump_events(
    gateway: Gateway,
    record: RequestRecord,
    run: Run | PastRun,
    number: int,
    send: Send,
    writer: EventWriter,
) -> None:
    """Send a run's events after `number` until its last one, as server-sent events."""
    record.stream = True
    stream = EventStream(send, poke=lambda: None, now_s=anyio.current_time)
    with anyio.CancelScope() as scope:
        stream.abandon = scope.cancel
        gateway.keeper.add(stream)
        try:
            await _pump(run, number, stream, writer)
        finally:
            gateway.keeper.remove(stream)
    if scope.cancelled_caught:
        raise ClientGone


async def _pump(run: Run | PastRun, number: int, stream: EventStream, writer: EventWriter) -> None:
    while True:
        events: list[RunEvent] | None = None
        with anyio.CancelScope() as waiting:
            stream.poke = waiting.cancel
            events = await run.events.after(number)
        if events is None:
            await stream.keep_alive()
        elif events:
            number = events[-1].sequence_number
            data = b"".join([writer.frames(event) for event in events])
            if data:
                await stream.write(data)
        else:
            await stream.finish(writer.ending())
            return
