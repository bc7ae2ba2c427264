"""The part of HTTP that endpoints do themselves: read a body, send JSON, notice a hang-up."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterable
from datetime import date
from typing import Any
from urllib.parse import parse_qs

import anyio
import anyio.to_thread
import orjson
from starlette.types import Receive, Scope, Send

from placement.errors import InvalidInput
from placement.yaml_file import parse_yaml
from server.errors import (
    BadBody,
    BodyTooLarge,
    ErrorReply,
    WrongContentType,
)

Headers = list[tuple[bytes, bytes]]
JSON_HEADER = (b"content-type", b"application/json")
YAML_TYPES = (b"application/yaml", b"application/x-yaml", b"text/yaml", b"text/x-yaml")
MAX_CONTAINERS = 200_000
# Reading YAML takes a hundred times as long as JSON.
MAX_YAML_BYTES = 256 * 1024

# An open string goes to the end: starting again at each quote inside would take quadratic time.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


# An extension of our HTTP connections: ends one without completing the answer.
HANG_UP = "shuntyard.hang_up"


class ClientGone(Exception):
    """Nobody takes the rest of the answer.

    The client closed the connection, does not read, or has come back on another connection.
    """


def hang_up(scope: Scope) -> None:
    """Close the connection of a request whose answer is not completed, if it is still open."""
    extension = scope.get("extensions", {}).get(HANG_UP)
    if extension is not None:
        extension()


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that (lower-case) name."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def query(scope: Scope) -> dict[str, list[str]]:
    """The values in the query string, by name."""
    return parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)


def _media_type(scope: Scope) -> bytes:
    return (header(scope, b"content-type") or b"").split(b";")[0].strip().lower()


def _check_encoding(scope: Scope) -> None:
    if header(scope, b"content-encoding") not in (None, b"", b"identity"):
        raise BadBody("Compressed request bodies are not accepted; send plain JSON.")


def _check_json_type(scope: Scope) -> None:
    _check_encoding(scope)
    media_type = _media_type(scope)
    if media_type == b"application/json" or (
        media_type.startswith(b"application/") and media_type.endswith(b"+json")
    ):
        return
    shown = media_type.decode("latin-1")[:100] or "no content type"
    raise WrongContentType(
        f"The content type must be application/json, not {shown}; "
        "add the header 'Content-Type: application/json'."
    )


async def read_body(receive: Receive, *, max_bytes: int) -> bytes:
    """The whole request body.

    Raises BodyTooLarge as soon as the limit is passed, ClientGone, and what `receive` raises: of
    our HttpProtocol, RequestTimeout.
    """
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise BodyTooLarge(f"The request body is over the limit of {max_bytes} bytes.")
        chunks.append(chunk)
        if not message.get("more_body", False):
            break
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def read_json(
    scope: Scope, receive: Receive, *, max_bytes: int, max_depth: int, accepts_yaml: bool = False
) -> Any:
    """The decoded JSON body. Raises the HttpErrors of `read_body`, WrongContentType, BadBody.

    accepts_yaml: a body that says that it is YAML is one, and becomes the JSON that it stands for.
    """
    if accepts_yaml and _media_type(scope) in YAML_TYPES:
        return await _read_yaml(scope, receive)
    _check_json_type(scope)
    length = header(scope, b"content-length")
    if length is not None and length.isdigit() and int(length) > max_bytes:
        raise BodyTooLarge(f"The request body is over the limit of {max_bytes} bytes.")
    raw = await read_body(receive, max_bytes=max_bytes)
    if not raw.strip():
        raise BadBody("The request body is empty; a JSON object is expected.")
    _check_nesting(raw, max_depth)
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadBody(f"The request body is not valid JSON: {error}") from None


async def _read_yaml(scope: Scope, receive: Receive) -> Any:
    """Raises BadBody, BodyTooLarge."""
    _check_encoding(scope)
    raw = await read_body(receive, max_bytes=MAX_YAML_BYTES)
    try:
        file = await anyio.to_thread.run_sync(parse_yaml, raw.decode("utf-8"), "the body")
        _check_aliases(file.value)
        # What YAML has and JSON does not: numbers as keys and dates become text, the rest is wrong.
        return orjson.loads(json.dumps(file.value, default=_date_as_text))
    except UnicodeDecodeError:
        raise BadBody("The request body is not UTF-8.") from None
    except InvalidInput as error:
        raise BadBody(f"The request body is not a YAML document: {error}") from None
    except (TypeError, ValueError) as error:
        raise BadBody(f"The request body holds what JSON has not: {error}") from None


def _date_as_text(value: object) -> str:
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__}")


def _check_aliases(value: Any) -> None:
    """Bound what a YAML document becomes when each alias is replaced. Raises BadBody."""
    num_chars = 0
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            todo += one.keys()
            todo += one.values()
        elif isinstance(one, list):
            todo += one
        elif isinstance(one, str):
            num_chars += len(one)
        if num_chars > 4 * MAX_YAML_BYTES:
            raise BadBody("The YAML is too large once its aliases are replaced; send JSON.")


def _check_nesting(raw: bytes, max_depth: int) -> None:
    """Bound depth and number of containers before anything is built from them."""
    num_opened = raw.count(b"[") + raw.count(b"{")
    if num_opened <= max_depth:
        return
    brackets = _STRINGS.sub(b"", raw).translate(None, delete=_NO_BRACKETS)
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise BadBody(f"The JSON holds more than {MAX_CONTAINERS} arrays and objects.")
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > max_depth:
            raise BadBody(f"The JSON is nested deeper than {max_depth} levels.")


async def send_bytes(
    send: Send, status: int, body: bytes, *, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """A whole response."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def send_json(
    send: Send, value: Any, *, status: int = 200, headers: Headers | None = None
) -> None:
    """A JSON response."""
    await send_bytes(send, status, orjson.dumps(value), headers=[JSON_HEADER, *(headers or [])])


async def send_error(send: Send, reply: ErrorReply) -> None:
    """An error in OpenAI's envelope."""
    await send_bytes(send, reply.status, reply.body(), headers=[JSON_HEADER, *reply.headers])


async def until_disconnect(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` and cancel it when the client hangs up. Raises ClientGone then."""
    scope = anyio.CancelScope()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    # A bare task, ended below whatever happens: a task group per request costs a sixth of it.
    watcher = asyncio.get_running_loop().create_task(watch())
    try:
        with scope:
            await work()
    except BaseExceptionGroup as wrapped:
        raise _only_cause(wrapped) from None
    finally:
        watcher.cancel()
    if scope.cancelled_caught:
        raise ClientGone


def _only_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error inside nested groups of one; else the group itself."""
    cause: BaseException = group
    while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
        cause = cause.exceptions[0]
    return cause
