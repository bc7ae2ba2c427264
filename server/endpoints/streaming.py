"""Streaming a run as server-sent events: nothing before the first output, an honest end after."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

import anyio
import orjson
from starlette.types import Send

from server.asgi import ClientGone
from server.errors import describe, internal_error
from server.gateway import Gateway
from server.generation_run import GenerationRun, usage
from server.record import RequestRecord
from server.sse import DONE, EventStream, frame
from server.text.assembler import Piece
from spot.errors import ShuntyardError

logger = logging.getLogger(__name__)


class ChunkWriter(ABC):
    """Renders pieces as the frames of one endpoint."""

    @abstractmethod
    def opening(self) -> bytes:
        """Frames before the first output."""

    @abstractmethod
    def piece(self, index: int, piece: Piece, run: GenerationRun) -> bytes:
        """Frames for one piece, its finish included."""

    @abstractmethod
    def usage_chunk(self) -> bytes:
        """The frame that carries only usage."""


async def stream_run(
    gateway: Gateway,
    record: RequestRecord,
    run: GenerationRun,
    writer: ChunkWriter,
    send: Send,
    *,
    include_usage: bool,
) -> None:
    """Answer with an event stream.

    The first engine output is awaited before the status line, so that what goes wrong until then
    is a plain error; a keep-alive comment may come first when the engine takes long.
    """
    record.stream = True
    # The loop's own clock: anyio.current_time looks the loop up anew, twice per token.
    stream = EventStream(send, poke=run.poke, now_s=asyncio.get_running_loop().time)
    with anyio.CancelScope() as scope:
        stream.abandon = scope.cancel
        gateway.keeper.add(stream)
        try:
            await _pump(run, writer, stream, include_usage=include_usage)
        except (ShuntyardError, Exception) as error:
            if not stream.started:
                raise
            await stream.finish(_error_frames(record, error))
        finally:
            gateway.keeper.remove(stream)
    if scope.cancelled_caught:
        raise ClientGone


async def _pump(
    run: GenerationRun, writer: ChunkWriter, stream: EventStream, *, include_usage: bool
) -> None:
    opened = False
    while True:
        pieces = await run.pieces()
        if not pieces:
            await stream.keep_alive()
            continue
        data = b"".join([writer.piece(index, piece, run) for index, piece in pieces])
        if not opened:
            opened = True
            data = writer.opening() + data
        if run.is_done:
            tail = writer.usage_chunk() if include_usage else b""
            await stream.finish(data + tail + DONE)
            return
        if data:
            await stream.write(data)


def _error_frames(record: RequestRecord, error: Exception) -> bytes:
    """What a client sees of a failure after the first byte: an error event, then the end."""
    record.outcome = "failed"
    if isinstance(error, ShuntyardError):
        record.error = error.message
        reply = describe(error)
    else:
        logger.exception("request %s failed while streaming", record.request_id)
        record.error = type(error).__name__
        reply = internal_error()
    return frame(reply.body()) + DONE


def usage_bytes(record: RequestRecord) -> bytes:
    return orjson.dumps(usage(record))


JsonText = Callable[[object], bytes]
