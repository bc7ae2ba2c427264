"""What `/v1/collections` answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from server.protocol.responses import ResponseBody


class CollectionCard(ResponseBody):
    """A collection. `epoch` grows with every change; times are unix seconds."""

    object: Literal["collection"] = "collection"
    name: str
    dimension: int = Field(ge=1)
    metric: Literal["cosine", "l2", "ip"]
    embedder: str
    embedder_revision: str
    epoch: int = Field(ge=0)
    num_documents: int = Field(ge=0)
    num_chunks: int = Field(ge=0)
    created_at: float
    updated_at: float


class CollectionList(ResponseBody):
    object: Literal["list"] = "list"
    data: list[CollectionCard]


class DeletedCollection(ResponseBody):
    object: Literal["collection"] = "collection"
    name: str
    deleted: Literal[True] = True


class DeletedCollections(ResponseBody):
    object: Literal["list"] = "list"
    data: list[DeletedCollection]


class DeletedDocuments(ResponseBody):
    """Those that were there, and the collection's epoch without them."""

    object: Literal["collection.documents"] = "collection.documents"
    name: str
    epoch: int = Field(ge=0)
    deleted: list[str]
