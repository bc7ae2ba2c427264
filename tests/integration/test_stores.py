"""Stores on a real Postgres with pgvector."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import psutil
import psycopg
import pytest
from psycopg.sql import SQL, Identifier

from tests.integration.ingest_forever import CHUNKS_IN_DOCUMENT, DOCUMENTS_IN_BATCH
from tests.postgres import data_folder, is_alive
from workflows.stores import embedded
from workflows.stores.collections import CollectionStore, NewDocument, VectorSpace
from workflows.stores.database import Connection, Database
from workflows.stores.errors import (
    CollectionMismatch,
    CollectionNotFound,
    InvalidFilter,
    StoreUnavailable,
    StoreUnusable,
)
from workflows.stores.migrate import Migration, bundled_migrations, migrate

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

_AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another user")
SPACE = VectorSpace(embedder="tiny", revision="1", dimension=3)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def database() -> AsyncIterator[Database]:
    with data_folder() as folder:
        async with Database(folder=folder, max_connections=4) as database:
            yield database


@pytest.fixture(scope="module")
def store(database: Database) -> CollectionStore:
    return CollectionStore(database)


@pytest.fixture
def tenant(request: pytest.FixtureRequest) -> str:
    """A tenant that only this test has."""
    return str(request.node.name)


def document(
    name: str, *vectors: tuple[float, float, float], text: str = "", **metadata: Any
) -> NewDocument:
    rows = vectors or ((1.0, 0.0, 0.0),)
    return NewDocument(
        id=name,
        content_hash=repr((text, rows, metadata)).encode(),
        metadata=metadata,
        chunks=[f"{text or name} {index}" for index in range(len(rows))],
        vectors=np.array(rows, np.float32),
    )


def towards(*values: float) -> Any:
    return np.array(values, np.float32)


async def found_ids(store: CollectionStore, tenant: str, **filters: Any) -> set[str]:
    found = await store.search(
        tenant, "c", towards(1, 1, 1), space=SPACE, top_k=100, filters=filters
    )
    return {one.document_id for one in found.chunks}


async def until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    with anyio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.02)


async def test_the_nearest_come_first_with_their_score(store: CollectionStore, tenant: str) -> None:
    documents = [
        document("x", (1, 0, 0), text="east", lang="en"),
        document("y", (0, 2, 0), (1, 1, 0), text="north"),
        document("z", (0, 0, 1)),
    ]
    assert (await store.ingest(tenant, "c", SPACE, documents)).epoch == 1
    found = await store.search(tenant, "c", towards(0, 1, 0), space=SPACE, top_k=2, filters={})
    assert found.epoch == 1
    first, second = found.chunks
    assert (first.id, first.document_id, first.chunk_index) == ("y#0", "y", 0)
    assert (first.text, first.score) == ("north 0", pytest.approx(1.0))
    assert (second.id, second.score) == ("y#1", pytest.approx(0.7071, abs=1e-4))


@pytest.mark.parametrize(("metric", "score"), [("cosine", 1.0), ("ip", 6.0), ("l2", -2.0)])
async def test_each_metric_has_its_score(
    store: CollectionStore, tenant: str, metric: Any, score: float
) -> None:
    await store.ingest(tenant, "c", SPACE, [document("a", (3, 0, 0))], metric=metric)
    found = await store.search(
        tenant,
        "c",
        towards(2, 0, 0) if metric != "l2" else towards(1, 0, 0),
        space=SPACE,
        top_k=1,
        filters={},
    )
    assert found.chunks[0].score == pytest.approx(score)


async def test_equally_near_chunks_are_in_a_fixed_order(
    store: CollectionStore, tenant: str
) -> None:
    names = ["d", "b", "a", "c"]
    await store.ingest(tenant, "c", SPACE, [document(name) for name in names])
    found = await store.search(tenant, "c", towards(1, 0, 0), space=SPACE, top_k=9, filters={})
    assert [one.document_id for one in found.chunks] == sorted(names)


async def test_the_same_documents_again_change_nothing(store: CollectionStore, tenant: str) -> None:
    documents = [document("a"), document("b")]
    first = await store.ingest(tenant, "c", SPACE, documents)
    again = await store.ingest(tenant, "c", SPACE, documents)
    assert (first.epoch, first.changed_ids) == (1, ["a", "b"])
    assert (again.epoch, again.changed_ids) == (1, [])
    assert await store.hashes(tenant, "c", ["a", "x"]) == {"a": documents[0].content_hash}


async def test_a_changed_document_is_replaced(store: CollectionStore, tenant: str) -> None:
    await store.ingest(tenant, "c", SPACE, [document("a", (1, 0, 0), (0, 1, 0)), document("b")])
    changed = await store.ingest(tenant, "c", SPACE, [document("a", text="new"), document("b")])
    assert (changed.epoch, changed.changed_ids) == (2, ["a"])
    info = await store.collection(tenant, "c")
    assert (info.num_documents, info.num_chunks, info.epoch) == (2, 2, 2)
    found = await store.search(tenant, "c", towards(1, 0, 0), space=SPACE, top_k=9, filters={})
    assert [one.text for one in found.chunks] == ["new 0", "b 0"]


async def test_deleting_documents_moves_the_epoch_only_if_there_were_any(
    store: CollectionStore, tenant: str
) -> None:
    await store.ingest(tenant, "c", SPACE, [document("a"), document("b")])
    assert (await store.delete_documents(tenant, "c", ["x"])).epoch == 1
    gone = await store.delete_documents(tenant, "c", ["a", "x"])
    assert (gone.epoch, gone.changed_ids) == (2, ["a"])
    assert await found_ids(store, tenant) == {"b"}


async def test_an_epoch_never_means_two_contents(store: CollectionStore, tenant: str) -> None:
    await store.ingest(tenant, "c", SPACE, [document("a")])
    await store.delete(tenant, "c")
    with pytest.raises(CollectionNotFound):
        await store.collection(tenant, "c")
    other = VectorSpace(embedder="other", revision="9", dimension=2)
    new = NewDocument(
        id="a", content_hash=b"", metadata={}, chunks=["a"], vectors=np.ones((1, 2), np.float32)
    )
    assert (await store.ingest(tenant, "c", other, [new])).epoch == 3
    assert (await store.collection(tenant, "c")).num_chunks == 1


async def test_tenants_do_not_see_each_other(store: CollectionStore, tenant: str) -> None:
    mine, yours = f"{tenant}-1", f"{tenant}-2"
    await store.ingest(mine, "c", SPACE, [document("a", text="mine")])
    await store.ingest(yours, "c", SPACE, [document("a", text="yours"), document("b")])
    assert await found_ids(store, mine) == {"a"}
    assert (await store.collection(mine, "c")).epoch == 1
    await store.ingest(yours, "d", SPACE, [document("a")])
    assert [one.name for one in await store.collections(mine)] == ["c"]
    with pytest.raises(CollectionNotFound):
        await store.search(mine, "d", towards(1, 0, 0), space=SPACE, top_k=1, filters={})
    with pytest.raises(CollectionNotFound):
        await store.delete(mine, "d")
    await store.delete(mine, "c")
    assert await found_ids(store, yours) == {"a", "b"}


async def test_other_vectors_are_refused(store: CollectionStore, tenant: str) -> None:
    await store.ingest(tenant, "c", SPACE, [document("a")])
    revised = VectorSpace(embedder="tiny", revision="2", dimension=3)
    with pytest.raises(CollectionMismatch, match=r"revision 1, and .* revision 2"):
        await store.ingest(tenant, "c", revised, [document("b")])
    with pytest.raises(CollectionMismatch, match="cannot be compared"):
        await store.search(tenant, "c", towards(1, 0, 0), space=revised, top_k=1, filters={})
    with pytest.raises(CollectionMismatch, match="3 dimensions, and this one has 2"):
        await store.search(tenant, "c", towards(1, 0), space=None, top_k=1, filters={})
    with pytest.raises(CollectionMismatch, match="by cosine, not by l2"):
        await store.ingest(tenant, "c", SPACE, [document("b")], metric="l2")
    assert await found_ids(store, tenant) == {"a"}


async def test_long_vectors_are_stored_as_halves(store: CollectionStore, tenant: str) -> None:
    space = VectorSpace(embedder="large", revision="1", dimension=3072)
    rows = np.random.default_rng(3).normal(size=(5, 3072)).astype(np.float32)
    documents = [
        NewDocument(
            id=str(place),
            content_hash=b"",
            metadata={},
            chunks=["x"],
            vectors=rows[place : place + 1],
        )
        for place in range(5)
    ]
    await store.ingest(tenant, "c", space, documents)
    found = await store.search(tenant, "c", rows[3], space=space, top_k=1, filters={})
    assert found.chunks[0].document_id == "3"
    huge = VectorSpace(embedder="huge", revision="1", dimension=4001)
    with pytest.raises(CollectionMismatch, match="at most 4000"):
        await store.ingest(tenant, "d", huge, [])


@pytest.fixture(scope="module")
async def library(store: CollectionStore) -> str:
    """A tenant with documents of all kinds of metadata."""
    documents = [
        document("en", lang="en", year=1990, tags=["news", "it"], draft=False),
        document("de", lang="de", year=2000.5, tags=["news"], draft=True),
        document("text", lang=None, year="1995", tags="news"),
        document("bare"),
        document("odd", **{'it\'s "odd" %s {} --': 1, "year": [1990]}),
    ]
    await store.ingest("library", "c", SPACE, documents)
    return "library"


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, {"en", "de", "text", "bare", "odd"}),
        ({"lang": "en"}, {"en"}),
        ({"lang": None}, {"text", "bare", "odd"}),
        ({"lang": {"ne": "en"}}, {"de", "text", "bare", "odd"}),
        ({"lang": {"in": ["en", "de"]}}, {"en", "de"}),
        ({"lang": {"in": ["de", None]}}, {"de", "text", "bare", "odd"}),
        ({"draft": True}, {"de"}),
        ({"year": 1990}, {"en"}),
        ({"year": 1990.0}, {"en"}),
        ({"year": {"gte": 1990}}, {"en", "de"}),
        ({"year": {"gt": 1990, "lt": 2001}}, {"de"}),
        ({"year": {"lte": 2000}}, {"en"}),
        ({"year": {"gte": "1990"}}, {"text"}),
        ({"tags": {"contains": "news"}}, {"en", "de"}),
        ({"tags": "news"}, {"text"}),
        ({"lang": "en", "draft": True}, set()),
        ({'it\'s "odd" %s {} --': 1}, {"odd"}),
        ({"lang": "en' OR '1'='1"}, set()),
        ({"lang' = 'en' OR true --": "x"}, set()),
        ({"lang') = 'x') OR true --": {"gte": 0}}, set()),
    ],
)
async def test_filters(
    store: CollectionStore, library: str, filters: dict[str, Any], expected: set[str]
) -> None:
    assert await found_ids(store, library, **filters) == expected


async def test_a_wrong_filter_is_an_error(store: CollectionStore, library: str) -> None:
    for wrong in (
        {"a": {"like": 1}},
        {"a": {}},
        {"a": [1]},
        {"a": {"in": []}},
        {"a": {"in": "x"}},
        {"a": {"gt": None}},
        {"a": {"gt": True}},
        {"a": float("nan")},
        {"a": "\0"},
        {"\0": 1},
        {str(number): 1 for number in range(40)},
    ):
        with pytest.raises(InvalidFilter):
            await found_ids(store, library, **wrong)


async def test_search_can_use_the_vector_index(
    store: CollectionStore, database: Database, tenant: str
) -> None:
    rows = np.random.default_rng(1).normal(size=(600, 3))
    documents = [document(str(place), tuple(row)) for place, row in enumerate(rows)]
    await store.ingest(tenant, "c", SPACE, documents)

    async def plan(connection: Connection) -> str:
        cursor = await connection.execute(
            "SELECT id FROM shuntyard.collections WHERE tenant = %s", [tenant]
        )
        (collection_id,) = await cursor.fetchone() or (0,)
        async with connection.transaction():
            await connection.execute("SET LOCAL enable_seqscan = off")
            cursor = await connection.execute(
                SQL(
                    "EXPLAIN SELECT text, embedding <=> '[1,2,3]' AS distance FROM {} "
                    "WHERE true ORDER BY distance LIMIT 5"
                ).format(Identifier("shuntyard", f"chunks_{collection_id}"))
            )
            return "\n".join(str(line) for (line,) in await cursor.fetchall())

    assert "embedding_idx" in await database.run(plan)


async def test_concurrent_ingests_of_the_same_change_it_once(
    store: CollectionStore, tenant: str
) -> None:
    documents = [document(str(place)) for place in range(20)]
    results = []

    async def one() -> None:
        results.append(await store.ingest(tenant, "c", SPACE, documents))

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(one)
    assert sorted(len(one.changed_ids) for one in results) == [0] * 7 + [20]
    assert {one.epoch for one in results} == {1}


async def test_concurrent_ingests_all_count(store: CollectionStore, tenant: str) -> None:
    epochs = []

    async def one(number: int) -> None:
        names = [f"own-{number}", "shared", f"{number % 3}"]
        result = await store.ingest(
            tenant, "c", SPACE, [document(name, text=str(number)) for name in names]
        )
        epochs.append(result.epoch)

    async with anyio.create_task_group() as tasks:
        for number in range(12):
            tasks.start_soon(one, number)
    assert sorted(epochs) == list(range(1, 13))
    info = await store.collection(tenant, "c")
    assert (info.epoch, info.num_documents, info.num_chunks) == (12, 16, 16)


async def test_a_reader_never_sees_half_an_ingest(store: CollectionStore, tenant: str) -> None:
    """Each epoch's content is one generation of all documents."""
    names = [str(place) for place in range(10)]
    await store.ingest(tenant, "c", SPACE, [document(name, text="1") for name in names])
    seen = set()

    async def read() -> None:
        while True:
            found = await store.search(
                tenant, "c", towards(1, 0, 0), space=SPACE, top_k=50, filters={}
            )
            assert [one.text for one in found.chunks] == [f"{found.epoch} 0"] * 10
            seen.add(found.epoch)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(read)
        for epoch in range(2, 20):
            documents = [document(name, text=str(epoch)) for name in names]
            assert (await store.ingest(tenant, "c", SPACE, documents)).epoch == epoch
        tasks.cancel_scope.cancel()
    assert len(seen) > 1


