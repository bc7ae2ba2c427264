"""The tables of runs, on a real Postgres."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from tests.postgres import data_folder
from workflows.stores import runs as store
from workflows.stores.database import Connection, Database
from workflows.stores.runs import EventChunk, NewRun, RunEnd, RunStore

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

ME, OTHER = 11, 22


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def database() -> AsyncIterator[Database]:
    with data_folder() as folder:
        async with Database(folder=folder, max_connections=4) as database:
            yield database


def new_run(run_id: str, created_s: float = 1000.0, **fields: Any) -> NewRun:
    given = {"tenant": "t", "name": "a\0b", "document": b"{}", "inputs": b"{}", **fields}
    return NewRun(id=run_id, created_s=created_s, **given)


def chunk(run_id: str, first_number: int, *names: str, path: str = "") -> EventChunk:
    events = orjson.dumps([[name, 1.0, None, {"nul": "\0"}] for name in names])
    return EventChunk(run_id=run_id, path=path, first_number=first_number, events=events)


def end(run_id: str, finished_s: float, num_bytes: int = 10) -> RunEnd:
    return RunEnd(
        run_id=run_id,
        name=None,
        status="completed",
        error=None,
        finished_s=finished_s,
        num_bytes=num_bytes,
    )


async def test_what_is_written_is_read_and_may_be_written_again(database: Database) -> None:
    runs = RunStore(database)

    async def work(connection: Connection) -> None:
        chunks = [chunk("r1", 1, "a", "b"), chunk("r1", 1, "x", path="n[0].")]
        for _ in range(2):
            await store.write(connection, ME, [new_run("r1")], chunks, [])
        # More has happened since it was written, and nobody knows whether it was.
        await store.write(connection, ME, [new_run("r1")], [chunk("r1", 1, "a", "b", "c")], [])
        await store.write(connection, ME, [], [chunk("r1", 4, "d")], [])

    await database.run(work)
    found = await runs.by_id("t", "r1")
    assert found is not None
    assert (found.name, found.status, found.owner, found.finished_s) == (
        "a\0b",
        "in_progress",
        ME,
        None,
    )
    assert [event[0] for event in found.events[""]] == ["a", "b", "c", "d"]
    assert found.events["n[0]."] == [["x", 1.0, None, {"nul": "\0"}]]
    assert await runs.by_id("u", "r1") is None
    await database.run(lambda connection: store.write(connection, ME, [], [], [end("r1", 2000.0)]))
    found = await runs.by_id("t", "r1")
    assert found is not None
    assert (found.status, found.finished_s, list(found.events)) == ("completed", 2000.0, [""])


async def test_a_key_is_one_runs_and_one_tenants(database: Database) -> None:
    runs = RunStore(database)
    keyed = {"key": "k", "request_hash": b"h"}
    assert await runs.add(ME, new_run("k1", **keyed))
    assert not await runs.add(OTHER, new_run("k2", **keyed))
    assert await runs.add(ME, new_run("k3", **keyed, tenant="u"))
    found = await runs.by_key("t", "k")
    assert found is not None
    assert (found.id, found.request_hash) == ("k1", b"h")
    assert await runs.by_key("t", "other") is None


async def test_runs_are_taken_over_only_from_servers_that_are_gone(database: Database) -> None:
    runs = RunStore(database)

    async def claimed(tenants: list[str]) -> list[str]:
        return sorted(await database.run(lambda one: store.claim(one, ME, tenants)))

    async def living(connection: Connection) -> None:
        async with store.owning(connection, OTHER):
            await store.write(connection, OTHER, [new_run("c1"), new_run("c2", tenant="v")], [], [])
            await store.write(connection, OTHER, [new_run("c3")], [], [end("c3", 2000.0)])
            assert await claimed(["t", "v"]) == []

    await database.run(living)
    assert await claimed(["t"]) == ["c1"]
    standings = await database.run(lambda one: store.standings(one, ["c1", "c2", "c3", "none"]))
    assert {name: (one.owner, one.has_ended) for name, one in standings.items()} == {
        "c1": (ME, False),
        "c2": (OTHER, False),
        "c3": (OTHER, True),
    }
    assert await claimed(["t", "v"]) == ["c2"]
    assert (await runs.by_id("v", "c2")) is not None


async def test_the_oldest_go_first_and_those_at_work_never(database: Database) -> None:
    runs = RunStore(database)

    async def work(connection: Connection) -> None:
        names = [f"p{number}" for number in range(6)]
        new = [new_run(name, created_s=float(n), tenant="p") for n, name in enumerate(names)]
        ends = [end(name, 5000.0 + n, 100) for n, name in enumerate(names[:5])]
        await store.write(connection, ME, new, [chunk(name, 1, "a") for name in names], ends)

    async def left() -> list[str]:
        return [run.id for run in await runs.page("p", limit=10, after=None)]

    async def prune(before_s: float, max_bytes: int) -> None:
        await database.run(lambda one: store.prune(one, before_s=before_s, max_bytes=max_bytes))

    await database.run(work)
    await prune(5001.0, 10**9)
    assert await left() == ["p5", "p4", "p3", "p2", "p1"]
    await prune(0.0, 250)
    assert await left() == ["p5", "p4", "p3"]
    await prune(9999.0, 10**9)
    assert await left() == ["p5"]
    assert await runs.by_id("p", "p4") is None


async def test_pages_of_a_list_follow_each_other(database: Database) -> None:
    runs = RunStore(database)
    new = [new_run(f"l{n}", created_s=float(n // 2), tenant="l") for n in range(7)]
    await database.run(lambda connection: store.write(connection, ME, new, [], []))
    seen: list[str] = []
    after = None
    while page := await runs.page("l", limit=3, after=after):
        seen += [run.id for run in page]
        after = seen[-1]
    assert seen == ["l6", "l5", "l4", "l3", "l2", "l1", "l0"]
    assert await runs.page("l", limit=3, after="none") == []
    assert await runs.page("m", limit=3, after="l4") == []
