"""Reading bodies, sending JSON, noticing a hang-up."""

from __future__ import annotations

import json
import time
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from server.asgi import (
    MAX_CONTAINERS,
    ClientGone,
    _check_nesting,
    header,
    read_body,
    read_json,
    send_error,
    send_json,
    until_disconnect,
)
from server.errors import (
    BadBody,
    BodyTooLarge,
    ErrorReply,
    WrongContentType,
)
from tests.fakes import Wire, body_messages, http_scope

pytestmark = pytest.mark.anyio

JSON = ("content-type", "application/json")


async def read(
    *chunks: bytes,
    headers: tuple[tuple[str, str], ...] = (JSON,),
    max_bytes: int = 1000,
    max_depth: int = 8,
) -> Any:
    wire = Wire(*body_messages(*chunks))
    return await read_json(
        http_scope(headers=headers),
        wire.receive,
        max_bytes=max_bytes,
        max_depth=max_depth,
    )


def test_header_is_the_first_of_its_name() -> None:
    scope = http_scope(headers=[("X-A", "1"), ("x-a", "2")])
    assert header(scope, b"x-a") == b"1"
    assert header(scope, b"x-b") is None


async def test_a_body_in_pieces_is_joined() -> None:
    assert await read(b'{"a"', b":", b"", b"[1]}") == {"a": [1]}


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/vnd.api+json",
        "application/json;",
    ],
)
async def test_json_content_types_pass(content_type: str) -> None:
    assert await read(b"{}", headers=(("content-type", content_type),)) == {}


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "", "json", "text/json"]
)
async def test_other_content_types_are_told_the_fix(content_type: str) -> None:
    with pytest.raises(WrongContentType, match="Content-Type: application/json"):
        await read(b"{}", headers=(("content-type", content_type),))


async def test_no_content_type_is_told_the_fix() -> None:
    with pytest.raises(WrongContentType, match="no content type"):
        await read(b"{}", headers=())


async def test_compressed_bodies_are_refused() -> None:
    with pytest.raises(BadBody, match="Compressed"):
        await read(b"\x1f\x8b", headers=(JSON, ("content-encoding", "gzip")))
    assert await read(b"{}", headers=(JSON, ("content-encoding", "identity"))) == {}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"   ",
        b"{",
        b'{"a":',
        b"nonsense",
        b'{"a":1}x',
        b"\xff\xfe",
        b'{"a":"\xc3"}',
        b'{"a":"\\ud800"}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":1,}',
        b"\xef\xbb\xbf{}",
        b'{"a":"\x00"}',
        b'\x1f\x8b\x08\x00{"a":1}',
    ],
)
async def test_what_is_not_json_is_a_bad_body(raw: bytes) -> None:
    with pytest.raises(BadBody):
        await read(raw)


async def test_duplicate_keys_the_last_wins() -> None:
    assert await read(b'{"a":1,"a":2}') == {"a": 2}


async def test_a_body_over_the_limit_is_refused_by_its_length() -> None:
    wire = Wire()
    scope = http_scope(headers=[JSON, ("content-length", "1001")])
    with pytest.raises(BodyTooLarge, match="1000 bytes"):
        await read_json(scope, wire.receive, max_bytes=1000, max_depth=8)


async def test_a_body_over_the_limit_is_refused_as_soon_as_it_is() -> None:
    received = 0

    async def receive() -> Message:
        nonlocal received
        received += 1
        return {"type": "http.request", "body": b"x" * 400, "more_body": True}

    with pytest.raises(BodyTooLarge):
        await read_body(receive, max_bytes=1000)
    assert received == 3


async def test_a_body_of_exactly_the_limit_passes() -> None:
    raw = b'"' + b"x" * 998 + b'"'
    assert await read(raw, max_bytes=1000) == "x" * 998


async def test_a_client_that_leaves_while_sending_is_gone() -> None:
    wire = Wire({"type": "http.request", "body": b"{", "more_body": True})
    with pytest.raises(ClientGone):
        await read_body(wire.receive, max_bytes=10)