async def test_cancelled_calls_keep_no_connection(
    store: CollectionStore, database: Database, tenant: str
) -> None:
    documents = [document(str(place)) for place in range(100)]

    async def slow(connection: Connection) -> None:
        async with connection.transaction():
            await connection.execute("SELECT pg_sleep(30)")

    for number in range(12):
        with anyio.move_on_after(0.05):
            if number % 2:
                await database.run(slow)
            else:
                await store.ingest(tenant, "c", SPACE, documents)
    with anyio.fail_after(5):
        result = await store.ingest(tenant, "c", SPACE, documents)
        assert result.epoch == 1
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(store.collections, tenant)


async def test_migrations_are_applied_once() -> None:
    with data_folder() as folder:
        for expected in (len(bundled_migrations()), 0):
            async with Database(folder=folder) as database:
                assert not database.is_open
                store = CollectionStore(database)
                assert (await store.ingest("t", "c", SPACE, [document("a")])).epoch == 1

                async def again(connection: Connection) -> list[Any]:
                    await migrate(connection, bundled_migrations())
                    cursor = await connection.execute("SELECT name FROM shuntyard.migrations")
                    return await cursor.fetchall()

                rows = await database.run(again)
                assert len(rows) == len(bundled_migrations())
                assert database.embedded is not None
                pid = database.embedded.pid
            assert pid is not None
            assert not is_alive(pid), expected


