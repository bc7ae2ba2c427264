"""What operators and load balancers ask: health, readiness, load, version, metrics."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from server.asgi import send_bytes, send_json
from server.gateway import Gateway
from spot.errors import EngineUnavailable


class Health:
    """`GET /health`: 200 with an empty body while the engine is alive, 503 while it is dead,
    silent or not started yet (scripts wait for this, as they do with vLLM). Waits for nothing."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = self._gateway.model.engine.status
        if status.state not in ("ready", "draining"):
            raise EngineUnavailable(f"The engine is {status.state}.")
        await send_bytes(send, 200, b"")


class Readiness:
    """`GET /ready`: 200 when requests would be served now, else 503 and why."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._gateway.admission.closed:
            raise EngineUnavailable("The server is shutting down.")
        for engine in (self._gateway.model.engine, *self._gateway.further_engines):
            status = engine.status
            if status.state != "ready":
                raise EngineUnavailable(f"An engine is {status.state}: {status.detail}")
        await send_json(send, {"status": "ready", "model": self._gateway.model.names[0]})


class Load:
    """`GET /load`: requests being answered, streams included."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"server_load": self._gateway.admission.num_requests})


class Version:
    """`GET /version`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        card = gateway.model.engine.card
        answer = {
            "version": gateway.version,
            "instance": gateway.instance,
            "upstreams": [] if card is None else card.instances,
        }
        await send_json(send, answer)


class MetricsPage:
    """`GET /metrics`: Prometheus text."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = self._gateway.model.engine
        body = self._gateway.metrics.render(
            engine.stats, engine.status, self._gateway.admission.num_requests, engine.card
        )
        header = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        await send_bytes(send, 200, body, headers=[header])
