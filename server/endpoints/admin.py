"""`/admin`: the fleet of pipelines, for operators. A key of its own; without one, loopback only."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import anyio
import orjson
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from server.app import KnownRoute, get, post
from server.asgi import header, read_json, send_json, until_disconnect
from server.errors import BadBody, Forbidden, RouteNotFound, Unauthorized
from server.gateway import unix_s
from server.protocol.admin import DrainOrder, NewPipeline, PipelineChanges
from server.protocol.base import parse_body
from server.sse import KEEP_ALIVE, SSE_HEADERS
from spot.errors import InvalidRequest
from spot.fleet import Fleet, PipelineSpec
from spot.fleet_events import FleetEvent

_MAX_BODY_BYTES = 64 * 1024
_KEEP_ALIVE_S = 15.0
_EVENT_ID = re.compile(rb"[0-9]{1,20}")

# Makes the engine of a pipeline to add; raises InvalidRequest or a ShuntyardError if it cannot.
PipelineFactory = Callable[["NewPipeline"], Awaitable[PipelineSpec]]


class AdminGate:
    """Lets operators in. Raises Unauthorized or Forbidden for everybody else.

    key: what they must send as a bearer token. Without one, only requests from this machine pass
    that no proxy and no web page made.
    """

    def __init__(self, key: str | None) -> None:
        self._digest = None if key is None else hashlib.sha256(key.encode()).digest()

    def check(self, scope: Scope) -> None:
        if self._digest is None:
            self._check_local(scope)
            return
        given = header(scope, b"authorization") or b""
        scheme, _, token = given.partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        if scheme.lower() != b"bearer" or not hmac.compare_digest(digest, self._digest):
            raise Unauthorized(
                "The admin API needs the admin key: 'Authorization: Bearer …' "
                "(SHUNTYARD_ADMIN_KEY)."
            )

    def _check_local(self, scope: Scope) -> None:
        client = scope.get("client")
        local = client is None or _is_loopback(client[0])
        host = urlsplit(f"//{(header(scope, b'host') or b'localhost').decode('latin-1')}").hostname
        # A name that is not of this machine: a web page's, which it has led to this address.
        local = local and (host == "localhost" or _is_loopback(host or ""))
        foreign = (
            b"origin", b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host",
            b"x-forwarded-proto", b"x-real-ip",
        )  # fmt: skip
        if not local or any(header(scope, name) is not None for name in foreign):
            raise Forbidden(
                "Without an admin key the admin API is for this machine only; start the server "
                "with --admin-key (SHUNTYARD_ADMIN_KEY) to use it from elsewhere."
            )


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # what a proxy claims
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


class PipelineList:
    """`GET /admin/pipelines` lists them; `POST` adds one."""

    def __init__(self, fleet: Fleet, gate: AdminGate, new_pipeline: PipelineFactory) -> None:
        self._fleet = fleet
        self._gate = gate
        self._new_pipeline = new_pipeline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate.check(scope)
        if scope["method"] != "POST":
            await send_json(send, self._fleet.describe())
            return
        body = parse_body(NewPipeline, await _json(scope, receive))
        if body.id in self._fleet.state.pipelines:
            raise InvalidRequest(f"There is a pipeline {body.id} already.", param="id")
        spec = await self._new_pipeline(body)
        while spec.id in self._fleet.state.pipelines:  # a number that somebody has used as a name
            spec = await self._new_pipeline(body)
        await self._fleet.add(spec)
        await send_json(send, _described(self._fleet, spec.id), status=201)


class OnePipeline:
    """`GET`, `PATCH` (weight) and `DELETE` (stop it now) of `/admin/pipelines/{id}`."""

    def __init__(self, fleet: Fleet, gate: AdminGate) -> None:
        self._fleet = fleet
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate.check(scope)
        pipeline_id = _known_id(self._fleet, scope)
        if scope["method"] not in ("GET", "HEAD"):
            _check_living(self._fleet, pipeline_id)
        if scope["method"] == "PATCH":
            changes = parse_body(PipelineChanges, await _json(scope, receive))
            self._fleet.set_weight(pipeline_id, changes.weight)
        described = _described(self._fleet, pipeline_id)
        if scope["method"] == "DELETE":
            self._fleet.remove_pipeline(pipeline_id)
            described["state"] = "gone"
        await send_json(send, described)


class DrainPipeline:
    """`POST /admin/pipelines/{id}/drain`: no new work; what runs finishes, or moves in time."""

    def __init__(self, fleet: Fleet, gate: AdminGate) -> None:
        self._fleet = fleet
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate.check(scope)
        pipeline_id = _known_id(self._fleet, scope)
        _check_living(self._fleet, pipeline_id)
        order = parse_body(DrainOrder, await _json(scope, receive, may_be_empty=True))
        described = _described(self._fleet, pipeline_id)
        self._fleet.drain_pipeline(pipeline_id, deadline_s=order.deadline_s, cause=order.cause)
        if pipeline_id in self._fleet.state.pipelines:
            described = _described(self._fleet, pipeline_id)
        await send_json(send, described, status=202)


class AdminEvents:
    """`GET /admin/events`: what happens to pipelines, as server-sent events with ids.

    A client that comes back with `Last-Event-ID` gets what it missed, as far as it is still known;
    without one the stream starts with the events of the past.
    """

    def __init__(self, fleet: Fleet, gate: AdminGate) -> None:
        self._fleet = fleet
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate.check(scope)
        number = _event_number(header(scope, b"last-event-id") or b"0")

        async def work() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            await self._stream(number, send)

        await until_disconnect(receive, work)

    async def _stream(self, number: int, send: Send) -> None:
        while True:
            data = KEEP_ALIVE
            with anyio.move_on_after(_KEEP_ALIVE_S):
                events = await self._fleet.events.after(number)
                number = events[-1].number
                data = b"".join([_frame(event) for event in events])
            await send({"type": "http.response.body", "body": data, "more_body": True})


def _event_number(event_id: bytes) -> int:
    """Raises InvalidRequest for what is no id of an event: those are plain numbers."""
    if not _EVENT_ID.fullmatch(event_id):
        raise InvalidRequest(
            f"Last-Event-ID '{event_id.decode('latin-1')[:80]}' is not the id of an event: those "
            "are whole numbers.",
            param="Last-Event-ID",
        )
    return int(event_id)


def _frame(event: FleetEvent) -> bytes:
    age_s = anyio.current_time() - event.at_s
    described = {
        "pipeline": event.pipeline_id,
        "detail": event.detail,
        "created": unix_s() - round(age_s),
    }
    kind, data = event.kind.encode(), orjson.dumps(described)
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (event.number, kind, data)


async def _json(scope: Scope, receive: Receive, *, may_be_empty: bool = False) -> object:
    if may_be_empty and header(scope, b"content-length") in (None, b"0"):
        return {}
    body = await read_json(scope, receive, max_bytes=_MAX_BODY_BYTES, max_depth=16)
    if not isinstance(body, dict):
        raise BadBody("The request body must be a JSON object.")
    return body


def _known_id(fleet: Fleet, scope: Scope) -> str:
    pipeline_id = str(scope["path_params"]["pipeline_id"])
    if pipeline_id not in fleet.state.pipelines:
        known = ", ".join(fleet.state.pipelines) or "none"
        raise RouteNotFound(f"There is no pipeline {pipeline_id[:64]}; there is: {known}.")
    return pipeline_id


def _check_living(fleet: Fleet, pipeline_id: str) -> None:
    if fleet.state.pipelines[pipeline_id].state == "gone":
        raise RouteNotFound(f"The pipeline {pipeline_id} is gone.")


def _described(fleet: Fleet, pipeline_id: str) -> dict[str, object]:
    return next(item for item in fleet.describe() if item["id"] == pipeline_id)


def admin_routes(fleet: Fleet, gate: AdminGate, new_pipeline: PipelineFactory) -> list[BaseRoute]:
    """The routes under `/admin`."""
    one = "/admin/pipelines/{pipeline_id}"
    return [
        KnownRoute(
            "/admin/pipelines",
            endpoint=PipelineList(fleet, gate, new_pipeline),
            methods=["GET", "POST"],
        ),
        KnownRoute(one, endpoint=OnePipeline(fleet, gate), methods=["GET", "PATCH", "DELETE"]),
        post(f"{one}/drain", DrainPipeline(fleet, gate)),
        get("/admin/events", AdminEvents(fleet, gate)),
    ]
