"""A load generator cheaper than what it loads: prebuilt requests, raw protocols, no parsing.

Run as `python -m benchmarks.client` with a `Spec` as JSON on standard input; writes an `Outcome` as
JSON to standard output. Responses are scanned, not parsed: events are counted by their blank lines,
the first token is found by the first non-empty content, token counts are read from the usage at the
end.

modes:
    closed: `concurrency` connections, each sends its next request when the last one is answered,
        until `duration_s` is over or `num_requests` are sent; then what runs is finished.
    open: requests at Poisson times of `rate_per_s`, whether or not earlier ones are answered.
    hold: `concurrency` streams are opened; once each has had its first token, `held` is printed and
        the streams are kept until a line comes on standard input.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, cast

import msgspec
import uvloop

SEED_MARK = b"1111111111"
_CONTENT = re.compile(rb'"(?:content|text)":\s?"[^"]')
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s?(\d+)')
_LAST_CHUNK = b"0\r\n\r\n"


class Spec(msgspec.Struct):
    """What to send, and how.

    bodies: JSON texts, used in turn. Ten ones in a row (`"seed":1111111111`) are replaced by the
        request's number plus `first_seed`, so that an engine can tell requests apart.
    core: the CPU core to run on.
    """

    port: int
    path: str
    bodies: list[str]
    mode: Literal["closed", "open", "hold"]
    concurrency: int = 1
    duration_s: float = 5.0
    num_requests: int | None = None
    rate_per_s: float = 0.0
    random_seed: int = 1
    first_seed: int = 2_000_000_000
    core: int | None = None


class Request(msgspec.Struct, array_like=True):
    """One answered request. Times are of `time.perf_counter`, first_s is 0 without a content."""

    number: int
    start_s: float
    first_s: float
    end_s: float
    num_events: int
    num_tokens: int
    status: int


class Outcome(msgspec.Struct):
    """What came of a run. lag_s: how late open-loop requests were sent, at most."""

    requests: list[Request]
    num_failed: int
    num_bytes: int
    elapsed_s: float
    cpu_s: float
    lag_s: float = 0.0


class Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request on it."""

    def __init__(self, on_end: Callable[[Connection, Request | None], None]) -> None:
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._request: Request | None = None
        self._recent: deque[bytes] = deque(maxlen=6)
        self._remaining: int | None = None
        self._in_head = False
        self.on_first: Callable[[], None] | None = None
        self.num_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, number: int, data: bytes) -> None:
        assert self._transport is not None
        self._in_head, self._remaining = True, None
        self._recent.clear()
        self._request = Request(number, time.perf_counter(), 0.0, 0.0, 0, 0, 0)
        self._transport.write(data)

    def close(self) -> None:
        self._request = None
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        request = self._request
        if request is None:
            return
        self.num_bytes += len(data)
        self._recent.append(data)
        if self._in_head and not self._read_head(request):
            return
        request.num_events += data.count(b"\n\n")
        if not request.first_s and _CONTENT.search(data):
            request.first_s = now_s
            if self.on_first is not None:
                self.on_first()
        if self._remaining is not None:
            self._remaining -= len(data)
            ended = self._remaining <= 0
        else:
            ended = data.endswith(_LAST_CHUNK) or (
                len(data) < 5 and b"".join(self._recent).endswith(_LAST_CHUNK)
            )
        if ended:
            request.end_s = now_s
            found = _COMPLETION_TOKENS.findall(b"".join(self._recent))
            request.num_tokens = int(found[-1]) if found else 0
            self._request = None
            self._on_end(self, request)

    def _read_head(self, request: Request) -> bool:
        """Read status and framing once the head is whole."""
        head, blank, _ = b"".join(self._recent).partition(b"\r\n\r\n")
        if not blank:
            return False
        self._in_head = False
        request.status = int(head[9:12])
        length = _LENGTH.search(head)
        if length is not None:
            earlier = sum(map(len, self._recent)) - len(self._recent[-1])
            self._remaining = len(head) + 4 + int(length[1]) - earlier
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._request is not None:
            self._request = None
            self._on_end(self, None)


