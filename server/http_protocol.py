"""HTTP/1.1 as uvicorn speaks it, with a few things put right.

An offer to switch to HTTP/2 (`Upgrade: h2c`, which Java's client makes by default and curl with
`--http2`) is declined by answering in HTTP/1.1, as RFC 9110 section 7.8 has it; uvicorn would lose
the request's body. What is not HTTP gets OpenAI's envelope like every other error; and it never
lands in the middle of an answer that is being sent. The size of a request's head is bounded.
"""

from __future__ import annotations

import secrets
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from server.errors import BadHttp, describe

MAX_HEAD_BYTES = 256 * 1024

_OF_UPGRADE = (b"upgrade", b"http2-settings")


class HttpProtocol(HttpToolsProtocol):
    """One connection. No protocol is ever switched to: there are no websockets here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._declining = False
        self._is_over = False
        self._in_head = False
        self._num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._declining:
                self._declining = False
                self._start_again(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("The request is not valid HTTP.")
        else:
            self._bound_head(len(data))

    def _bound_head(self, num_bytes: int) -> None:
        """Count what came without completing the head; whole heads within one read are small."""
        if not self._in_head:
            self._num_head_bytes = 0
            return
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"The request's head is over {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._declining = True
        else:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._declining:
            super().on_message_complete()

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

    def send_400_response(self, msg: str) -> None:
        self._is_over = True
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if self.pipeline:
            self.transport.close()
        elif cycle is not None and cycle.response_started and not cycle.response_complete:
            cycle.keep_alive = False
        else:
            body = describe(BadHttp(msg)).body()
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"x-request-id", f"req_{secrets.token_hex(12)}".encode()),
                (b"connection", b"close"),
            ]
            lines = [name + b": " + value + b"\r\n" for name, value in headers]
            self.transport.write(b"".join([STATUS_LINE[400], *lines, b"\r\n", body]))
            self.transport.close()
