"""`/v1/collections`: what workflows have ingested, and its end."""

from __future__ import annotations

from contextlib import suppress

from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from server.app import KnownRoute
from server.asgi import query, send_json
from server.endpoints.workflow_errors import as_http
from server.protocol.collections import (
    CollectionCard,
    CollectionList,
    DeletedCollection,
    DeletedCollections,
    DeletedDocuments,
)
from server.record import record_of
from spot.errors import InvalidRequest
from workflows.stores.collections import CollectionInfo, CollectionStore
from workflows.stores.errors import CollectionNotFound


class Collections:
    """`GET /v1/collections`, and `DELETE /v1/collections?all=true`."""

    def __init__(self, store: CollectionStore) -> None:
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = record_of(scope).tenant
        if scope["method"] == "DELETE":
            await self._delete_all(tenant, scope, send)
            return
        with as_http():
            found = await self._store.collections(tenant)
        cards = CollectionList(data=[_card(one) for one in found])
        await send_json(send, cards.model_dump())

    async def _delete_all(self, tenant: str, scope: Scope, send: Send) -> None:
        if query(scope).get("all") != ["true"]:
            raise InvalidRequest(
                "This deletes every collection; say so with ?all=true, or name one: "
                "DELETE /v1/collections/{name}.",
                param="all",
            )
        deleted = []
        with as_http():
            for one in await self._store.collections(tenant):
                with suppress(CollectionNotFound):  # someone else was faster
                    await self._store.delete(tenant, one.name)
                    deleted.append(DeletedCollection(name=one.name))
        await send_json(send, DeletedCollections(data=deleted).model_dump())


class OneCollection:
    """`GET` and `DELETE /v1/collections/{name}`."""

    def __init__(self, store: CollectionStore) -> None:
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant, name = record_of(scope).tenant, str(scope["path_params"]["name"])
        with as_http():
            if scope["method"] == "DELETE":
                await self._store.delete(tenant, name)
                answer = DeletedCollection(name=name).model_dump()
            else:
                answer = _card(await self._store.collection(tenant, name)).model_dump()
        await send_json(send, answer)


class CollectionDocuments:
    """`DELETE /v1/collections/{name}/documents?id=A&id=B`."""

    def __init__(self, store: CollectionStore) -> None:
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant, name = record_of(scope).tenant, str(scope["path_params"]["name"])
        ids = query(scope).get("id", [])
        if not any(ids) or any("\0" in one for one in ids):
            raise InvalidRequest("Name the documents to delete: ?id=A&id=B.", param="id")
        with as_http():
            result = await self._store.delete_documents(tenant, name, ids)
        answer = DeletedDocuments(name=name, epoch=result.epoch, deleted=result.changed_ids)
        await send_json(send, answer.model_dump())


def collection_routes(store: CollectionStore) -> list[BaseRoute]:
    """All routes of this module."""
    routes: list[BaseRoute] = []
    for prefix in ("/v1/collections", "/collections"):
        one = f"{prefix}/{{name}}"
        routes += [
            KnownRoute(prefix, endpoint=Collections(store), methods=["GET", "DELETE"]),
            KnownRoute(one, endpoint=OneCollection(store), methods=["GET", "DELETE"]),
            KnownRoute(f"{one}/documents", endpoint=CollectionDocuments(store), methods=["DELETE"]),
        ]
    return routes


def _card(info: CollectionInfo) -> CollectionCard:
    return CollectionCard(
        name=info.name,
        dimension=info.space.dimension,
        metric=info.metric,
        embedder=info.space.embedder,
        embedder_revision=info.space.revision,
        epoch=info.epoch,
        num_documents=info.num_documents,
        num_chunks=info.num_chunks,
        created_at=round(info.created_s, 3),
        updated_at=round(info.updated_s, 3),
    )