async def make_database(database: Database, name: str) -> str:
    """An empty database beside ours. Returns its address."""

    async def work(connection: Connection) -> str:
        await connection.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))
        return connection.info.dsn

    dsn = await database.run(work)
    return psycopg.conninfo.make_conninfo(dsn, dbname=name, options="")


async def test_several_servers_may_start_at_once_on_one_database(database: Database) -> None:
    url = await make_database(database, "several")
    epochs = []

    async def one() -> None:
        async with Database(url=url, max_connections=2) as mine:
            store = CollectionStore(mine)
            epochs.append((await store.ingest("t", "c", SPACE, [document("a")])).epoch)

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(one)
    assert epochs == [1] * 5


async def test_a_failing_step_leaves_nothing_behind(database: Database) -> None:
    url = await make_database(database, "failing")
    steps = [*bundled_migrations(), Migration(len(bundled_migrations()) + 1, "bad", "SELECT 1/0")]
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            await migrate(connection, steps)
        cursor = await connection.execute("SELECT to_regnamespace('shuntyard')")
        assert await cursor.fetchone() == (None,)
        assert await migrate(connection, steps[:-1]) == len(steps) - 1


async def test_a_newer_shape_is_refused(database: Database) -> None:
    url = await make_database(database, "newer")
    bundled = bundled_migrations()
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await migrate(connection, [*bundled, Migration(len(bundled) + 1, "next", "SELECT 1")])
        with pytest.raises(StoreUnusable, match="newer version"):
            await migrate(connection, bundled)
        other = [Migration(1, bundled[0].name, "SELECT 2"), *bundled[1:], Migration(99, "", "")]
        with pytest.raises(StoreUnusable, match="not the one"):
            await migrate(connection, other)


