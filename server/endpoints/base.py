"""What every endpoint does the same way: read and validate the body, notice a hang-up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.types import Receive, Scope, Send

from server.asgi import header, read_json, until_disconnect
from server.gateway import Gateway
from server.journaling import journaled
from server.protocol.base import RequestBody, parse_body
from server.record import RequestRecord, record_of
from spot.engines.upstream_via import HEADER, read_via

_VIA = HEADER.lower().encode()

B = TypeVar("B", bound=RequestBody)


class JsonEndpoint(ABC, Generic[B]):
    """An ASGI endpoint for `POST` with a JSON body of type `body_type`.

    journal_name: what the journal calls the endpoint, if its answers can be journaled.
    accepts_yaml: whether the body may be YAML.
    """

    body_type: type[B]
    journal_name: str | None = None
    accepts_yaml = False

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        if via := header(scope, _VIA):
            record.via = read_via(via.decode("latin-1"), self.gateway.instance)
        limits = self.gateway.limits
        with self.gateway.admission.request():
            raw = await read_json(
                scope,
                receive,
                max_bytes=limits.max_body_bytes,
                max_depth=limits.max_json_depth,
                accepts_yaml=self.accepts_yaml,
            )
            body = parse_body(self.body_type, raw)

            async def work() -> None:
                await self.answer(body, raw, record, send)

            journal = self.gateway.journal
            if journal is None or self.journal_name is None:
                await until_disconnect(receive, work)
                return
            last_event_id = header(scope, b"last-event-id") if raw.get("stream") else None
            await until_disconnect(
                receive,
                partial(
                    journaled,
                    journal,
                    record,
                    self.journal_name,
                    raw,
                    None if last_event_id is None else last_event_id.decode("latin-1"),
                    work,
                ),
            )

    @abstractmethod
    async def answer(self, body: B, raw: dict[str, Any], record: RequestRecord, send: Send) -> None:
        """Answer one valid body. Cancelled when the client leaves."""
