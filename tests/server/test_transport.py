"""HTTP as clients really speak it: odd bodies, old versions, hang-ups at every moment."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from server.gateway import Limits
from spot.engines.scripted import Faults
from spot.errors import EngineFailed
from tests.harness import Server, chat_body, http_request, serving, until

PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
BODY = json.dumps(chat_body()).encode()


@pytest.fixture(scope="module")
def server() -> Any:
    with serving("The answer.") as running:
        yield running


# Bodies


@pytest.mark.parametrize(
    ("raw", "headers", "status", "code"),
    [
        (b"", JSON, 400, "invalid_json"),
        (b"{", JSON, 400, "invalid_json"),
        (BODY[:-3], JSON, 400, "invalid_json"),
        (BODY + b"x", JSON, 400, "invalid_json"),
        (b'{"messages":"\xff\xfe"}', JSON, 400, "invalid_json"),
        (b"\xef\xbb\xbf" + BODY, JSON, 400, "invalid_json"),
        (BODY.decode().encode("utf-16"), JSON, 400, "invalid_json"),
        (gzip.compress(BODY), JSON, 400, "invalid_json"),
        (gzip.compress(BODY), {**JSON, "content-encoding": "gzip"}, 400, "invalid_json"),
        (b"[" * 100_000, JSON, 400, "invalid_json"),
        (b'{"messages":' + b"9" * 5000 + b"}", JSON, 400, "invalid_json"),
        (BODY, {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        (
            BODY,
            {"content-type": "application/x-www-form-urlencoded"},
            415,
            "unsupported_media_type",
        ),
        (BODY, {}, 415, "unsupported_media_type"),
    ],
    ids=range(14),
)
def test_odd_bodies_get_a_clear_error(
    server: Server, raw: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    response = server.http.post(PATH, content=raw, headers=headers)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert len(response.content) < 10_000


def test_json_types_with_parameters_pass(server: Server) -> None:
    for content_type in ("application/json; charset=utf-8", "APPLICATION/JSON"):
        headers = {"content-type": content_type}
        assert server.http.post(PATH, content=BODY, headers=headers).status_code == 200


def test_of_duplicate_keys_the_last_wins(server: Server) -> None:
    raw = BODY[:-1] + b',"max_tokens":1,"max_tokens":2}'
    answer = server.http.post(PATH, content=raw, headers=JSON).json()
    assert answer["usage"]["completion_tokens"] == 2


@pytest.fixture(scope="module")
def small() -> Any:
    limits = Limits(max_body_bytes=1000)
    with serving("The answer.", limits=limits, arrival_s=0.2) as running:
        yield running


def test_a_body_over_the_limit_is_a_413_before_it_is_read(small: Server) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
    answer = small.exchange(f"{head}Content-Length: 100000000\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer.lower()
    assert b'"code":"body_too_large"' in answer


def test_a_chunked_body_over_the_limit_is_a_413(small: Server) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
    chunks = b"".join(b"190\r\n" + b"x" * 0x190 + b"\r\n" for _ in range(3))
    answer = small.exchange(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"code":"body_too_large"' in answer


def test_a_body_within_the_limit_passes(small: Server) -> None:
    assert small.chat("x" * 800).status_code == 200
    assert small.chat("x" * 1000).status_code == 413


def test_a_body_that_does_not_arrive_is_a_408(small: Server) -> None:
    with small.connect() as connection:
        connection.sendall(http_request(PATH, BODY)[:-5])
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in answer
    until(lambda: small.load == 0)


# Versions and connections


def test_http_1_0_is_answered_and_closed(server: Server) -> None:
    answer = server.exchange(http_request(PATH, BODY, version="1.0"))
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"}")
    assert b"The answer." in answer


def test_an_http_1_0_stream_arrives_whole_and_is_closed(server: Server) -> None:
    body = json.dumps(chat_body(stream=True)).encode()
    answer = server.exchange(http_request(PATH, body, version="1.0"))
    assert b"connection: close" in answer.lower()
    assert b'"content":"The"' in answer
    assert b"data: [DONE]\n\n" in answer


def test_connection_close_is_honoured(server: Server) -> None:
    answer = server.exchange(http_request(PATH, BODY, headers=["Connection: close"]))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer.lower()


def test_a_connection_is_kept_for_the_next_request(server: Server) -> None:
    with server.connect() as connection:
        for _ in range(3):
            connection.sendall(http_request(PATH, BODY))
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    first = http_request(PATH, BODY, headers=["X-Request-Id: one"])
    second = http_request("/tokenize", b'{"prompt":"x"}', headers=["X-Request-Id: two"])
    third = http_request(PATH, b"{}", headers=["X-Request-Id: three", "Connection: close"])
    answer = server.exchange(first + second + third)
    positions = [answer.index(f"x-request-id: {n}".encode()) for n in ("one", "two", "three")]
    assert positions == sorted(positions)
    assert [answer.count(f"HTTP/1.1 {status}".encode()) for status in (200, 400)] == [2, 1]


def test_a_pipelined_request_is_no_hang_up() -> None:
    with serving("word " * 30, step_time_s=0.002) as server:
        request = http_request(PATH, json.dumps(chat_body(stream=True)).encode())
        with server.connect() as connection:
            connection.sendall(request)
            until(lambda: server.load == 1)
            connection.sendall(http_request("/tokenize", b'{"prompt":"x"}'))
            received = b""
            while b'"tokens"' not in received:
                received += connection.recv(65536)
        assert received.count(b'"content":" word"') == 29
        assert server.metric("shuntyard_requests_total", outcome="aborted") == 0


def test_expect_100_continue_is_answered_before_the_body(server: Server) -> None:
    request = http_request(PATH, BODY, headers=["Expect: 100-continue", "Connection: close"])
    with server.connect() as connection:
        connection.sendall(request[: -len(BODY)])
        assert connection.recv(4096).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(BODY)
        received = b""
        while data := connection.recv(65536):
            received += data
    assert received.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_no_http_is_refused_and_harms_nobody(server: Server, raw: bytes) -> None:
    assert server.exchange(raw).startswith(b"HTTP/1.1 400")
    assert server.chat().status_code == 200


# Hang-ups


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stall_at", [0, 3])
def test_a_hang_up_aborts_every_choice(n: int, stream: bool, stall_at: int) -> None:
    with serving("word " * 20, faults=Faults(stall_at_token=stall_at)) as server:
        body = json.dumps(chat_body(n=n, stream=stream)).encode()
        with server.connect() as connection:
            connection.sendall(http_request(PATH, body))
            until(lambda: len(server.engine.submitted) == n)
            until(lambda: all(len(j.output) == stall_at for j in server.engine._running.values()))
            assert server.load == 1
        until(lambda: server.load == 0, within_s=1)
        assert sorted(server.engine.aborted) == sorted(g.id for g in server.engine.submitted)
        assert server.engine.stats.running == 0
        assert server.gateway.admission.num_generations == 0
        assert server.metric("shuntyard_requests_total", outcome="aborted") == 1
        assert server.metric("vllm:generation_tokens_total") == n * stall_at


@pytest.mark.parametrize("stream", [False, True])
def test_a_hang_up_while_queued_takes_it_out_of_the_queue(stream: bool) -> None:
    with serving("x", faults=Faults(stall_at_token=0), max_num_seqs=1) as server:
        body = json.dumps(chat_body(stream=stream)).encode()
        with server.connect() as first:
            first.sendall(http_request(PATH, body))
            until(lambda: server.engine.stats.running == 1)
            with server.connect() as second:
                second.sendall(http_request(PATH, body))
                until(lambda: server.engine.stats.waiting == 1)
            until(lambda: server.load == 1, within_s=1)
            assert server.engine.stats.waiting == 0
            assert server.engine.stats.running == 1
        until(lambda: server.load == 0, within_s=1)


def test_a_hang_up_while_the_body_is_sent_leaves_nothing() -> None:
    with serving("x") as server:
        with server.connect() as connection:
            connection.sendall(http_request(PATH, BODY)[:-5])
            until(lambda: server.load == 1)
        until(lambda: server.load == 0, within_s=1)
        assert server.engine.submitted == []
        assert server.metric("shuntyard_requests_total", outcome="aborted") == 1


def test_one_failing_choice_ends_the_others() -> None:
    with serving("word " * 50, step_time_s=0.001) as server:
        body = json.dumps(chat_body(n=3)).encode()
        with server.connect() as connection:
            connection.sendall(http_request(PATH, body, headers=["Connection: close"]))
            until(lambda: server.engine.stats.running == 3)
            job = next(iter(server.engine._running.values()))
            server.call(job.sink.on_error, EngineFailed("broken"))
            received = b""
            while data := connection.recv(65536):
                received += data
        assert received.startswith(b"HTTP/1.1 500")
        assert b'"code":"engine_failed"' in received
        until(lambda: server.engine.stats.running == 0)


def test_graceful_end_tells_open_streams() -> None:
    with serving("word " * 50, faults=Faults(stall_at_token=2)) as server:
        body = json.dumps(chat_body(stream=True)).encode()
        connection = server.connect()
        connection.sendall(http_request(PATH, body, headers=["Connection: close"]))
        until(lambda: server.load == 1)
        until(lambda: [len(j.output) for j in server.engine._running.values()] == [2])
    with connection:
        received = b""
        while data := connection.recv(65536):
            received += data
    assert b'"content":" word"' in received
    assert b'"code":"shutting_down"' in received
    assert b"data: [DONE]\n\n" in received


def test_the_engine_dying_under_many_streams_ends_all_of_them() -> None:
    with serving("word " * 50, faults=Faults(stall_at_token=1)) as server:
        body = json.dumps(chat_body(stream=True)).encode()
        connections = [server.connect() for _ in range(10)]
        for connection in connections:
            connection.sendall(http_request(PATH, body, headers=["Connection: close"]))
        until(lambda: server.engine.stats.running == 10)
        server.call(server.engine.die)
        for connection in connections:
            with connection:
                received = b""
                while data := connection.recv(65536):
                    received += data
            assert b'"code":"engine_failed"' in received
        until(lambda: server.load == 0)
