"""What workflows' operators use beside the engine: stores, batches, the world outside."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from workflows.functions import Function
from workflows.outbound.addresses import AddressPolicy
from workflows.outbound.client import OutboundClient
from workflows.pooled_items import PooledItems
from workflows.pooling import PoolingModels
from workflows.stores.collections import CollectionStore
from workflows.stores.database import Database
from workflows.stores.templates import TemplateStore
from workflows.web_search import SearxngSearch, WebSearch


class WorkflowResources:
    """An async context manager; entering it starts no Postgres and connects to nothing.

    identities: what the database calls tenants whose names do not last. http_policy: where `http`
    nodes may go. functions: that `python` nodes may call. searxng_url: of the search engine, which
    is the server's operator's own and may be anywhere.
    """

    def __init__(
        self,
        models: PoolingModels,
        *,
        database: Database,
        identities: Mapping[str, str],
        http_policy: AddressPolicy,
        searxng_url: str | None,
        functions: Mapping[str, Function] | None = None,
    ) -> None:
        self.database = database

        def identity_of(tenant: str) -> str:
            return identities.get(tenant, tenant)

        self.store = CollectionStore(database, identity_of=identity_of)
        self.templates = TemplateStore(database, identity_of=identity_of)
        self.items = PooledItems(models)
        self.functions = functions or {}
        self.http = OutboundClient(http_policy)
        self._search_client = OutboundClient(AddressPolicy.everywhere())
        self.web_search: WebSearch | None = None
        if searxng_url is not None:
            self.web_search = SearxngSearch(searxng_url, self._search_client)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.database)
        await self._stack.enter_async_context(self.http)
        await self._stack.enter_async_context(self._search_client)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()