async def test_nesting_is_bounded() -> None:
    assert await read(b"[" * 8 + b"]" * 8)
    with pytest.raises(BadBody, match="deeper than 8"):
        await read(b"[" * 9 + b"]" * 9)
    with pytest.raises(BadBody, match="deeper than 8"):
        await read(b'{"a":' * 100_000, max_bytes=10**6)


async def test_brackets_in_strings_are_not_nesting() -> None:
    text = '[{"\\"[[' * 20
    assert await read(json.dumps([text]).encode()) == [text]


async def test_too_many_containers_are_refused() -> None:
    raw = b"[" + b"[]," * (MAX_CONTAINERS + 1) + b"[]]"
    with pytest.raises(BadBody, match="more than"):
        await read(raw, max_bytes=10**7)


@given(
    st.recursive(
        st.none() | st.text(alphabet='[]{}"\\a,:', max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=12,
    ),
    st.integers(0, 6),
)
def test_nesting_is_counted_exactly(value: Any, limit: int) -> None:
    def depth(item: Any) -> int:
        if isinstance(item, dict):
            return 1 + max(map(depth, item.values()), default=0)
        if isinstance(item, list):
            return 1 + max(map(depth, item), default=0)
        return 0

    raw = json.dumps(value).encode()
    if depth(value) <= limit:
        _check_nesting(raw, limit)
    else:
        with pytest.raises(BadBody):
            _check_nesting(raw, limit)


@pytest.mark.parametrize("tail", [b'"' + b'\\"' * 500_000, b'"a' * 500_000, b"\\" * 1_000_000])
def test_an_open_string_takes_linear_time(tail: bytes) -> None:
    started_s = time.process_time()
    _check_nesting(b"[" * 8 + b"{}" * 9 + tail, 10)
    assert time.process_time() - started_s < 5, "quadratic: this would have taken hours"


async def test_send_json_has_its_length() -> None:
    wire = Wire()
    await send_json(wire.send, {"ä": 1}, headers=[(b"x-a", b"b")])
    assert wire.status == 200
    assert wire.headers == {
        "content-length": str(len(wire.body)),
        "content-type": "application/json",
        "x-a": "b",
    }
    assert json.loads(wire.body) == {"ä": 1}


async def test_send_error_has_the_envelope() -> None:
    wire = Wire()
    await send_error(wire.send, ErrorReply(418, "kind", "words", "p", "c", [(b"x", b"y")]))
    assert wire.status == 418
    assert wire.headers["x"] == "y"
    assert json.loads(wire.body) == {
        "error": {"message": "words", "type": "kind", "param": "p", "code": "c"}
    }


class Line:
    """A client that is there until the test hangs up."""

    def __init__(self) -> None:
        self.hung_up = anyio.Event()

    async def receive(self) -> Message:
        await self.hung_up.wait()
        return {"type": "http.disconnect"}


async def test_work_that_ends_ends_the_watch() -> None:
    with anyio.fail_after(2):
        await until_disconnect(Line().receive, anyio.lowlevel.checkpoint)


async def test_a_hang_up_cancels_the_work() -> None:
    line = Line()
    cleaned = False

    async def work() -> None:
        nonlocal cleaned
        line.hung_up.set()
        try:
            await anyio.sleep_forever()
        finally:
            cleaned = True

    with anyio.fail_after(2), pytest.raises(ClientGone):
        await until_disconnect(line.receive, work)
    assert cleaned


async def test_the_end_of_the_answer_is_no_hang_up() -> None:
    line = Line()

    async def work() -> None:
        line.hung_up.set()

    with anyio.fail_after(2):
        await until_disconnect(line.receive, work)


async def test_an_error_of_the_work_comes_out_as_itself() -> None:
    async def work() -> None:
        await anyio.lowlevel.checkpoint()
        raise BadBody("no")

    with anyio.fail_after(2), pytest.raises(BadBody):
        await until_disconnect(Line().receive, work)
