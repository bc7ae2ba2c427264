"""Offers to switch protocols, bytes that are not HTTP, pipelines, deadlines, HTTP/1.0."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator

import pytest

from server.http_protocol import MAX_HEAD_BYTES, MAX_WAITING_BYTES, MAX_WAITING_REQUESTS
from spot.engines.scripted import Faults
from tests.harness import Server, http_request, serving, until

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


def is_refusal(answer: bytes, *, status: int = 400, code: str = "invalid_http") -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    return (
        head.startswith(b"HTTP/1.1 %d " % status)
        and b"x-request-id: " in head
        and b"connection: close" in head
        and error["type"] == "invalid_request_error"
        and error["code"] == code
        and error["param"] is None
    )


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while data := connection.recv(65536):
        received += data
    return received


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


@pytest.mark.parametrize("size", [1024, MAX_HEAD_BYTES])
def test_a_head_over_the_limit_is_refused_however_it_is_read(server: Server, size: int) -> None:
    head = f"GET /version HTTP/1.1\r\nHost: x\r\nX: {'a' * MAX_HEAD_BYTES}\r\n\r\n".encode()
    with server.connect() as connection:
        for start in range(0, len(head), size):
            connection.sendall(head[start : start + size])
        assert is_refusal(read_all(connection))


def test_a_large_head_is_taken(server: Server) -> None:
    headers = [f"X-{number}: {'a' * 1000}" for number in range(100)]
    answer = server.exchange(http_request(PATH, BODY, headers=[*headers, "Connection: close"]))
    assert content(answer) == "Hello there."


def test_a_head_behind_a_large_body_may_come_in_pieces(server: Server) -> None:
    padded = BODY + b" " * 700_000
    second = http_request(PATH, BODY, headers=["Connection: close"])
    with server.connect() as connection:
        connection.sendall(http_request(PATH, padded) + second[:20])
        assert content(connection.recv(65536)) == "Hello there."
        connection.sendall(second[20:40])
        time.sleep(0.01)
        connection.sendall(second[40:])
        assert content(read_all(connection)) == "Hello there."


# Requests that wait for an earlier one


@pytest.mark.parametrize("num_bytes", [len(BODY), MAX_WAITING_BYTES // 2, 2 * MAX_WAITING_BYTES])
@pytest.mark.parametrize("is_later", [False, True])
def test_a_hang_up_is_noticed_although_another_request_waits(
    num_bytes: int, is_later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 20}).encode()
    first = http_request("/v1/completions", body)
    second = http_request(PATH, BODY.ljust(num_bytes))
    with serving("word " * 20, faults=Faults(stall_at_token=3)) as server:
        with caplog.at_level(logging.ERROR, logger="uvicorn.error"):
            with server.connect() as connection:
                connection.sendall(first if is_later else first + second)
                until(lambda: len(server.engine.submitted) == 1)
                connection.sendall(second if is_later else b"")
            until(lambda: server.load == 0, within_s=1)
            until(lambda: server.metric("shuntyard_requests_total", outcome="aborted") == 1)
        assert [g.id for g in server.engine.submitted] == server.engine.aborted
        assert len(server.engine.submitted) == 1
        assert not caplog.records


def test_a_hang_up_during_a_running_stream_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 1500}).encode()
    request = http_request("/v1/completions", body)
    with serving("word " * 2000, step_time_s=0.001) as server:
        with caplog.at_level(logging.ERROR, logger="uvicorn.error"):
            with server.connect() as connection:
                connection.sendall(request * 3)
                assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            until(lambda: server.load == 0, within_s=1)
        assert server.metric("shuntyard_requests_total", outcome="aborted") == 1
        assert server.metric("shuntyard_requests_total", outcome="failed") == 0
        assert not caplog.records


def test_of_too_many_waiting_requests_the_first_are_answered() -> None:
    request = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    with serving("word " * 5, step_time_s=0.02) as server:
        with server.connect() as connection:
            connection.sendall(http_request(PATH, BODY) + request * 1000)
            received = read_all(connection)
        assert received.count(b"HTTP/1.1 200 ") == 1 + MAX_WAITING_REQUESTS
        assert received.count(b"connection: close") == 1
        assert server.chat().status_code == 200


@pytest.mark.parametrize(
    "waiting",
    [
        b"\x00 garbage\r\n\r\n",
        http_request(PATH, b" " * 2 * MAX_WAITING_BYTES),
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 2 * MAX_HEAD_BYTES,
    ],
    ids=lambda waiting: repr(waiting[:30]),
)
@pytest.mark.parametrize("num_before", [1, 2])
def test_what_cannot_wait_leaves_the_answers_before_it_whole(
    waiting: bytes, num_before: int
) -> None:
    with serving("word " * 5, step_time_s=0.02) as server:
        with server.connect() as connection:
            connection.sendall(http_request(PATH, BODY) * num_before + waiting)
            received = read_all(connection)
        assert received.count(b"HTTP/1.1 ") == received.count(b"HTTP/1.1 200 ") == num_before
        assert received.count(b"connection: close") == 1
        assert server.chat().status_code == 200


# Deadlines


@pytest.fixture(scope="module")
def impatient() -> Iterator[Server]:
    with serving("Hello there.", idle_s=0.2, arrival_s=0.3) as server:
        yield server


def test_connections_without_a_request_are_closed_without_a_word(impatient: Server) -> None:
    connections = [impatient.connect(timeout_s=2) for _ in range(100)]
    for connection in connections:
        with connection:
            assert read_all(connection) == b""


def test_blank_lines_are_no_request(impatient: Server) -> None:
    with impatient.connect(timeout_s=2) as connection:
        connection.sendall(b"\r\n\r\n")
        assert read_all(connection) == b""


@pytest.mark.parametrize("num_before", [0, 2])
def test_a_head_that_drips_is_a_408(impatient: Server, num_before: int) -> None:
    started_s = time.monotonic()
    with impatient.connect(timeout_s=0.04) as connection:
        for _ in range(num_before):
            connection.sendall(http_request(PATH, BODY))
            connection.settimeout(2)
            assert content(connection.recv(65536)) == "Hello there."
            connection.settimeout(0.04)
        received = b""
        for byte in b"GET /version HTTP/1.1\r\nHost: " + b"x" * 100:
            try:
                connection.sendall(bytes([byte]))
                received = connection.recv(65536)
                break
            except TimeoutError:
                pass
    assert is_refusal(received, status=408, code="request_timeout")
    assert 0.25 < time.monotonic() - started_s < 2


def test_a_body_that_drips_behind_its_refusal_is_cut(impatient: Server) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    with impatient.connect(timeout_s=2) as connection:
        connection.sendall(head)
        received = read_all(connection)
    assert received.startswith(b"HTTP/1.1 404 ")
    assert received.count(b"HTTP/1.1 ") == 1


def test_a_body_may_take_its_time_after_the_head(impatient: Server) -> None:
    request = http_request(PATH, BODY, headers=["Connection: close"])
    with impatient.connect(timeout_s=2) as connection:
        for start, end in ((0, 20), (20, -30), (-30, -10), (-10, len(request))):
            connection.sendall(request[start:end])
            time.sleep(0.12)
        assert content(read_all(connection)) == "Hello there."


def test_a_connection_is_closed_when_it_stays_idle_after_an_answer(impatient: Server) -> None:
    with impatient.connect(timeout_s=2) as connection:
        for _ in range(3):
            connection.sendall(http_request(PATH, BODY))
            assert content(connection.recv(65536)) == "Hello there."
            time.sleep(0.12)
        started_s = time.monotonic()
        assert read_all(connection) == b""
        assert time.monotonic() - started_s < 1


@pytest.mark.parametrize("num_last", [0, 1, len(BODY), len(BODY) + 20])
def test_a_long_answer_has_no_deadline(num_last: int) -> None:
    """However the request was cut into packets: clients send head and body each in their own."""
    request = http_request(PATH, BODY)
    end = len(request) - num_last
    with (
        serving("word " * 20, step_time_s=0.03, idle_s=0.2, arrival_s=0.2) as server,
        server.connect() as connection,
    ):
        for _ in range(2):
            connection.sendall(request[:end])
            time.sleep(0.05)
            connection.sendall(request[end:])
            assert content(connection.recv(65536)).startswith("word word")


def test_after_a_long_answer_an_idle_connection_is_closed() -> None:
    request = http_request(PATH, BODY)
    with (
        serving("word " * 20, step_time_s=0.03, idle_s=0.3, arrival_s=0.2) as server,
        server.connect() as connection,
    ):
        connection.sendall(request[:-5])
        time.sleep(0.05)
        connection.sendall(request[-5:])
        assert content(connection.recv(65536)).startswith("word word")
        assert connection.recv(1) == b""


def test_a_late_head_behind_a_request_lets_it_be_answered() -> None:
    with serving("word " * 20, step_time_s=0.03, idle_s=0.1, arrival_s=0.1) as server:
        received = server.exchange(http_request(PATH, BODY) + b"GET / HT")
        assert content(received).startswith("word word")
        assert received.count(b"HTTP/1.1 ") == 1


# HTTP/1.0


def test_a_stream_to_an_old_client_ends_with_the_connection(server: Server) -> None:
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    answer = server.exchange(http_request("/v1/completions", body, version="1.0"))
    head, _, events = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"\n\ndata: [DONE]\n\n")


def test_an_old_client_is_not_asked_to_continue(server: Server) -> None:
    headers = ["Expect: 100-continue"]
    assert content(server.exchange(http_request(PATH, BODY, version="1.0", headers=headers)))