class Load:
    """Sends what a spec says and gathers the outcome."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._parts = [_request_parts(spec, body) for body in spec.bodies]
        self._connections: list[Connection] = []
        self._idle: list[Connection] = []
        self._num_sent = 0
        self._num_open = 0
        self._num_failed = 0
        self._requests: list[Request] = []
        self._deadline_s = 0.0
        self._lag_s = 0.0
        self._done = asyncio.Event()
        self._ended = False

    async def run(self) -> Outcome:
        for _ in range(self._spec.concurrency):
            self._idle.append(await self._connect())
        cpu_s, start_s = time.process_time(), time.perf_counter()
        self._deadline_s = start_s + self._spec.duration_s
        if self._spec.mode == "closed":
            while self._idle and self._may_send():
                self._send(self._idle.pop())
        elif self._spec.mode == "open":
            await self._send_openly(start_s)
        else:
            await self._hold()
        self._ended = True
        if self._num_open:
            await self._done.wait()
        elapsed_s = max((r.end_s for r in self._requests), default=start_s) - start_s
        for connection in self._connections:
            connection.close()
        return Outcome(
            requests=self._requests,
            num_failed=self._num_failed,
            num_bytes=sum(connection.num_bytes for connection in self._connections),
            elapsed_s=elapsed_s,
            cpu_s=time.process_time() - cpu_s,
            lag_s=self._lag_s,
        )

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._on_end), "127.0.0.1", self._spec.port
        )
        self._connections.append(connection)
        return connection

    def _may_send(self) -> bool:
        limit = self._spec.num_requests
        if limit is not None:
            return self._num_sent < limit
        return time.perf_counter() < self._deadline_s

    def _send(self, connection: Connection) -> None:
        number = self._spec.first_seed + self._num_sent
        before, after = self._parts[self._num_sent % len(self._parts)]
        data = before if after is None else b"%b%010d%b" % (before, number, after)
        self._num_sent += 1
        self._num_open += 1
        connection.send(number, data)

    def _on_end(self, connection: Connection, request: Request | None) -> None:
        self._num_open -= 1
        if request is None or request.status != 200:
            self._num_failed += 1
        else:
            self._requests.append(request)
        if self._spec.mode == "open":
            if request is not None:
                self._idle.append(connection)
        elif request is not None and self._may_send():
            self._send(connection)
        if not self._num_open and (self._ended or self._spec.mode == "closed"):
            self._done.set()

    async def _send_openly(self, start_s: float) -> None:
        rng = random.Random(self._spec.random_seed)
        due_s = start_s
        while due_s < self._deadline_s:
            due_s += rng.expovariate(self._spec.rate_per_s)
            wait_s = due_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._lag_s = max(self._lag_s, time.perf_counter() - due_s)
            connection = self._idle.pop() if self._idle else await self._connect()
            self._send(connection)

    async def _hold(self) -> None:
        num_first = 0
        all_first = asyncio.Event()

        def on_first() -> None:
            nonlocal num_first
            num_first += 1
            if num_first == self._spec.concurrency:
                all_first.set()

        for connection in list(self._idle):
            connection.on_first = on_first
            self._send(connection)
        async with asyncio.timeout(60):
            await all_first.wait()
        print("held", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        self._num_open = 0
        for connection in self._connections:
            connection.close()


def _request_parts(spec: Spec, body: str) -> tuple[bytes, bytes | None]:
    """A request's bytes, cut in two where the seed goes; uncut without one."""
    payload = body.encode()
    head = (
        f"POST {spec.path} HTTP/1.1\r\nHost: 127.0.0.1:{spec.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    before, mark, after = (head.encode() + payload).partition(SEED_MARK)
    return (before, after) if mark else (before, None)


def main() -> None:
    """Read the spec's line, run it, write the outcome."""
    spec = msgspec.json.decode(sys.stdin.readline(), type=Spec)
    if spec.core is not None:
        os.sched_setaffinity(0, {spec.core})
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def run() -> Outcome:
        return await Load(spec).run()

    outcome = uvloop.run(run())
    sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")


if __name__ == "__main__":
    main()
