"""Streaming a run as server-sent events: nothing before the first output, an honest end after."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod

import anyio
import orjson
from starlette.types import Send

from server.asgi import ClientGone
from server.errors import ErrorReply, describe, internal_error
from server.gateway import Gateway
from server.generation_run import GenerationRun, usage
from server.record import RequestRecord
from server.sse import DONE, EventStream, frame
from server.text.assembler import Piece
from spot.errors import ShuntyardError

logger = logging.getLogger(__name__)


class ChunkWriter(ABC):
    """Renders pieces as the frames of one endpoint.

    `opening` and `closing` change nothing: they may be asked for twice.
    """

    @abstractmethod
    def opening(self) -> bytes:
        """Frames before the first output."""

    @abstractmethod
    def piece(self, index: int, piece: Piece, run: GenerationRun) -> bytes:
        """Frames for one piece, its finish included."""

    def closing(self) -> bytes:
        """Frames after the last output."""
        return DONE

    def failure(self, reply: ErrorReply) -> bytes:
        """What a client sees of a failure after the first byte: an error event, then the end."""
        return frame(reply.body()) + DONE


async def stream_run(
    gateway: Gateway,
    record: RequestRecord,
    run: GenerationRun,
    writer: ChunkWriter,
    send: Send,
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
            await _pump(run, writer, stream)
        except (ShuntyardError, Exception) as error:
            if not stream.started:
                raise
            await stream.finish(writer.failure(_reply(record, error)))
        finally:
            gateway.keeper.remove(stream)
    if scope.cancelled_caught:
        raise ClientGone


async def _pump(run: GenerationRun, writer: ChunkWriter, stream: EventStream) -> None:
    opened = False
    while True:
        pieces = await run.pieces()
        if not pieces:
            await stream.keep_alive()
            continue
        data = b"" if opened else writer.opening()
        opened = True
        data += b"".join([writer.piece(index, piece, run) for index, piece in pieces])
        if run.is_done:
            await stream.finish(data + writer.closing())
            return
        if data:
            await stream.write(data)


def _reply(record: RequestRecord, error: Exception) -> ErrorReply:
    """The failure as the client learns of it; noted in the record."""
    record.outcome = "failed"
    if isinstance(error, ShuntyardError):
        record.error = error.message
        return describe(error)
    logger.exception("request %s failed while streaming", record.request_id)
    record.error = type(error).__name__
    return internal_error()


def usage_bytes(record: RequestRecord) -> bytes:
    return orjson.dumps(usage(record))
