"""What an error looks like on the wire: status, headers and OpenAI's envelope.

HttpError (a ShuntyardError that only HTTP knows)
├── BadBody             400   not JSON, not an object, not decodable
├── BadHttp             400   not HTTP
├── Unauthorized        401
├── Forbidden           403
├── ModelNotFound       404
├── ResponseNotFound    404
├── RouteNotFound       404
├── MethodNotAllowed    405
├── Conflict            409   what is asked for cannot be continued
├── BadWorkflow         400   a workflow that cannot run; every problem in `details`
├── WorkflowFailed      400, or as its code says   a run that a chat waits for failed
├── RunMissing          404
├── TemplateMissing     404
├── StoreLimit          400   a tenant has as many of something as it may have
├── RunKeyReused        409   an idempotency key that stands for another request
├── RunNotHere          409   another server works on the run
├── CollectionMissing   404
├── StoreDown           503   Postgres, which keeps collections and runs, is not available
├── BodyTooLarge        413
├── WrongContentType    415
├── RequestTimeout      408   the request did not arrive in time
└── ShuttingDown        503

`describe` maps every ShuntyardError, these and those of `spot.errors`; a test proves that each
class is mapped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import orjson

from spot.errors import (
    ContextLengthExceeded,
    EngineError,
    EngineFailed,
    EngineMisconfigured,
    EngineUnavailable,
    GenerationFailed,
    InvalidRequest,
    NotSupported,
    Overloaded,
    ShuntyardError,
)

MAX_MESSAGE_CHARS = 4000
INTERNAL_MESSAGE = "The server had an error while processing your request."


class HttpError(ShuntyardError):
    """An error that exists only at the edge."""


class BadBody(HttpError):
    """The body is not JSON, or not a JSON object."""


class BadHttp(HttpError):
    """The request is not HTTP. The connection is closed."""


class Unauthorized(HttpError):
    """No key, or one that is not known."""


class Forbidden(HttpError):
    """The caller is known well enough, and may not do this."""


class ModelNotFound(HttpError):
    """The request names a model that is not served."""


class ResponseNotFound(HttpError):
    """No stored response has this id, or it is another tenant's."""


class RouteNotFound(HttpError):
    """No endpoint has this path."""


class MethodNotAllowed(HttpError):
    """The path exists, for other methods. `allow` lists them, comma separated."""

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class Conflict(HttpError):
    """The answer that the request wants to go on with is not there, or cannot go on."""


class BadWorkflow(HttpError):
    """A workflow or its inputs are wrong. details: each problem, with the path of what is wrong."""

    def __init__(self, message: str, *, details: list[dict[str, str]]) -> None:
        super().__init__(message)
        self.details = details


class WorkflowFailed(HttpError):
    """The run behind a chat failed. code: the run's; where it is one of the server's own, the
    status is that of the error that has it."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class RunMissing(HttpError):
    """No run of a workflow has this id, or it is another tenant's."""


class TemplateMissing(HttpError):
    """No workflow template has this name, or it is another tenant's."""


class StoreLimit(HttpError):
    """The tenant has as many of something as it may have."""


class RunKeyReused(HttpError):
    """The `Idempotency-Key` stands for a run of another request."""


class RunNotHere(HttpError):
    """Another server of the same database works on the run."""


class CollectionMissing(HttpError):
    """No collection has this name, or it is another tenant's."""


class StoreDown(HttpError):
    """Postgres is not available. Why is for the log: it may name files and addresses."""


class BodyTooLarge(HttpError):
    """The body is over the limit. The connection is closed: the rest is not read."""


class WrongContentType(HttpError):
    """The content type is not JSON."""


class RequestTimeout(HttpError):
    """The body did not arrive in time."""


class ShuttingDown(HttpError):
    """The server takes no new work."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """One error, ready for the wire."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    details: list[dict[str, str]] | None = None

    def body(self) -> bytes:
        """OpenAI's envelope. Lone surrogates are replaced, so that it can always be encoded."""
        error: dict[str, Any] = {
            "message": _encodable(self.message)[:MAX_MESSAGE_CHARS],
            "type": self.type,
            "param": None if self.param is None else _encodable(self.param)[:256],
            "code": self.code,
        }
        if self.details is not None:
            error["details"] = self.details
        return orjson.dumps({"error": error})


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


