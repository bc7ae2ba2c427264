"""Hostile bytes on a bare socket: every answer is a short 4xx in the envelope, and life goes on."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from server.app import HttpOptions
from server.endpoints.pooling import pooling_routes
from server.gateway import Gateway, Limits
from server.openapi import TABLE, Operation
from server.pools import PooledModel, Pools
from server.protocol.responses import ErrorResponse
from tests.contract.test_openapi import ZeroPooler
from tests.harness import Server, Streamed, serving

pytestmark = pytest.mark.contract

MAX_BODY_BYTES = 1024 * 1024
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
JSON_TYPE = "application/json"

WORKFLOW: dict[str, Any] = {
    "name": "w",
    "nodes": [
        {"id": "a", "op": "llm", "params": {"prompt": "{{ inputs.q }}", "max_tokens": 4}},
        {
            "id": "b",
            "op": "template",
            "params": {"value": ["{{ nodes.a.output.text }}"]},
            "depends_on": ["a"],
            "when": "true",
            "retry": {"max_attempts": 2, "backoff_s": 0.5},
            "timeout_s": 5.0,
            "on_error": "default",
            "default": {"value": 1},
        },
    ],
    "inputs": {"q": "Hi"},
    "input_schema": {"type": "object", "required": ["q"]},
    "outputs": {"x": "{{ nodes.b.output.value }}"},
    "deadline_s": 5.0,
}

# A valid body for every POST route; strings in all the places where a request can hold one.
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "demo",
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "none",
        "stop": ["x"],
        "user": "u",
        "max_tokens": 4,
        "temperature": 0.5,
        "seed": 1,
        "logit_bias": {"5": 1},
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}},
        "chat_template_kwargs": {"a": "b"},
        "cache_salt": "c",
        "request_id": "r",
    },
    "/v1/completions": {"model": "demo", "prompt": ["a", "b"], "stop": "x", "max_tokens": 4},
    RESPONSES: {
        "model": "demo",
        "instructions": "Be kind.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": None},
            {"type": "function_call", "id": "i", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
            {"type": "message", "role": "assistant", "content": "Hello.", "status": "completed"},
            {"role": "user", "content": "Go on."},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": "none",
        "metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "json_schema", "name": "s", "schema": {}}},
        "reasoning": {"effort": "low", "summary": None},
        "user": "u",
        "max_output_tokens": 4,
        "temperature": 0.5,
    },
    "/v1/embeddings": {"model": "embedder", "input": ["a", "b"], "encoding_format": "float"},
    "/v1/rerank": {"model": "embedder", "query": "a", "documents": ["b", {"text": "c"}]},
    "/v2/rerank": {"model": "embedder", "query": "a", "documents": ["b", "c"], "top_n": 1},
    "/v1/score": {"model": "embedder", "text_1": "a", "text_2": ["b", "c"]},
    "/v1/workflows": WORKFLOW,
    "/v1/workflows/validate": WORKFLOW,
    "/tokenize": {"model": "demo", "prompt": "a b"},
    "/detokenize": {"model": "demo", "tokens": [5, 6, 7]},
}
PATHS = list(BODIES)
POSTS = [operation for operation in TABLE if operation.request is not None]

settings = hypothesis.settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def routes(gateway: Gateway) -> Sequence[Any]:
    return pooling_routes(gateway, Pools(PooledModel(["embedder"], ZeroPooler())))


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with serving(
        "Hello there.",
        max_model_len=2048,
        tokens_per_step=64,
        limits=Limits(max_body_bytes=MAX_BODY_BYTES),
        further_routes=routes,
    ) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    """The server, which afterwards still answers what is right."""
    yield running
    assert running.chat().json()["choices"][0]["message"]["content"] == "Hello there."
    assert running.http.get("/health").status_code == 200


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    with serving("Hello.", http=HttpOptions(api_keys={"sk-test": "test"})) as server:
        yield server


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @classmethod
    def parse(cls, raw: bytes) -> Answer:
        head, _, body = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {n.lower(): v for n, _, v in (line.partition(": ") for line in lines)}
        assert first.startswith("HTTP/1.1 "), raw[:200]
        return cls(int(first.split(" ")[1]), headers, body)


def request(
    path: str | bytes,
    body: bytes = b"",
    *,
    method: str = "POST",
    content_type: str | bytes | None = JSON_TYPE,
    headers: Sequence[tuple[str, bytes]] = (),
) -> bytes:
    lines = [
        method.encode() + b" " + (path.encode() if isinstance(path, str) else path) + b" HTTP/1.1",
        b"Host: test",
        b"Connection: close",
        b"Content-Length: %d" % len(body),
    ]
    if content_type is not None:
        value = content_type.encode() if isinstance(content_type, str) else content_type
        lines.append(b"Content-Type: " + value)
    lines += [name.encode() + b": " + value for name, value in headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def ask(server: Server, raw: bytes) -> Answer:
    return Answer.parse(server.exchange(raw))


INNER = re.compile(
    r"Traceback|pydantic|PreTrained|apply_chat_template|\.py\b|site-packages|File \"|0x[0-9a-f]{6,}"
    r"|constrained-|function-|\[type=|input_value|tagged-union|/usr/|/home/|"
    + re.escape(str(Path(__file__).parents[2]))
)


def check_refused(answer: Answer, *statuses: int) -> dict[str, Any]:
    """A 4xx in the envelope that gives nothing of the inside away; its error."""
    assert answer.status in (statuses or range(400, 500)), answer
    assert answer.headers["content-type"] == JSON_TYPE
    assert answer.headers["x-request-id"]
    assert len(answer.body) < 10_000
    text = answer.body.decode("utf-8")
    value = json.loads(text)
    assert list(value) == ["error"]
    ErrorResponse.model_validate(value, strict=True, extra="forbid")
    assert set(value["error"]) - {"details"} == {"message", "type", "param", "code"}
    assert value["error"]["message"]
    assert not INNER.search(text), text
    return dict(value["error"])


def check_any(answer: Answer) -> None:
    """Answered as asked, or refused."""
    if answer.status != 200:
        check_refused(answer)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a body there are strings, numbers, booleans and nulls."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*place, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*place, index))
    else:
        yield place


def replaced(body: Any, place: tuple[Any, ...], text: bytes) -> bytes:
    """The body as JSON with one leaf replaced by raw text."""
    copy = json.loads(json.dumps(body))
    target = copy
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = "@@here@@"
    return encoded(copy).replace(b'"@@here@@"', text)


PLACES = [(path, place) for path, body in BODIES.items() for place in leaves(body)]
IDS = [f"{path}:{'.'.join(map(str, place))}" for path, place in PLACES]


@pytest.mark.parametrize("path", PATHS)
def test_the_bodies_are_valid(server: Server, path: str) -> None:
    assert ask(server, request(path, encoded(BODIES[path]))).status == 200


def test_there_is_a_body_for_every_post_route() -> None:
    assert set(BODIES) == {item.path for item in POSTS}


NOT_JSON = {
    "nothing": b"",
    "blanks": b" \r\n\t ",
    "open brace": b"{",
    "close brace": b"}",
    "half a key": b'{"a',
    "python": b"{'prompt': 'a'}",
    "none": b'{"prompt": None}',
    "comment": b'{"prompt": "a"} // x',
    "trailing comma": b'{"prompt": "a",}',
    "two values": b"{} {}",
    "form": b"prompt=a&max_tokens=4",
    "xml": b"<prompt>a</prompt>",
    "BOM": b"\xef\xbb\xbf{}",
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "UTF-32": '{"prompt": "a"}'.encode("utf-32"),
    "NUL": b"\x00",
    "NUL in a string": b'{"prompt": "a\x00b"}',
    "NUL after": b"{}\x00",
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "overlong UTF-8": b'{"prompt": "\xc0\xaf"}',
    "surrogate in UTF-8": b'{"prompt": "\xed\xa0\x80"}',
    "cut UTF-8": b'{"prompt": "\xe2\x82"}',
    "invalid key": b'{"\xff": 1}',
    "lone surrogate key": b'{"\\ud800": 1}',
    "bad escape": b'{"prompt": "\\x41"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": Infinity}',
    "-Infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "hex": b'{"prompt": "a", "n": 0x1}',
    "leading zero": b'{"prompt": "a", "n": 01}',
    "plus": b'{"prompt": "a", "n": +1}',
    "gzip": gzip.compress(b'{"prompt": "a"}'),
    "arrays": b"[" * 100_000,
    "closed arrays": b"[" * 100_000 + b"]" * 100_000,
    "objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep in a field": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep in an ignored field": b'{"zzz": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001,
    "brackets out of order": b"]}" * 1000,
    "a string left open": b'{"prompt": "' + b"[" * 500_000,
    "escapes without end": b'{"prompt": "' + b"\\" * 500_001,
    "many containers": b'{"prompt": [' + b"[]," * 300_000 + b"[]]}",
}


@pytest.mark.parametrize("path", PATHS)
def test_what_is_not_json(server: Server, path: str) -> None:
    for name, body in NOT_JSON.items():
        error = check_refused(ask(server, request(path, body)), 400)
        assert error["code"] == "invalid_json", name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body", [b"null", b"true", b"1", b"-1.5e9", b'"text"', b"[]", b"[{}]", b'["prompt"]']
)
def test_what_is_not_an_object(server: Server, path: str, body: bytes) -> None:
    assert check_refused(ask(server, request(path, body)), 400)["code"] == "invalid_type"


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_object_lacks_something(server: Server, path: str) -> None:
    assert check_refused(ask(server, request(path, b"{}")), 400)["param"]


@pytest.mark.parametrize("path", PATHS)
def test_truncated_bodies(server: Server, path: str) -> None:
    body = encoded(BODIES[path])
    for end in range(0, len(body), max(1, len(body) // 40)):
        check_refused(ask(server, request(path, body[:end])), 400)


@pytest.mark.parametrize("path", PATHS)
def test_random_bytes(server: Server, path: str) -> None:
    @hypothesis.given(st.binary(max_size=300))
    @hypothesis.settings(settings, max_examples=25)
    def run(body: bytes) -> None:
        check_refused(ask(server, request(path, body)), 400)

    run()


@pytest.mark.parametrize("path", PATHS)
def test_random_values(server: Server, path: str) -> None:
    """Any JSON in place of any field."""
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
        ),
        max_leaves=8,
    )

    @hypothesis.given(st.sampled_from(sorted(BODIES[path])), anything)
    @hypothesis.settings(settings, max_examples=40)
    def run(name: str, value: Any) -> None:
        check_any(ask(server, request(path, encoded({**BODIES[path], name: value}))))

    run()


ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    1e308,
    2**63,
    2**64,
    "",
    "x",
    "\u0000",
    "\U0010ffff",
    [],
    [1],
    ["a"],
    [[]],
    {},
    {"a": 1},
    {"type": 5},
    {"$ref": "#"},
    {"$defs": 5},
    {"type": "function", "function": {"name": "f"}},
]


@pytest.mark.parametrize("operation", POSTS, ids=lambda item: item.path)
def test_odd_values_in_every_field(server: Server, operation: Operation) -> None:
    assert operation.request is not None
    fields = operation.request.model_fields
    for number, ((name, info), value) in enumerate(itertools.product(fields.items(), ODD)):
        body = {**BODIES[operation.path], info.alias or name: value}
        if "stream" in fields and number % 2:
            body.setdefault("stream", True)
        check_odd(server, operation.path, body)


@pytest.mark.parametrize("choice", ["required", "none", "auto", ODD[-1]], ids=str)
def test_odd_parameters_of_tools(server: Server, choice: Any) -> None:
    for value in ODD:
        for schema in (value, {"type": value, "properties": value}, {"$defs": value}):
            function = {"name": "f", "parameters": schema}
            tools = [{"type": "function", "function": function}]
            body = {"messages": BODIES[CHAT]["messages"], "tools": tools, "tool_choice": choice}
            check_odd(server, CHAT, body)


@pytest.mark.parametrize(
    "name",
    [
        "self",
        "messages",
        "conversation",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "tokenize",
        "return_dict",
        "padding",
        "truncation",
        "max_length",
        "kwargs",
        "range",
        "raise_exception",
        "bos_token",
        "__class__",
        "\u0000",
        "",
    ],
)
def test_odd_arguments_of_templates(server: Server, name: str) -> None:
    for value in ODD:
        for path in (CHAT, "/tokenize"):
            body = {
                "messages": BODIES[CHAT]["messages"],
                "chat_template_kwargs": {name: value},
            }
            check_odd(server, path, body)


def check_odd(server: Server, path: str, body: dict[str, Any]) -> None:
    """Answered without a failure, or refused; on a connection that stays open."""
    response = server.http.post(path, json=body)
    check_any(Answer(response.status_code, dict(response.headers), response.content))
    if not response.headers["content-type"].startswith("text/event-stream"):
        return
    if path == "/v1/workflows":
        assert response.text.endswith("\n\ndata: [DONE]\n\n")
    elif path == RESPONSES:
        last = response.text.removesuffix("\n\n").rpartition("\n\n")[2]
        assert last.startswith(("event: response.completed\n", "event: response.incomplete\n"))
    else:
        streamed = Streamed(response.status_code, response.headers, response.content)
        assert streamed.is_done
        assert streamed.error is None, body


@pytest.mark.parametrize("path", PATHS)
def test_flipped_bytes(server: Server, path: str) -> None:
    body = encoded(BODIES[path])

    @hypothesis.given(st.integers(0, len(body) - 1), st.integers(0, 255))
    @hypothesis.settings(settings, max_examples=40)
    def run(position: int, byte: int) -> None:
        damaged = body[:position] + bytes([byte]) + body[position + 1 :]
        check_any(ask(server, request(path, damaged)))

    run()


@pytest.mark.parametrize(("path", "place"), PLACES, ids=IDS)
def test_every_leaf_with_what_does_not_belong_there(
    server: Server, path: str, place: tuple[Any, ...]
) -> None:
    body = BODIES[path]
    for text in (b'"\\ud800"', b'"a\\udfffb"', b"NaN", b"Infinity", b'"\xff"'):
        error = check_refused(ask(server, request(path, replaced(body, place, text))), 400)
        assert error["code"] == "invalid_json"
    for text in (b"1e400", b"-1e400", b"9" * 5000, b"1." + b"3" * 5000, b'"' + b"a" * 9999 + b'"'):
        check_any(ask(server, request(path, replaced(body, place, text))))
    for text in (b"{}", b"[]", b"[[]]", b"true", b"null", b"-1", b'"\\u0000"', b'""', b"1.5"):
        check_any(ask(server, request(path, replaced(body, place, text))))


def test_an_unknown_model_is_named_whatever_its_name(server: Server) -> None:
    for name in ("nope", "a" * 100_000, "\u0000", "\U0001f600" * 500, "<script>", "a\r\nb: c"):
        for path in [path for path in PATHS if BODIES[path] is not WORKFLOW]:
            body = encoded({**BODIES[path], "model": name})
            error = check_refused(ask(server, request(path, body)), 404)
            assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonx",
        "application/json+xml",
        "application",
        "application/",
        "text/json",
        "json",
        "application/octet-stream",
        "*/*",
        "a" * 5000,
        b"\xff\xfe",
        b"application/json\xff",
    ],
)
def test_wrong_content_types(server: Server, content_type: str | bytes | None) -> None:
    for path in PATHS:
        raw = request(path, encoded(BODIES[path]), content_type=content_type)
        assert check_refused(ask(server, raw), 415)["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "APPLICATION/JSON",
        "application/json; charset=utf-8",
        "application/json;",
        " application/json ",
        "application/vnd.api+json",
    ],
)
def test_right_content_types(server: Server, content_type: str) -> None:
    raw = request(CHAT, encoded(BODIES[CHAT]), content_type=content_type)
    assert ask(server, raw).status == 200


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"br", b"zstd", b"\xff", b"gzip, br"])
def test_compressed_bodies_are_refused_by_name(server: Server, encoding: bytes) -> None:
    body = gzip.compress(encoded(BODIES[CHAT]))
    raw = request(CHAT, body, headers=[("Content-Encoding", encoding)])
    assert "ompressed" in check_refused(ask(server, raw), 400)["message"]


def test_header_values_that_are_not_text(server: Server) -> None:
    values = [b"\xed\xa0\x80", b"\xff" * 200, b"a" * 8000, b"\x80", b"\t\t", b"", "é".encode()]
    names = ["x-request-id", "authorization", "api-key", "user-agent", "accept", "cookie", "origin"]
    for value in values:
        headers = [(name, value) for name in names]
        answer = ask(server, request(CHAT, encoded(BODIES[CHAT]), headers=headers))
        assert answer.status == 200
        assert re.fullmatch(r"req_[0-9a-f]{24}", answer.headers["x-request-id"])
        check_refused(ask(server, request(CHAT, b"{", headers=headers)), 400)


@pytest.mark.parametrize(
    "header",
    [
        ("authorization", b"Bearer \xff\xfe"),
        ("authorization", b"Bearer \xed\xa0\x80"),
        ("authorization", b"Bearer"),
        ("authorization", b"Bearer " + b"a" * 9000),
        ("authorization", b"Basic c2stdGVzdDo="),
        ("authorization", b"sk-test"),
        ("authorization", b""),
        ("authorization", b"\xff"),
        ("api-key", b"\xff"),
        ("x-api-key", b"sk-test"),
    ],
    ids=repr,
)
def test_strangers_learn_nothing(keyed: Server, header: tuple[str, bytes]) -> None:
    for path in ("/v1/models", "//v1//models/", "/%76%31/models", "/nope", "/v1/models/x", "/docs"):
        answer = ask(keyed, request(path, method="GET", headers=[header]))
        assert check_refused(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


def test_the_last_of_duplicate_keys_counts(server: Server) -> None:
    body = b'{"model": 5, "prompt": [], "prompt": "a", "model": "demo", "max_tokens": 1}'
    assert ask(server, request("/v1/completions", body)).status == 200
    body = b'{"prompt": "a", "prompt": 5}'
    error = check_refused(ask(server, request("/v1/completions", body)), 400)
    assert error["param"] == "prompt"


METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "PROPFIND", "LOCK"]


def test_wrong_methods_name_the_right_ones(server: Server) -> None:
    allowed: dict[str, set[str]] = {}
    for operation in TABLE:
        path = operation.path.replace("{run_id}", "run_demo")
        path = re.sub(r"{\w+}", "demo", path)
        allowed.setdefault(path, set()).add(operation.method)
        if operation.method == "GET":
            allowed[path].add("HEAD")
        allowed[path + "/"] = allowed["/" + path] = allowed[path]
        if path.startswith("/v1/"):
            allowed[path.removeprefix("/v1")] = allowed[path]
    for path in ("/openapi.json", "/docs", "/redoc"):
        allowed[path] = {"GET", "HEAD"}
    for path, right in allowed.items():
        for method in METHODS:
            if method in right:
                continue
            answer = ask(server, request(path, b"{}", method=method))
            assert set(answer.headers["allow"].split(", ")) == right, (method, path)
            if method == "HEAD":
                assert answer.status == 405
                assert answer.body == b""
            else:
                assert check_refused(answer, 405)["code"] == "method_not_allowed"


GARBAGE_PATHS = [
    "/",
    "/v1",
    "/v1/",
    "/v2/models",
    "/V1/MODELS",
    "/v1/chat",
    "/v1/chat/completions/x",
    "/v1/models/nope",
    "/v1/models/..%2f..%2fetc%2fpasswd",
    "/v1/models/%00",
    "/v1/models/%ff%fe",
    "/v1/models/%ed%a0%80",
    "/v1/models/" + "a" * 20_000,
    "/../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/v1%2fmodels%2fx",
    "/%00",
    "/%",
    "/%zz",
    "/%ff",
    "/" + "a" * 20_000,
    "/" + "/" * 5000 + "x",
    "/" + "a/" * 5000,
    "/?" + "a" * 20_000,
    "/x?q=%ff#frag",
    "/;jsessionid=1",
    "/.git/config",
    "/v1/completions.json",
    "/<script>alert(1)</script>",
    "/{model_id}",
    "/docs/x",
]


@pytest.mark.parametrize("path", GARBAGE_PATHS, ids=lambda path: str(path)[:40])
def test_garbage_paths(server: Server, path: str) -> None:
    for method in ("GET", "POST"):
        answer = ask(server, request(path, b"{}" if method == "POST" else b"", method=method))
        check_refused(answer, 404, 405)


def test_random_paths(server: Server) -> None:
    characters = st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="#?")

    @hypothesis.given(st.text(characters, max_size=60), st.sampled_from(METHODS[:5]))
    @hypothesis.settings(settings, max_examples=80)
    def run(path: str, method: str) -> None:
        check_refused(ask(server, request("/q" + path, method=method)), 404)

    run()


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def pour(server: Server, head: bytes, piece: bytes, num_pieces: int) -> tuple[int, bytes]:
    """Send a body in pieces until it is through or the server has had enough; sent and received."""
    sent, received = 0, b""
    with server.connect() as connection:
        try:
            connection.sendall(head)
            for _ in range(num_pieces):
                connection.sendall(piece)
                sent += len(piece)
        except OSError:
            pass
        try:
            while data := connection.recv(65536):
                received += data
        except ConnectionResetError:
            pass
    return sent, received


MIB = 1024 * 1024
LENGTH = b"Content-Length: %d" % (60 * MIB)
CHUNKED = b"Transfer-Encoding: chunked"
FRAMING: dict[str, tuple[bytes, Callable[[bytes], bytes]]] = {
    "declared": (LENGTH, lambda piece: piece),
    "chunked": (CHUNKED, lambda piece: b"%x\r\n%b\r\n" % (len(piece), piece)),
}


@pytest.mark.parametrize("framing", FRAMING)
@pytest.mark.parametrize("path", PATHS)
def test_60_mib_are_not_read(server: Server, path: str, framing: str) -> None:
    header, framed = FRAMING[framing]
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%b\r\n\r\n"
    before = resident_bytes()
    piece = framed(b" " * 65536)
    sent, received = pour(server, head % (path.encode(), header), piece, 60 * 16)
    answer = Answer.parse(received)
    assert check_refused(answer, 413)["code"] == "body_too_large"
    assert answer.headers["connection"] == "close"
    assert sent < 20 * MIB
    assert resident_bytes() - before < 16 * MIB


@pytest.mark.parametrize("framing", FRAMING)
def test_60_mib_for_nothing_are_not_kept(server: Server, framing: str) -> None:
    """Where the body does not matter it is dropped as it comes."""
    header, framed = FRAMING[framing]
    before = resident_bytes()
    for target in (b"POST /nope", b"PUT /v1/models", b"GET /health"):
        head = target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header + b"\r\n\r\n"
        _, received = pour(server, head, framed(b" " * 65536), 60 * 16)
        check_any(Answer.parse(received))
    assert resident_bytes() - before < 16 * MIB


def test_a_body_at_the_limit_is_read(server: Server) -> None:
    body = encoded(BODIES["/v1/completions"])
    fits = body + b" " * (MAX_BODY_BYTES - len(body))
    assert ask(server, request("/v1/completions", fits)).status == 200
    _, received = pour(server, request("/v1/completions", fits + b" "), b"", 1)
    check_refused(Answer.parse(received), 413)


def test_memory_does_not_grow_with_refused_bodies(server: Server) -> None:
    body = b'{"prompt": "' + b"a" * (MAX_BODY_BYTES - 20)
    for _ in range(5):
        check_refused(ask(server, request("/v1/completions", body)), 400)
    before = resident_bytes()
    for _ in range(60):
        check_refused(ask(server, request("/v1/completions", body)), 400)
    assert resident_bytes() - before < 16 * MIB


def test_a_body_shorter_than_declared_is_a_hang_up(server: Server) -> None:
    raw = request(CHAT, b"{}").replace(b"Content-Length: 2", b"Content-Length: 900")
    with server.connect() as connection:
        connection.sendall(raw)
