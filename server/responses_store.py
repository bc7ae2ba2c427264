"""Responses that can be retrieved and continued: in memory, bounded, apart for each tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

MAX_RESPONSES = 10_000
MAX_BYTES = 256 * 1024 * 1024

# Python's own cost of an entry and of an item, roughly.
_ENTRY_BYTES = 1024
_ITEM_BYTES = 128


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One item as JSON."""

    id: str
    json: bytes

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> StoredItem:
        return cls(item["id"], orjson.dumps(item))


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response. It needs no other one: what came before it is part of its context.

    json: the whole response object.
    context: all items that the model was given, those of earlier responses included.
    output: what it answered.
    """

    id: str
    json: bytes
    context: tuple[StoredItem, ...]
    output: tuple[StoredItem, ...]

    @property
    def num_bytes(self) -> int:
        """What it holds. Items that responses share are counted for each of them."""
        items = (*self.context, *self.output)
        held = len(self.json) + sum(len(item.json) + _ITEM_BYTES for item in items)
        return held + _ENTRY_BYTES


@dataclass(slots=True)
class _Shelf:
    """What one tenant has stored, the one that was used longest ago first."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    items: dict[str, StoredItem] = field(default_factory=dict)
    num_bytes: int = 0

    def put(self, response: StoredResponse) -> None:
        self.responses[response.id] = response
        self.items.update((item.id, item) for item in response.output)
        self.num_bytes += response.num_bytes

    def take(self, response_id: str) -> StoredResponse:
        response = self.responses.pop(response_id)
        for item in response.output:
            self.items.pop(item.id, None)
        self.num_bytes -= response.num_bytes
        return response


class ResponsesStore:
    """Keeps responses until there is no room.

    Room is made by dropping what was used longest ago, of the tenant that holds most: nobody can
    push out what belongs to others who hold less.
    """

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}
        self.num_responses = 0
        self.num_bytes = 0

    def put(self, tenant: str, response: StoredResponse) -> None:
        """Store a response. One that is larger than the whole room is not kept."""
        if response.num_bytes > self._max_bytes:
            return
        self._shelves.setdefault(tenant, _Shelf()).put(response)
        self.num_responses += 1
        self.num_bytes += response.num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop_oldest(max(self._shelves, key=lambda name: self._shelves[name].num_bytes))
        while self.num_responses > self._max_responses:
            largest = max(self._shelves, key=lambda name: len(self._shelves[name].responses))
            self._drop_oldest(largest)

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        shelf = self._shelves.get(tenant)
        if shelf is None or response_id not in shelf.responses:
            return None
        shelf.responses.move_to_end(response_id)
        return shelf.responses[response_id]

    def item(self, tenant: str, item_id: str) -> StoredItem | None:
        """An item that a stored response has answered."""
        shelf = self._shelves.get(tenant)
        return None if shelf is None else shelf.items.get(item_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was such a response."""
        shelf = self._shelves.get(tenant)
        if shelf is None or response_id not in shelf.responses:
            return False
        self._drop(tenant, response_id)
        return True

    def _drop_oldest(self, tenant: str) -> None:
        self._drop(tenant, next(iter(self._shelves[tenant].responses)))

    def _drop(self, tenant: str, response_id: str) -> None:
        shelf = self._shelves[tenant]
        response = shelf.take(response_id)
        self.num_responses -= 1
        self.num_bytes -= response.num_bytes
        if not shelf.responses:
            del self._shelves[tenant]


def joined(items: Sequence[StoredItem]) -> bytes:
    """The items as one JSON array."""
    return b"[" + b",".join(item.json for item in items) + b"]"
