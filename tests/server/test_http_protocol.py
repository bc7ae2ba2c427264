"""Offers to switch protocols, and bytes that are not HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.harness import Server, http_request, serving

UPGRADES = {
    "h2c": (
        "Connection: Upgrade, HTTP2-Settings",
        "Upgrade: h2c",
        "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    ),
    "websocket": ("Connection: keep-alive, Upgrade", "Upgrade: websocket"),
    "both": ("Upgrade: foo/2", "Connection: upgrade"),
}
PATH = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("Hello there.") as server:
        yield server


def content(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), answer
    return str(json.loads(body)["choices"][0]["message"]["content"])


def is_refusal(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    return (
        head.startswith(b"HTTP/1.1 400 ")
        and b"x-request-id: " in head
        and b"connection: close" in head
        and error["type"] == "invalid_request_error"
        and error["code"] == "invalid_http"
        and error["param"] is None
    )


@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES)
def test_an_offer_to_upgrade_is_declined_and_the_request_answered(
    server: Server, upgrade: tuple[str, ...]
) -> None:
    request = http_request(PATH, BODY, headers=upgrade)
    with server.connect() as connection:
        connection.sendall(request + http_request(PATH, BODY, headers=["Connection: close"]))
        received = b""
        while data := connection.recv(65536):
            received += data
    first, second = received.split(b"HTTP/1.1 ")[1:]
    assert content(b"HTTP/1.1 " + first) == "Hello there."
    assert content(b"HTTP/1.1 " + second) == "Hello there."


@pytest.mark.parametrize("size", [1, 7, 100])
def test_the_offer_may_come_in_pieces(server: Server, size: int) -> None:
    headers = [*UPGRADES["h2c"][:1], "Upgrade: h2c", "Connection: close"]
    request = http_request(PATH, BODY, headers=headers)
    with server.connect() as connection:
        for start in range(0, len(request), size):
            connection.sendall(request[start : start + size])
            if size > 1:
                time.sleep(0.001)
        received = b""
        while data := connection.recv(65536):
            received += data
    assert content(received) == "Hello there."


def test_a_chunked_body_comes_through_with_an_offer(server: Server) -> None:
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n"
    ).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:20], BODY[20:]))
    assert content(server.exchange(head + chunks + b"0\r\n\r\n")) == "Hello there."


def test_a_bodyless_request_with_an_offer_is_answered(server: Server) -> None:
    request = (
        b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n"
    )
    assert server.exchange(request).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "garbage",
    [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\x80\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"FROBNICATE / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzzz\r\n",
        b"GET / HTTP/1.1\r\nBad Header: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n",
    ],
    ids=lambda garbage: repr(garbage[:40]),
)
def test_what_is_not_http_gets_the_envelope_and_the_server_goes_on(
    server: Server, garbage: bytes
) -> None:
    assert is_refusal(server.exchange(garbage))
    assert server.chat().status_code == 200


def test_garbage_behind_a_request_does_not_damage_its_answer() -> None:
    with serving("word " * 200, step_time_s=0.002) as server:
        body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 150}).encode()
        with server.connect() as connection:
            connection.sendall(http_request("/v1/completions", body))
            received = connection.recv(65536)
            assert received.startswith(b"HTTP/1.1 200 ")
            connection.sendall(b"\x00\x01 garbage\r\n\r\n")
            while data := connection.recv(65536):
                received += data
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert received.count(b"HTTP/1.1") == 1
        assert server.chat().status_code == 200


@pytest.mark.parametrize("line", ["X: ", "X-{}: a\r\n"], ids=["one value", "many headers"])
def test_an_endless_head_is_refused(server: Server, line: str) -> None:
    part = ("".join(line.format(number) for number in range(4096)) + "a" * 4096).encode()
    sent = 0
    with server.connect() as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n" + line[:3].encode())
        received = b""
        try:
            while sent < 16 * 1024 * 1024:
                connection.sendall(part)
                sent += len(part)
        except OSError:
            pass
        received = connection.recv(65536)
    assert is_refusal(received)
    assert sent < 16 * 1024 * 1024
    assert server.chat().status_code == 200


def test_a_large_head_is_taken(server: Server) -> None:
    headers = [f"X-{number}: {'a' * 1000}" for number in range(100)]
    answer = server.exchange(http_request(PATH, BODY, headers=[*headers, "Connection: close"]))
    assert content(answer) == "Hello there."
