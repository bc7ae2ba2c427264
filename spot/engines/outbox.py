"""Frames on their way out: put never waits, one task writes, many frames make one write."""

from __future__ import annotations

import anyio
from anyio.abc import ByteSendStream

from spot.engines.codec import Abort, ToGateway, ToHost, encode_frame


class Outbox:
    """An unbounded buffer of encoded frames, accounted in bytes.

    Aborts are collected and sent as one message behind the frames of the same write.
    """

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._aborted: list[int] = []
        self._filled = anyio.Event()
        self.num_bytes = 0

    def put(self, message: ToHost | ToGateway) -> None:
        """Queue one message. Raises ValueError or OverflowError if it cannot be encoded."""
        frame = encode_frame(message)
        self._frames.append(frame)
        self.num_bytes += len(frame)
        self._filled.set()

    def put_abort(self, handle: int) -> None:
        """Queue the abort of one generation."""
        self._aborted.append(handle)
        self._filled.set()

    def take(self) -> bytes:
        """Everything that waits, as one run of bytes; the buffer is empty afterwards."""
        frames, aborted = self._frames, self._aborted
        self._frames, self._aborted = [], []
        self._filled = anyio.Event()
        self.num_bytes = 0
        if aborted:
            frames.append(encode_frame(Abort(aborted)))
        return b"".join(frames)

    async def write_to(self, stream: ByteSendStream) -> None:
        """Write what is put, for ever. Ends by cancellation or by the stream's own error."""
        while True:
            await self._filled.wait()
            await stream.send(self.take())
