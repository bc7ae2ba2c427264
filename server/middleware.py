"""Pure ASGI middleware, outermost first: RequestContext, (CORS), ErrorBoundary, ApiKeys."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Iterable, Mapping

import anyio
from starlette._utils import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.asgi import ClientGone, hang_up, header, send_error
from server.errors import ErrorReply, Unauthorized, describe, internal_error
from server.logs import RequestLog
from server.metrics import Metrics
from server.record import SCOPE_KEY, Outcome, RequestRecord, record_of
from server.tracing import RequestTracer
from spot.errors import ShuntyardError

logger = logging.getLogger(__name__)

_SANE_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_SLASHES = re.compile(r"/{2,}")
CLIENT_CLOSED_REQUEST = 499


class RequestContext:
    """Gives each request an id, a record, a tidy path and headers; logs and counts its end."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        log: RequestLog,
        tracer: RequestTracer | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._log = log
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = _tidy(scope["path"])
        asked = header(scope, b"x-request-id")
        sane = asked is not None and _SANE_ID.fullmatch(asked)
        request_id = asked.decode("ascii") if asked and sane else f"req_{secrets.token_hex(12)}"
        now_s = anyio.current_time
        record = RequestRecord(request_id, scope["method"], scope["path"], now_s())
        scope[SCOPE_KEY] = record
        id_header = (b"x-request-id", request_id.encode("ascii"))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                elapsed_ms = int((now_s() - record.arrived_s) * 1000)
                headers = [
                    *message["headers"],
                    id_header,
                    (b"openai-processing-ms", str(elapsed_ms).encode()),
                ]
                if record.submitted_s is not None:
                    headers.append((b"x-shuntyard-migrations", b"%d" % record.num_migrations))
                if record.num_shared:
                    headers.append((b"x-shuntyard-shared", _shared(record)))
                message["headers"] = headers
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            end_s = now_s()
            self._metrics.observe(record, _endpoint(scope), end_s)
            self._log.write(record, end_s)
            if self._tracer is not None:
                self._tracer.record(scope, record, end_s)


def _shared(record: RequestRecord) -> bytes:
    """An integer of RFC 8941: how many choices were others' work; as a parameter, how many of them
    were kept."""
    text = b"%d" % record.num_shared
    return text + b";cache=%d" % record.num_from_cache if record.num_from_cache else text


def _tidy(path: str) -> str:
    """One slash between parts, none at the end: `//v1/models/` is `/v1/models`."""
    if "//" in path:
        path = _SLASHES.sub("/", path)
    return path.rstrip("/") or "/"


def _endpoint(scope: Scope) -> str:
    """The route's pattern, so that metrics have few labels."""
    route = scope.get("route")
    pattern = getattr(route, "path", None)
    return str(pattern) if pattern else "unknown"


class ErrorBoundary:
    """The one place that catches everything and answers with OpenAI's envelope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = record_of(scope)
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientGone:
            record.outcome, record.status = "aborted", record.status or CLIENT_CLOSED_REQUEST
            hang_up(scope)
        except ShuntyardError as error:
            reply = describe(error)
            self._note(record, reply)
            if not started:
                await send_error(send, reply)
        except Exception as error:
            logger.exception("request %s failed", record.request_id)
            record.outcome, record.error = "failed", type(error).__name__
            if not started:
                await send_error(send, internal_error())

    def _note(self, record: RequestRecord, reply: ErrorReply) -> None:
        record.error = reply.message[:500]
        outcomes: dict[int, Outcome] = {429: "rejected", 503: "rejected"}
        fallback: Outcome = "client_error" if reply.status < 500 else "failed"
        record.outcome = outcomes.get(reply.status, fallback)


class ApiKeys:
    """Lets only known keys pass. Everything is guarded but the open paths and OPTIONS.

    keys: tenant names by key. Without keys everyone passes, as tenant "".
    open_prefix: paths that begin so have a guard of their own.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Mapping[str, str],
        open_paths: Iterable[str],
        open_prefix: str | None = None,
    ) -> None:
        self._app = app
        self._open_prefix = open_prefix
        self._hashes = [(_digest(key.encode()), tenant) for key, tenant in keys.items()]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._hashes and not self._is_open(scope):
            record_of(scope).tenant = self._tenant(scope)
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = get_route_path(scope)
        if self._open_prefix is not None and path.startswith(self._open_prefix):
            return True
        return scope["method"] == "OPTIONS" or path in self._open_paths

    def _tenant(self, scope: Scope) -> str:
        given = header(scope, b"authorization")
        scheme, _, token = (given or b"").partition(b" ")
        if given is None:
            token = header(scope, b"api-key") or b""
        elif scheme.lower() != b"bearer":
            raise Unauthorized("The Authorization header must be 'Bearer YOUR_API_KEY'.")
        if not token.strip():
            raise Unauthorized(
                "You did not provide an API key. Send it in the header "
                "'Authorization: Bearer YOUR_API_KEY'."
            )
        digest = _digest(token.strip())
        found = None
        for known, tenant in self._hashes:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise Unauthorized("Incorrect API key provided.")
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
