"""HTTP/1.1 as uvicorn speaks it, with a few things put right.

An offer to switch to HTTP/2 (`Upgrade: h2c`, which Java's client makes by default and curl with
`--http2`) is declined by answering in HTTP/1.1, as RFC 9110 section 7.8 has it; uvicorn would lose
the request's body. What is not HTTP gets OpenAI's envelope like every other error; and it never
lands in the middle of an answer that is being sent. The size of a request's head is bounded.

Requests that come while another is answered wait within bounds, and reading goes on: uvicorn would
stop, and never learn that the client left. Every connection has a deadline, for its next request to
begin, for its head and for its body.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from server.asgi import HANG_UP
from server.errors import BadHttp, HttpError, RequestTimeout, describe

MAX_HEAD_BYTES = 256 * 1024
MAX_WAITING_REQUESTS = 100
MAX_WAITING_BYTES = 1024 * 1024

_NEVER = math.inf
_OF_UPGRADE = (b"upgrade", b"http2-settings")


class _Enough(Exception):
    """Makes the parser stop: nothing more is taken from this connection."""


class Exchange(RequestResponseCycle):
    """One request and its answer. late: what `receive` raises while the body is incomplete."""

    late: RequestTimeout | None = None

    async def receive(self) -> Any:
        message = await super().receive()
        if self.late is not None and message.get("more_body"):
            raise self.late
        return message

    def hang_up(self) -> None:
        """Close the connection instead of completing the answer.

        What its client has not read by now it never will: that is thrown away, or the connection
        would stay until it does.
        """
        if self.response_complete or self.disconnected:
            return
        self.disconnected = True
        self.message_event.set()
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()


class OldExchange(Exchange):
    """With an HTTP/1.0 client, who knows no chunks (RFC 9112 section 6.1): a body of unknown length
    ends with the connection."""

    _is_until_close = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message["headers"]]
            if b"content-length" not in names:
                self._is_until_close = True
                self.chunked_encoding = False
        elif self._is_until_close:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class HttpProtocol(HttpToolsProtocol):
    """One connection. No protocol is ever switched to: there are no websockets here.

    idle_s: how long it may stay open without a request. arrival_s: how long a request's head may
    take to arrive, and then its body.

    What a connection waits for has one deadline. Its timer is not moved with it: a timer that
    fires early is set anew, so that a request which comes in one piece costs none.
    """

    idle_s = 75.0
    arrival_s = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._declining = False
        self._is_over = False
        self._in_head = False
        self._in_body = False
        self._is_head_split = False
        self._num_head_bytes = 0
        self._running: RequestResponseCycle | None = None
        self._due_s = _NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = _NEVER

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_within(self.idle_s)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    # Deadlines

    def _expect_within(self, seconds: float) -> None:
        self._due_s = self.loop.time() + seconds
        if self._due_s < self._timer_s:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = self._due_s
        self._timer = self.loop.call_later(self._due_s - self.loop.time(), self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_s = None, _NEVER
        if self._due_s == _NEVER:
            return
        if self._due_s > self.loop.time():
            self._set_timer()
            return
        self._due_s = _NEVER
        if not self.transport.is_closing():
            self._give_up()

    def _give_up(self) -> None:
        """What was awaited has not come."""
        within = f"did not arrive within {self.arrival_s:g} s."
        if self._in_head:
            self._refuse(RequestTimeout(f"The request's head {within}"))
        elif (
            self._in_body and isinstance(self.cycle, Exchange) and not self.cycle.response_complete
        ):
            self.cycle.late = RequestTimeout(f"The request body {within}")
            self.cycle.message_event.set()
            self._expect_within(self.arrival_s)
        else:
            self.transport.close()

    # What arrives

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._declining:
                self._declining = False
                self._start_again(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if not self._is_over:
                self._refuse(BadHttp("The request is not valid HTTP."))
        else:
            if self._in_head or self._in_body:
                self._note_part(len(data))

    def _note_part(self, num_bytes: int) -> None:
        """The request is to be continued: in time, and its head within bounds."""
        if self._due_s == _NEVER:
            self._expect_within(self.arrival_s)
        if self._in_head:
            # Where the head began, the read may hold the end of another request.
            self._num_head_bytes += num_bytes if self._is_head_split else 0
            self._is_head_split = True
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()

    def _refuse_head(self) -> None:
        self._refuse(BadHttp(f"The request's head is over {MAX_HEAD_BYTES} bytes."))

    def on_message_begin(self) -> None:
        self._in_head, self._in_body = True, False
        self._is_head_split = False
        self._num_head_bytes = 0
        self._due_s = _NEVER
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        # A head within one read is small.
        if self._is_head_split and self._head_size() > MAX_HEAD_BYTES:
            self._refuse_head()
            raise _Enough
        method = self.parser.get_method()
        if self.parser.should_upgrade() and method != b"CONNECT":
            self._declining = True
            return
        self._complete_scope(method)
        is_next = self.cycle is None or self.cycle.response_complete
        if not is_next and len(self.pipeline) == MAX_WAITING_REQUESTS:
            self._take_no_more()
            raise _Enough
        self._in_head, self._in_body = False, True
        self._due_s = _NEVER
        self.cycle = self._new_exchange()
        if is_next:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.pipeline.appendleft((self.cycle, self.app))

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _complete_scope(self, method: bytes) -> None:
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        scope = self.scope
        scope["method"] = method.decode("ascii")
        scope["path"] = self.root_path + (unquote(path) if "%" in path else path)
        scope["raw_path"] = self.root_path.encode("ascii") + url.path
        scope["query_string"] = url.query or b""
        scope["http_version"] = self.parser.get_http_version()

    def _new_exchange(self) -> Exchange:
        is_old = self.scope["http_version"] < "1.1"
        kind: Callable[..., Exchange] = OldExchange if is_old else Exchange
        exchange = kind(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue and not is_old,
            keep_alive=not is_old and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        extensions: dict[str, Any] = {HANG_UP: exchange.hang_up}
        self.scope["extensions"] = extensions
        return exchange

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.body += body
        if cycle is not self._running:
            if sum(len(waiting.body) for waiting, _ in self.pipeline) > MAX_WAITING_BYTES:
                self._take_no_more()
                raise _Enough
        elif len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if not self._declining:
            self._in_body = False
            if self._due_s != _NEVER:
                self._end_arrival()
            super().on_message_complete()

    def _end_arrival(self) -> None:
        """The request is complete in time: its answer has no deadline. Where it has been given
        already (a refusal), the next request has one."""
        self._due_s = _NEVER
        running = self._running
        if running is not None and running.response_complete and not self.pipeline:
            self._expect_within(self.idle_s)

    def _start_again(self, rest: bytes) -> None:
        """Read the request once more, without its offer, and then what follows its head."""
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name == b"connection":
                wanted = [w.strip() for w in value.split(b",")]
                value = b", ".join(w for w in wanted if w.lower() not in _OF_UPGRADE)
            if name not in _OF_UPGRADE and value:
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"".join(head) + b"\r\n" + rest)

    # What is answered

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif not (self._in_head or self._in_body):
            self._expect_within(self.idle_s)

    def _refuse(self, error: HttpError) -> None:
        """Answer what is arriving with an error, and close.

        Where answers to earlier requests are due, the last of them closes the connection instead.
        """
        cycle = self.cycle
        is_its_turn = not self.pipeline and (
            self._in_body or cycle is None or cycle.response_complete
        )
        if not is_its_turn:
            self._take_no_more()
            return
        self._is_over = True
        if self.transport.is_closing():
            return
        if not self._in_body or not cycle.response_started:
            self._answer(error)
        if not self._in_body or not cycle.response_started or cycle.response_complete:
            self.transport.close()
        else:
            cycle.keep_alive = False

    def _take_no_more(self) -> None:
        """Answer the requests that are complete, then close. A client sends the others again (RFC
        9112 section 9.3.2); what still comes from it is not kept."""
        self._is_over = True
        self._due_s = _NEVER
        if self._in_body and self.pipeline:
            self.pipeline.popleft()
        last = self.pipeline[0][0] if self.pipeline else self._running
        assert last is not None
        self.cycle = last
        last.keep_alive = False

    def _answer(self, error: HttpError) -> None:
        reply = describe(error)
        body = reply.body()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", f"req_{secrets.token_hex(12)}".encode()),
            *reply.headers,
        ]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        self.transport.write(b"".join([STATUS_LINE[reply.status], *lines, b"\r\n", body]))


def http_protocol(*, idle_s: float, arrival_s: float) -> type[HttpProtocol]:
    """HttpProtocol with these limits, as uvicorn wants it: a class."""
    return type("HttpProtocol", (HttpProtocol,), {"idle_s": idle_s, "arrival_s": arrival_s})
