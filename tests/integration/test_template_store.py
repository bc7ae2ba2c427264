"""Workflow templates of tenants on a real Postgres."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from tests.postgres import data_folder
from workflows.library import Library
from workflows.stores import templates
from workflows.stores.database import Database
from workflows.stores.errors import StoreFull
from workflows.stores.templates import TemplateStore

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def store() -> AsyncIterator[TemplateStore]:
    with data_folder() as folder:
        async with Database(folder=folder, max_connections=4) as database:
            yield TemplateStore(database, identity_of=lambda tenant: f"id of {tenant}")


async def test_versions_count_on_and_are_never_used_again(store: TemplateStore) -> None:
    first = await store.put("a", "x", {"nodes": [], "name": "one\0"})
    assert (first.version, first.document) == (1, {"nodes": [], "name": "one\0"})
    assert await store.put("a", "x", {"nodes": [], "name": "one\0"}) == first
    second = await store.put("a", "x", {"nodes": [1]})
    assert second.version == 2
    assert await store.find("a", "x", 1) == first
    assert await store.find("a", "x", None) == second
    assert await store.delete("a", "x")
    assert not await store.delete("a", "x")
    assert not await store.delete("a", "x\0")
    assert await store.find("a", "x\0", None) is None
    assert [await store.find("a", "x", version) for version in (None, 1, 2, 3)] == [None] * 4
    assert (await store.put("a", "x", {"nodes": [1]})).version == 3


async def test_tenants_see_their_own(store: TemplateStore) -> None:
    mine = await store.put("b", "rag", {"mine": 1})
    await store.put("c", "rag", {"theirs": 1})
    assert await store.find("b", "rag", None) == mine
    assert [one.document for one in await store.newest("b")] == [{"mine": 1}]
    assert await store.delete("c", "rag")
    library = Library(store)
    assert (await library.find("b", "rag")).version == 1
    assert (await library.find("b", "rag@0")).document["name"] == "rag"
    assert (await library.find("c", "rag")).version == 0
    heads = {one.name: one.version for one in await library.heads("b")}
    assert (heads["rag"], heads["tool-agent"]) == (1, 0)


async def test_writers_at_once_get_numbers_of_their_own(store: TemplateStore) -> None:
    versions: list[int] = []

    async def put(number: int) -> None:
        versions.append((await store.put("d", "x", {"number": number})).version)

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(put, number)
    assert sorted(versions) == list(range(1, 21))


async def test_a_tenant_has_so_many_at_most(
    store: TemplateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "MAX_TEMPLATES", 2)
    monkeypatch.setattr(templates, "MAX_VERSIONS", 2)
    for number, name in enumerate(("x", "x", "y")):
        await store.put("e", name, {"number": number})
    with pytest.raises(StoreFull, match="names"):
        await store.put("e", "z", {})
    with pytest.raises(StoreFull, match="versions"):
        await store.put("e", "x", {"number": 9})
