"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from starlette.types import Receive, Scope, Send

from server.asgi import send_json
from server.gateway import Gateway, model_not_found


class ModelList:
    """The served models, and one of them by id (which may hold slashes)."""

    def __init__(self, gateway: Gateway, further: Sequence[tuple[str, int]] = ()) -> None:
        """further: names and creation times of models beside the generative one."""
        self._gateway = gateway
        self._further = list(further)

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
            cards[name] = {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "shuntyard",
            }
        return cards

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cards = self._cards()
        model_id = scope.get("path_params", {}).get("model_id")
        if not model_id:
            await send_json(send, {"object": "list", "data": list(cards.values())})
            return
        card = cards.get(model_id) or cards.get(unquote(model_id))
        if card is None:
            raise model_not_found(model_id, list(cards))
        await send_json(send, card)