async def test_missing_rights_are_told(database: Database) -> None:
    url = await make_database(database, "poor")

    async def make_role(connection: Connection) -> None:
        await connection.execute("CREATE ROLE poor LOGIN")

    await database.run(make_role)
    async with Database(url=psycopg.conninfo.make_conninfo(url, user="poor")) as mine:
        with pytest.raises(StoreUnusable, match="CREATE EXTENSION vector"):
            await CollectionStore(mine).collections("t")


async def test_an_address_where_nothing_is_is_told() -> None:
    async with Database(url="postgresql://nobody@127.0.0.1:9/none") as mine:
        with pytest.raises(StoreUnavailable, match="cannot connect"):
            await CollectionStore(mine).collections("t")


async def test_a_folder_has_one_server(database: Database) -> None:
    assert database.embedded is not None
    folder = database.embedded._folder
    async with Database(folder=folder) as second:
        with pytest.raises(StoreUnusable, match="used by another server"):
            await CollectionStore(second).collections("t")
    assert database.embedded.is_running


async def test_a_killed_postgres_comes_back_with_all_that_was_stored() -> None:
    with data_folder() as folder:
        async with Database(folder=folder) as database:
            store, postgres = CollectionStore(database), database.embedded
            assert postgres is not None
            await store.ingest("t", "c", SPACE, [document("a")])
            for place in range(2):
                assert postgres.pid is not None
                os.kill(postgres.pid, signal.SIGKILL)
                await until(lambda: not postgres.is_running)
                assert await found_ids(store, "t") == {"a", *map(str, range(place))}
                await store.ingest("t", "c", SPACE, [document(str(place))])


