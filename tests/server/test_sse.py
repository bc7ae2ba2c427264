"""Event streams: framing, keep-alive comments, readers that stall."""

from __future__ import annotations

import json
import time

import anyio
import pytest
from starlette.types import Message

from server.sse import DONE, KEEP_ALIVE, EventStream, StreamKeeper, frame
from spot.engines.scripted import Faults
from tests.fakes import Wire
from tests.harness import chat_body, http_request, serving, until

pytestmark = pytest.mark.anyio


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class SlowLine:
    """A client that takes nothing until it is told to."""

    def __init__(self) -> None:
        self.takes = anyio.Event()

    async def send(self, message: Message) -> None:
        await self.takes.wait()


class Watched:
    """A stream under a keeper, and what the keeper did to it."""

    def __init__(self, keeper: StreamKeeper, clock: Clock, line: Wire | SlowLine) -> None:
        self.num_pokes = 0
        self.num_abandoned = 0
        self.stream = EventStream(line.send, poke=self._poke, now_s=clock)
        self.stream.abandon = self._abandon
        keeper.add(self.stream)

    def _poke(self) -> None:
        self.num_pokes += 1

    def _abandon(self) -> None:
        self.num_abandoned += 1


def test_a_frame_is_one_event() -> None:
    assert frame(b"{}") == b"data: {}\n\n"


async def test_nothing_is_sent_before_the_first_write() -> None:
    wire = Wire()
    stream = EventStream(wire.send, poke=lambda: None, now_s=Clock())
    assert not stream.started
    assert wire.sent == []
    await stream.write(frame(b"1"))
    assert stream.started
    await stream.keep_alive()
    await stream.finish(DONE)
    assert wire.status == 200
    assert wire.headers == {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    }
    assert wire.body == b"data: 1\n\n: keep-alive\n\ndata: [DONE]\n\n"
    assert [message.get("more_body") for message in wire.sent] == [None, True, True, False]


async def test_a_stream_may_be_finished_at_once() -> None:
    wire = Wire()
    await EventStream(wire.send, poke=lambda: None, now_s=Clock()).finish(DONE)
    assert wire.body == DONE
    assert wire.sent[-1]["more_body"] is False


async def test_silent_streams_are_poked() -> None:
    clock, keeper = Clock(), StreamKeeper(keep_alive_s=10, stalled_reader_s=60)
    watched = Watched(keeper, clock, Wire())
    keeper.check(clock() + 9.9)
    assert watched.num_pokes == 0
    keeper.check(clock() + 10)
    assert watched.num_pokes == 1
    clock.now_s += 10
    await watched.stream.keep_alive()
    keeper.check(clock() + 9.9)
    assert watched.num_pokes == 1
    keeper.remove(watched.stream)
    keeper.check(clock() + 99)
    assert (watched.num_pokes, watched.num_abandoned) == (1, 0)


def test_keep_alive_can_be_off() -> None:
    clock, keeper = Clock(), StreamKeeper(keep_alive_s=0, stalled_reader_s=60)
    watched = Watched(keeper, clock, Wire())
    keeper.check(clock() + 10_000)
    assert watched.num_pokes == 0


@pytest.mark.parametrize("call", ["write", "finish"])
async def test_a_reader_that_takes_nothing_is_dropped(call: str) -> None:
    clock, keeper, line = Clock(), StreamKeeper(keep_alive_s=1, stalled_reader_s=60), SlowLine()
    watched = Watched(keeper, clock, line)
    async with anyio.create_task_group() as group:
        group.start_soon(getattr(watched.stream, call), b"x")
        await anyio.wait_all_tasks_blocked()
        keeper.check(clock() + 60)
        assert watched.num_abandoned == 0
        keeper.check(clock() + 60.1)
        assert watched.num_abandoned == 1
        assert watched.num_pokes == 0, "a comment would only wait behind the rest"
        line.takes.set()
    assert watched.stream.sending_since_s is None


async def test_the_keeper_looks_by_itself() -> None:
    async with StreamKeeper(keep_alive_s=0.01, stalled_reader_s=60) as keeper:
        poked = anyio.Event()
        keeper.add(EventStream(Wire().send, poke=poked.set, now_s=anyio.current_time))
        with anyio.fail_after(2):
            await poked.wait()


def test_keep_alive_comes_before_the_first_token() -> None:
    with serving("hello", faults=Faults(stall_at_token=0), keep_alive_s=0.02) as server:
        body = json.dumps(chat_body(stream=True)).encode()
        with server.connect() as connection:
            request = http_request("/v1/chat/completions", body, headers=["Connection: close"])
            connection.sendall(request)
            received = b""
            while received.count(KEEP_ALIVE) < 2:
                received += connection.recv(4096)
            assert b"200 OK" in received
            assert b"data:" not in received
            server.engine.faults = Faults()
            while data := connection.recv(4096):
                received += data
        assert received.index(KEEP_ALIVE) < received.index(b'"role":"assistant"')
        assert b'"content":"hello"' in received
        assert b"data: [DONE]" in received


def test_keep_alive_comes_between_tokens_and_the_official_client_skips_it() -> None:
    with serving("one two", faults=Faults(stall_at_token=1), keep_alive_s=0.02) as server:
        stream = server.openai().chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        chunks = iter(stream)
        texts = [next(chunks).choices[0].delta.content for _ in range(2)]
        assert texts == ["", "one"]
        time.sleep(0.1)  # for some comments, which only the wire shows
        server.engine.faults = Faults()
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == " two"


def test_a_failure_after_a_keep_alive_is_an_error_frame() -> None:
    with serving("x", faults=Faults(stall_at_token=0), keep_alive_s=0.02) as server:
        body = json.dumps(chat_body(stream=True)).encode()
        with server.connect() as connection:
            request = http_request("/v1/chat/completions", body, headers=["Connection: close"])
            connection.sendall(request)
            received = b""
            while KEEP_ALIVE not in received:
                received += connection.recv(4096)
            server.call(server.engine.die)
            while data := connection.recv(4096):
                received += data
        assert b'data: {"error":{"message":"the engine died"' in received
        assert b"data: [DONE]\n\n" in received


def test_a_stalled_reader_is_dropped_and_its_generation_aborted() -> None:
    num_tokens = 60_000
    with serving(
        [1000] * num_tokens,
        max_model_len=100_000,
        tokens_per_step=10,
        step_time_s=0.001,
        send_buffer=4096,
        stalled_reader_s=0.2,
    ) as server:
        body = json.dumps({"prompt": "x", "max_tokens": num_tokens, "stream": True}).encode()
        with server.connect(receive_buffer=4096) as connection:
            connection.sendall(http_request("/v1/completions", body))
            until(lambda: server.load == 1)
            until(lambda: server.load == 0, within_s=10)
            assert server.engine.aborted == [server.engine.submitted[0].id]
            assert server.metric("shuntyard_requests_total", outcome="aborted") == 1
