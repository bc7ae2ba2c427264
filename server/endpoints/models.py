"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from starlette.types import Receive, Scope, Send

from server.asgi import send_json
from server.endpoints.workflow_chat import PREFIX
from server.endpoints.workflow_errors import as_http
from server.gateway import Gateway, model_not_found
from server.record import record_of
from workflows.errors import TemplateNotFound
from workflows.library import Library
from workflows.stores.errors import StoreError

logger = logging.getLogger(__name__)


class ModelList:
    """The served models, and one of them by id (which may hold slashes)."""

    def __init__(
        self,
        gateway: Gateway,
        further: Sequence[tuple[str, int]] = (),
        library: Library | None = None,
    ) -> None:
        """further: names and creation times of models beside the generative one. library: its
        workflow templates can be asked for as models too; those that are stored are listed."""
        self._gateway = gateway
        self._further = list(further)
        self._library = library

    def _cards(self) -> dict[str, dict[str, Any]]:
        model = self._gateway.model
        card = model.engine.card
        cards: dict[str, dict[str, Any]] = {}
        for name in model.names:
            cards[name] = {
                "id": name,
                "object": "model",
                "created": model.created,
                "owned_by": "shuntyard",
                "root": model.root or model.names[0],
                "parent": None,
                "max_model_len": card.max_model_len if card else None,
            }
        for name, created in self._further:
            cards[name] = _card(name, created)
        return cards

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cards = self._cards()
        model_id = scope.get("path_params", {}).get("model_id")
        tenant = record_of(scope).tenant
        if not model_id:
            for name, created in await self._stored(tenant):
                cards.setdefault(name, _card(name, created))
            await send_json(send, {"object": "list", "data": list(cards.values())})
            return
        card = cards.get(model_id) or cards.get(unquote(model_id))
        if card is None and self._library is not None and unquote(model_id).startswith(PREFIX):
            with as_http(), suppress(TemplateNotFound):
                name = unquote(model_id).removeprefix(PREFIX)
                found = await self._library.find(tenant, name)
                card = _card(f"{PREFIX}{name}", int(found.created_s or self._gateway.model.created))
        if card is None:
            raise model_not_found(model_id, list(cards))
        await send_json(send, card)

    async def _stored(self, tenant: str) -> list[tuple[str, int]]:
        """The tenant's own templates. The list of models neither starts nor needs a database."""
        store = None if self._library is None else self._library.store
        if store is None or not store.is_open:
            return []
        try:
            found = await store.newest(tenant)
        except StoreError as error:
            logger.warning("workflow templates are not among the models: %s", error.message)
            return []
        return [(f"{PREFIX}{one.name}", int(one.created_s or 0)) for one in found]


def _card(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "shuntyard"}
