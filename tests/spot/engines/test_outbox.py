"""The buffer of frames on their way out."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from spot.engines.codec import Abort, FrameReader, Ping, encode_frame, to_host_decoder
from spot.engines.outbox import Outbox


def messages(data: bytes) -> list[Any]:
    return [to_host_decoder.decode(payload) for payload in FrameReader().feed(data)]


def test_everything_that_waits_is_taken_at_once_and_in_order() -> None:
    outbox = Outbox()
    outbox.put(Ping(1))
    outbox.put(Ping(2))
    assert outbox.num_bytes == len(encode_frame(Ping(1))) + len(encode_frame(Ping(2)))
    assert messages(outbox.take()) == [Ping(1), Ping(2)]
    assert outbox.num_bytes == 0
    assert outbox.take() == b""


def test_aborts_are_one_message_behind_the_others() -> None:
    outbox = Outbox()
    outbox.put_abort(5)
    outbox.put(Ping(1))
    outbox.put_abort(6)
    assert messages(outbox.take()) == [Ping(1), Abort([5, 6])]


@pytest.mark.anyio
async def test_frames_put_together_make_one_write() -> None:
    send, receive = anyio.create_memory_object_stream[bytes](10)

    class Stream:
        async def send(self, data: bytes) -> None:
            await send.send(data)

    outbox = Outbox()
    async with send, receive, anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.write_to, Stream())
        outbox.put(Ping(1))
        outbox.put(Ping(2))
        assert messages(await receive.receive()) == [Ping(1), Ping(2)]
        outbox.put_abort(3)
        assert messages(await receive.receive()) == [Abort([3])]
        tasks.cancel_scope.cancel()
