"""What surrounds every request: ids, keys, CORS, tidy paths, the error boundary."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from server.app import HttpOptions, post
from server.errors import INTERNAL_MESSAGE
from tests.harness import Server, chat_body, http_request, serving, until

ORIGIN = "https://app.example"
KEYS = {"key-one": "alice", "key-two": "bob"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("hello") as running:
        yield running


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    options = HttpOptions(api_keys=KEYS, allowed_origins=[ORIGIN], open_metrics=False)
    with serving("hello", names=("demo", "org/demo"), http=options) as running:
        yield running


def bearer(key: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"Authorization": f"{scheme} {key}"}


def raw_get(server: Server, target: str, *headers: str, method: str = "GET") -> tuple[int, str]:
    """Status and body for a request target exactly as written."""
    lines = [f"{method} {target} HTTP/1.1", "Host: test", "Connection: close", *headers]
    answer = server.exchange(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body.decode()


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


# Request ids


@pytest.mark.parametrize("asked", ["abc", "A-1_b.2/:x", "x" * 128, "!~"])
def test_a_sane_request_id_is_echoed(server: Server, asked: str) -> None:
    for response in (
        server.http.get("/v1/models", headers={"X-Request-Id": asked}),
        server.http.get("/nowhere", headers={"X-Request-Id": asked}),
        server.post("/v1/chat/completions", {}, headers={"X-Request-Id": asked}),
    ):
        assert response.headers.get_list("x-request-id") == [asked]


@pytest.mark.parametrize("asked", ["", "x" * 129, "a b", "tab\there", "é"])
def test_any_other_request_id_is_replaced(server: Server, asked: str) -> None:
    headers = {"X-Request-Id": asked.encode("latin-1")}
    response = server.http.get("/health", headers=headers)
    assert re.fullmatch("req_[0-9a-f]{24}", response.headers["x-request-id"])


def test_every_answer_has_an_id_and_its_time(server: Server) -> None:
    responses = [
        server.http.get("/health"),
        server.http.get("/nowhere"),
        server.http.delete("/v1/models"),
        server.chat(),
        server.chat(stream=True),
        server.chat(temperature=3),
    ]
    ids = {response.headers["x-request-id"] for response in responses}
    assert len(ids) == len(responses)
    assert all(int(response.headers["openai-processing-ms"]) >= 0 for response in responses)


def test_the_official_client_sees_the_request_id(server: Server) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    answer = server.openai().chat.completions.create(
        model="demo", messages=messages, extra_headers={"X-Request-Id": "mine"}
    )
    assert answer._request_id == "mine"


def test_two_live_requests_may_have_the_same_id() -> None:
    with serving("word " * 40, step_time_s=0.002) as server:
        body = json.dumps(chat_body(stream=True, request_id="same")).encode()
        headers = ["X-Request-Id: same", "Connection: close"]
        request = http_request("/v1/chat/completions", body, headers=headers)
        with server.connect() as first, server.connect() as second:
            first.sendall(request)
            second.sendall(request)
            until(lambda: server.load == 2)
            for connection in (first, second):
                received = b""
                while data := connection.recv(65536):
                    received += data
                assert received.count(b'"content":" word"') == 39
                assert b"[DONE]" in received
                assert b"x-request-id: same" in received
        ids = [generation.id for generation in server.engine.submitted]
        assert len(set(ids)) == 2
        assert not any("same" in generation_id for generation_id in ids)


# Keys

GUARDED_PATHS = [
    ("GET", "/v1/models"),
    ("GET", "/models"),
    ("GET", "/v1/models/demo"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/load"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
]


@pytest.mark.parametrize(("method", "path"), GUARDED_PATHS)
def test_without_a_key_nothing_is_told(guarded: Server, method: str, path: str) -> None:
    response = guarded.http.request(method, path)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = error_of(response)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert "API key" in error["message"]


@pytest.mark.parametrize("path", ["/health", "/version", "/ready"])
def test_probes_need_no_key(guarded: Server, path: str) -> None:
    assert guarded.http.get(path).status_code == 200
    assert guarded.http.head(path).status_code == 200


def test_metrics_are_open_by_default() -> None:
    with serving("hi", http=HttpOptions(api_keys=KEYS)) as server:
        assert server.http.get("/metrics").status_code == 200
        assert server.http.get("/load").status_code == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR"])
def test_the_scheme_is_case_insensitive(guarded: Server, scheme: str) -> None:
    headers = bearer("key-one", scheme)
    assert guarded.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("key", list(KEYS))
def test_each_key_passes(guarded: Server, key: str) -> None:
    assert guarded.http.get("/v1/models", headers=bearer(key)).status_code == 200
    assert guarded.http.get("/v1/models", headers={"api-key": key}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        bearer("wrong"),
        bearer("key-one2"),
        bearer("KEY-ONE"),
        bearer("key-on"),
        {"Authorization": "Bearer"},
        bearer("key-one", "Basic"),
        bearer("key-one", "Token"),
        {"Authorization": "key-one"},
        {"Authorization": "Bearerkey-one"},
        {"Authorization": ""},
        {"api-key": "wrong"},
        {"Authorization": "Bearer wrong", "api-key": "key-one"},
        {"Authorization": "Bearer k\u00e9y"},
        {"X-Api-Key": "key-one"},
    ],
)
def test_wrong_keys_and_schemes_are_refused(guarded: Server, headers: dict[str, str]) -> None:
    raw = {key: value.encode("latin-1") for key, value in headers.items()}
    response = guarded.http.get("/v1/models", headers=raw)
    assert response.status_code == 401
    error_of(response)
    assert "key-one" not in response.text


TRICKY_TARGETS = [
    "//v1/models",
    "/v1//models",
    "///v1/models///",
    "/v1/models/",
    "/V1/models",
    "/v1%2Fmodels",
    "/%761/models",
    "/v1/../v1/models",
    "/health/../v1/models",
    "/health%2F..%2Fv1/models",
    "/health/v1/models",
    "/health;/v1/models",
    "/health%00",
    "/./v1/models",
    "http://test/v1/models",
    "/v1/models?x=/health",
    "/v1/models#/health",
    "/metrics",
]


@pytest.mark.parametrize("target", TRICKY_TARGETS)
def test_no_spelling_of_a_path_slips_past(guarded: Server, target: str) -> None:
    status, body = raw_get(guarded, target)
    assert status in (400, 401)
    assert "demo" not in body


def test_doubled_and_trailing_slashes_are_the_same_path(guarded: Server) -> None:
    authorization = "Authorization: Bearer key-one"
    for target in ("//v1/models", "/v1//models", "/v1/models/", "/v1%2Fmodels"):
        status, body = raw_get(guarded, target, authorization)
        assert (status, "demo" in body) == (200, True)
    assert raw_get(guarded, "/V1/models", authorization)[0] == 404
    assert raw_get(guarded, "//health/")[0] == 200


def test_the_tenant_of_a_key_reaches_the_engine() -> None:
    with serving("hi", http=HttpOptions(api_keys=KEYS), salt_secret=b"s") as server:
        salts = []
        for key in ("key-one", "key-two", "key-one"):
            assert server.post("/v1/chat/completions", chat_body(), headers=bearer(key)).is_success
            salts.append(server.engine.submitted[-1].cache_salt)
        assert salts[0] == salts[2]
        assert salts[0] != salts[1]
        assert salts[0] is not None
        assert "alice" not in salts[0]


# Paths and methods


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/chat/completions/", "/chat/completions"]
)
def test_no_spelling_is_redirected(server: Server, path: str) -> None:
    assert server.post(path, chat_body()).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("PUT", "/v1/completions", {"POST"}),
        ("DELETE", "/v1/models/demo", {"GET", "HEAD"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("OPTIONS", "/v1/models", {"GET", "HEAD"}),
        ("HEAD", "/v1/chat/completions", {"POST"}),
    ],
)
def test_a_wrong_method_says_which_are_allowed(
    server: Server, method: str, path: str, allow: set[str]
) -> None:
    response = server.http.request(method, path)
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allow
    if method != "HEAD":
        assert error_of(response)["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/", "/nowhere", "/v2/chat/completions", "/v1", "/é", "/%ff%00"])
def test_an_unknown_path_is_a_nested_404(server: Server, path: str) -> None:
    response = server.http.get(path)
    assert response.status_code == 404
    assert error_of(response)["code"] == "route_not_found"


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/version", "/metrics", "/load"])
def test_head_is_get_without_a_body(server: Server, path: str) -> None:
    head, get = server.http.head(path), server.http.get(path)
    assert head.status_code == get.status_code == 200
    assert head.content == b""
    if path != "/metrics":
        assert head.headers["content-length"] == str(len(get.content))


def test_a_root_path_is_taken_off_before_matching() -> None:
    options = HttpOptions(api_keys=KEYS, root_path="/api")
    with serving("hi", http=options) as server:
        for path in ("/api/v1/models", "/v1/models"):
            assert server.http.get(path).status_code == 401
            assert server.http.get(path, headers=bearer("key-one")).status_code == 200
        for path in ("/api/health", "/health"):
            assert server.http.get(path).status_code == 200
        assert server.http.get("/apihealth").status_code == 401


# CORS


def test_a_preflight_passes_without_a_key(guarded: Server) -> None:
    headers = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    response = guarded.http.options("/v1/chat/completions", headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"].lower()
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/models", {}, 401),
        ("/v1/models", bearer("key-one"), 200),
        ("/nowhere", bearer("key-one"), 404),
        ("/v1/completions", bearer("key-one"), 405),
    ],
)
def test_browsers_may_read_errors_too(
    guarded: Server, path: str, headers: dict[str, str], status: int
) -> None:
    response = guarded.http.get(path, headers={"Origin": ORIGIN, **headers})
    assert response.status_code == status
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in response.headers["access-control-expose-headers"]


def test_other_origins_are_not_allowed(guarded: Server, server: Server) -> None:
    for running in (guarded, server):
        headers = {"Origin": "https://evil.example", **bearer("key-one")}
        response = running.http.get("/v1/models", headers=headers)
        assert "access-control-allow-origin" not in response.headers


# The error boundary


class Broken:
    """An endpoint with a bug, before or after its first byte."""

    def __init__(self, *, after_start: bool) -> None:
        self._after_start = after_start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._after_start:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("secret /etc/passwd")


@pytest.fixture
def broken(caplog: pytest.LogCaptureFixture) -> Iterator[Server]:
    routes = [
        post("/broken", Broken(after_start=False)),
        post("/half", Broken(after_start=True)),
    ]
    with serving("hi", further_routes=lambda gateway: routes) as running:
        yield running


def test_a_bug_of_ours_is_a_500_with_fixed_words(
    broken: Server, caplog: pytest.LogCaptureFixture
) -> None:
    response = broken.post("/broken", {}, headers={"X-Request-Id": "the-one"})
    assert response.status_code == 500
    assert error_of(response)["message"] == INTERNAL_MESSAGE
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "the-one"
    assert "request the-one failed" in caplog.text
    assert "secret /etc/passwd" in caplog.text
    assert broken.metric("shuntyard_requests_total", endpoint="/broken", outcome="failed") == 1
    assert broken.chat().status_code == 200


def test_a_bug_after_the_first_byte_breaks_the_connection(broken: Server) -> None:
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
        broken.post("/half", {})
    assert broken.chat().status_code == 200