async def test_a_killed_connection_fails_one_call_at_most(
    store: CollectionStore, database: Database, tenant: str
) -> None:
    """The kernel's kill of one backend makes Postgres end all connections and recover."""
    await store.ingest(tenant, "c", SPACE, [document("a")])

    async def backend(connection: Connection) -> int:
        return connection.info.backend_pid

    os.kill(await database.run(backend), signal.SIGKILL)
    with anyio.fail_after(60):
        while True:
            with suppress(StoreUnavailable):
                assert await found_ids(store, tenant) == {"a"}
                break
            await anyio.sleep(0.05)


@pytest.mark.parametrize("also_postgres", [False, True])
async def test_a_killed_ingest_is_whole_or_not_there(also_postgres: bool) -> None:
    """kill -9 of the process that ingests, and of its Postgres, again and again."""
    num_said = 0
    with data_folder() as folder:
        for life in range(3):
            ingesting = subprocess.Popen(  # noqa: ASYNC220 - it starts at once
                [sys.executable, str(ROOT / "tests/integration/ingest_forever.py"), str(folder)],
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            assert ingesting.stdout is not None
            for _ in range(2 + life):
                said = await anyio.to_thread.run_sync(ingesting.stdout.readline)
                assert int(said) == num_said
                num_said += 1
            await anyio.sleep(0.013 * life)  # somewhere inside the next one
            postgres = [one.pid for one in psutil.Process(ingesting.pid).children()]
            assert len(postgres) == 1
            ingesting.kill()
            if also_postgres:
                os.kill(postgres[0], signal.SIGKILL)
            for line in ingesting.stdout:  # those that it said before it died
                assert int(line) == num_said
                num_said += 1
            ingesting.wait()
            ingesting.stdout.close()
            async with Database(folder=folder) as database:
                info = await CollectionStore(database).collection("t", "c")
            with anyio.fail_after(10):  # a killed process goes when the system gets round to it
                while is_alive(postgres[0]):  # noqa: ASYNC110 - the end of no child has no event
                    await anyio.sleep(0.05)
            assert info.epoch in (num_said, num_said + 1)
            assert info.num_documents == info.epoch * DOCUMENTS_IN_BATCH
            assert info.num_chunks == info.num_documents * CHUNKS_IN_DOCUMENT
            num_said = info.epoch


async def test_who_leaves_while_postgres_starts_does_not_wait_for_it() -> None:
    with data_folder() as folder:
        async with Database(folder=folder) as database:
            store = CollectionStore(database)
            with anyio.fail_after(0.5), anyio.move_on_after(0.05) as scope:
                await store.collections("t")
            assert scope.cancelled_caught
            assert await store.collections("t") == []


async def test_the_end_of_the_server_ends_a_start() -> None:
    with data_folder() as folder:
        failed = []

        async def call(store: CollectionStore) -> None:
            with pytest.raises(StoreUnavailable) as caught:
                await store.collections("t")
            failed.append(caught.value.message)

        async with anyio.create_task_group() as tasks, Database(folder=folder) as database:
            tasks.start_soon(call, CollectionStore(database))
            await anyio.sleep(0.05)
        assert failed == ["the server is shutting down"]
        assert not list(folder.glob("postgres/postmaster.pid"))


async def test_a_stale_lock_file_does_not_hinder() -> None:
    with data_folder() as folder:
        async with Database(folder=folder) as database:
            await CollectionStore(database).ingest("t", "c", SPACE, [document("a")])
        # As a crash leaves it, with a number that another process has by now.
        stale = folder / "postgres" / "postmaster.pid"
        stale.write_text(f"{os.getpid()}\n{folder}/postgres\n0\n5432\n/tmp\n\n0 0\nready\n")
        async with Database(folder=folder) as database:
            assert await found_ids(CollectionStore(database), "t") == {"a"}


async def test_a_folder_with_a_long_name_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the path of a socket may be."""
    with data_folder() as short:
        monkeypatch.setenv("TMPDIR", str(short))
        monkeypatch.setattr("tempfile.tempdir", None)
        folder = short / ("long" * 30)
        async with Database(folder=folder) as database:
            assert await CollectionStore(database).collections("t") == []
            assert list(short.glob("shuntyard-*/.s.PGSQL.5432"))
        assert not list(short.glob("shuntyard-*"))


@_AS_ROOT
async def test_binaries_that_only_root_can_reach_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = embedded._can_reach
    monkeypatch.setattr(
        embedded,
        "_can_reach",
        lambda folder, user: "site-packages" not in folder.parts and real(folder, user),
    )
    with data_folder() as folder:
        for _ in range(2):
            async with Database(folder=folder) as database:
                assert await CollectionStore(database).collections("t") == []
                postgres = database.embedded
                assert postgres is not None
                assert postgres.pid is not None
                assert folder in Path(psutil.Process(postgres.pid).exe()).parents
        assert len(list(folder.glob("binaries*"))) == 1


@_AS_ROOT
async def test_a_folder_that_root_keeps_to_itself_is_told(tmp_path: Path) -> None:
    async with Database(folder=tmp_path / "data") as database:
        with pytest.raises(StoreUnusable, match="cannot reach"):
            await CollectionStore(database).collections("t")


async def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with Database(folder=tmp_path / "file") as database:
        with pytest.raises(StoreUnusable, match="--workflow-data"):
            await CollectionStore(database).collections("t")
    with data_folder() as folder:
        (folder / "postgres").mkdir()
        (folder / "postgres" / "PG_VERSION").write_text("16\n")
        async with Database(folder=folder) as database:
            with pytest.raises(StoreUnusable, match="Postgres 16"):
                await CollectionStore(database).collections("t")