_INVALID = "invalid_request_error"
_SERVER = "server_error"

# The most specific class wins: `describe` walks a class's ancestors in order.
_KINDS: dict[type[ShuntyardError], tuple[int, str, str | None]] = {
    BadBody: (400, _INVALID, "invalid_json"),
    BadHttp: (400, _INVALID, "invalid_http"),
    Unauthorized: (401, "authentication_error", "invalid_api_key"),
    Forbidden: (403, "permission_error", "forbidden"),
    ModelNotFound: (404, "not_found_error", "model_not_found"),
    ResponseNotFound: (404, "not_found_error", "response_not_found"),
    RouteNotFound: (404, "not_found_error", "route_not_found"),
    MethodNotAllowed: (405, _INVALID, "method_not_allowed"),
    Conflict: (409, _INVALID, "cannot_continue"),
    BadWorkflow: (400, _INVALID, "invalid_workflow"),
    WorkflowFailed: (400, _INVALID, "workflow_failed"),
    RunMissing: (404, "not_found_error", "run_not_found"),
    TemplateMissing: (404, "not_found_error", "template_not_found"),
    StoreLimit: (400, _INVALID, "limit_reached"),
    RunKeyReused: (409, _INVALID, "idempotency_key_reused"),
    RunNotHere: (409, _INVALID, "run_elsewhere"),
    CollectionMissing: (404, "not_found_error", "collection_not_found"),
    StoreDown: (503, _SERVER, "store_unavailable"),
    BodyTooLarge: (413, _INVALID, "body_too_large"),
    WrongContentType: (415, _INVALID, "unsupported_media_type"),
    RequestTimeout: (408, _INVALID, "request_timeout"),
    ShuttingDown: (503, _SERVER, "shutting_down"),
    InvalidRequest: (400, _INVALID, None),
    ContextLengthExceeded: (400, _INVALID, None),
    NotSupported: (400, _INVALID, None),
    Overloaded: (429, "rate_limit_error", "overloaded"),
    EngineUnavailable: (503, _SERVER, "engine_unavailable"),
    EngineMisconfigured: (500, _SERVER, "engine_failed"),
    EngineFailed: (500, _SERVER, "engine_failed"),
    GenerationFailed: (500, _SERVER, "internal_error"),
    EngineError: (500, _SERVER, "engine_error"),
    HttpError: (500, _SERVER, "internal_error"),
    ShuntyardError: (500, _SERVER, "internal_error"),
}

_OURS = {
    code: (status, kind)
    for status, kind, code in _KINDS.values()
    if code is not None and (status >= 500 or status == 429)
}


def describe(error: ShuntyardError) -> ErrorReply:
    """The reply for an error of ours."""
    status, kind, code = next(_KINDS[cls] for cls in type(error).__mro__ if cls in _KINDS)
    param = None
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, InvalidRequest):
        param, code = error.param, error.code
    elif isinstance(error, Overloaded):
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    elif isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    elif isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allow.encode("latin-1")))
    elif isinstance(error, ModelNotFound):
        param = "model"
    elif isinstance(error, WorkflowFailed):
        code = error.code
        status, kind = _OURS.get(code, (status, kind))
    elif isinstance(error, (BadHttp, BodyTooLarge, RequestTimeout)):
        headers.append((b"connection", b"close"))
    elif isinstance(error, (EngineUnavailable, StoreDown, ShuttingDown)):
        headers.append((b"retry-after", b"5"))
    details = error.details if isinstance(error, BadWorkflow) else None
    if details:
        param = details[0]["path"]
    return ErrorReply(status, kind, error.message, param, code, headers, details)


def internal_error() -> ErrorReply:
    """The reply for a bug of ours: fixed words, nothing of the inside."""
    return ErrorReply(500, _SERVER, INTERNAL_MESSAGE, None, "internal_error")
