"""`http`: one request to the world outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlencode, urlsplit

import orjson
from pydantic import Field, JsonValue, model_validator

from workflows.errors import NodeFailed
from workflows.operators.base import JsonType, NodeContext, NodeResult
from workflows.outbound.client import OutboundAnswer, OutboundClient, OutboundRequest
from workflows.outbound.errors import (
    Broken,
    OutboundError,
    Refused,
    TooLarge,
    TooManyRedirects,
    TooSlow,
    Unreachable,
)
from workflows.signature import Identity
from workflows.spec import Document

MAX_BYTES: Final = 16 * 1024 * 1024
Method = Literal["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"]
READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_IDEMPOTENT: Final = READS | {"PUT", "DELETE"}
_KEY_HEADER: Final = "Idempotency-Key"
_SHOWN_BODY_CHARS: Final = 300

_CODES: Final[dict[type[OutboundError], str]] = {
    Refused: "refused",
    Unreachable: "unreachable",
    Broken: "connection_lost",
    TooSlow: "timeout",
    TooLarge: "too_large",
    TooManyRedirects: "too_many_redirects",
}


class Expect(Document):
    """What counts as success. status: one of these; by default any from 200 to 299. json: the body
    must be JSON."""

    status: Annotated[list[Annotated[int, Field(ge=100, le=599)]], Field(fail_fast=True)] | None = (
        None
    )
    is_json: bool = Field(default=False, alias="json")


class HttpParams(Document):
    """body or json: what is sent. query: added to the URL's own.

    idempotent: the other side does a request with one `Idempotency-Key` only once, so that a POST
    may be tried again. GET, HEAD, OPTIONS, PUT and DELETE always may.
    """

    url: Annotated[str, Field(min_length=1, max_length=8192)]
    method: Method = "GET"
    headers: dict[str, str] = Field(default_factory=dict)
    query: dict[str, str | int | float | bool] = Field(default_factory=dict)
    body: str | None = None
    json_body: JsonValue = Field(default=None, alias="json")
    expect: Expect = Field(default_factory=Expect)
    idempotent: bool = False
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    max_bytes: Annotated[int, Field(ge=1, le=MAX_BYTES)] = 5 * 1024 * 1024
    max_redirects: Annotated[int, Field(ge=0, le=20)] = 5

    @model_validator(mode="after")
    def _one_body(self) -> Self:
        if self.body is not None and "json_body" in self.model_fields_set:
            raise ValueError("give one of body and json")
        if self.method in ("GET", "HEAD") and (
            self.body is not None or "json_body" in self.model_fields_set
        ):
            raise ValueError(f"{self.method} has no body")
        return self


class HttpOperator:
    """The answer; `json` is null where it is none."""

    name = "http"
    params = HttpParams
    resources = ("http",)
    outputs: Mapping[str, JsonType] = {
        "status": "integer",
        "headers": "object",
        "body": "string",
        "json": "any",
        "url": "string",
    }

    def __init__(self, client: OutboundClient) -> None:
        self._client = client

    def identity(self, params: HttpParams) -> Identity | None:
        """Of requests that only read. Whatever writes is sent for each node. What is read may
        change: one request serves those who wait for it."""
        if params.method not in READS:
            return None
        return Identity(content=params.model_dump(mode="json"))

    def writes(self, params: HttpParams) -> bool:
        """All methods that do not only read."""
        return params.method not in READS

    async def run(self, params: HttpParams, context: NodeContext) -> NodeResult:
        request = _request(params, context)
        may_repeat = _may_repeat(params)
        try:
            async with context.job.slot("http"):
                answer = await self._client.send(request)
        except OutboundError as error:
            # Where nothing was sent, anything may be tried again.
            is_transient = isinstance(error, (Broken, TooSlow)) and may_repeat
            raise NodeFailed(
                error.message,
                code=_CODES[type(error)],
                is_retryable=isinstance(error, Unreachable) or is_transient,
            ) from None
        return NodeResult(output=_output(params, answer, may_repeat))


def _may_repeat(params: HttpParams) -> bool:
    given = any(name.lower() == _KEY_HEADER.lower() for name in params.headers)
    return params.method in _IDEMPOTENT or params.idempotent or given


def _request(params: HttpParams, context: NodeContext) -> OutboundRequest:
    headers = dict(params.headers)
    names = {name.lower() for name in headers}
    body = None if params.body is None else params.body.encode()
    if "json_body" in params.model_fields_set:
        body = orjson.dumps(params.json_body)
        if "content-type" not in names:
            headers["Content-Type"] = "application/json"
    elif body is not None and "content-type" not in names:
        headers["Content-Type"] = "text/plain; charset=utf-8"
    if params.method not in READS and _KEY_HEADER.lower() not in names:
        headers[_KEY_HEADER] = context.idempotency_key
    return OutboundRequest(
        url=_with_query(params.url, params.query),
        method=params.method,
        headers=headers,
        body=body,
        timeout_s=params.timeout_s,
        max_bytes=params.max_bytes,
        max_redirects=params.max_redirects,
    )


def _with_query(url: str, query: Mapping[str, Any]) -> str:
    if not query:
        return url
    words = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in query.items()
    }
    try:
        parts = urlsplit(url)
    except ValueError:
        return url  # what is wrong with it is told by who sends it
    joined = "&".join(part for part in (parts.query, urlencode(words)) if part)
    return parts._replace(query=joined).geturl()


def _output(params: HttpParams, answer: OutboundAnswer, may_repeat: bool) -> dict[str, Any]:
    """Raises NodeFailed for an answer that is not what was expected."""
    text = _text(answer)
    wanted = params.expect.status
    is_expected = 200 <= answer.status < 300 if wanted is None else answer.status in wanted
    if not is_expected:
        is_transient = answer.status >= 500 or answer.status in (408, 425, 429)
        shown = " ".join(text.split())[:_SHOWN_BODY_CHARS]
        raise NodeFailed(
            f"the answer is {answer.status}: {shown}",
            code="http_status",
            is_retryable=is_transient and may_repeat,
        )
    value = None
    if params.expect.is_json or "json" in answer.headers.get("content-type", ""):
        try:
            value = orjson.loads(answer.body)
        except orjson.JSONDecodeError as error:
            if params.expect.is_json:
                raise NodeFailed(
                    f"the answer is not JSON: {error}", code="not_json", is_retryable=False
                ) from None
    return {
        "status": answer.status,
        "headers": answer.headers,
        "body": text,
        "json": value,
        "url": answer.url,
    }


def _text(answer: OutboundAnswer) -> str:
    try:
        return answer.body.decode(answer.charset, "replace")
    except LookupError:
        return answer.body.decode("utf-8", "replace")
