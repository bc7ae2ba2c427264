"""Runs and what happened in them, in Postgres. Who writes when is `workflows.run_journal`'s.

Each run at work belongs to one server: to the one that holds the advisory lock of the number in
`owner`, on the connection through which it writes. The lock ends with the connection, and with the
server, so that a run whose lock is free has nobody who works on it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
import psycopg
from psycopg.rows import class_row

from workflows.run_progress import RunStatus
from workflows.stores.database import Connection, Database

_PRUNED_AT_ONCE: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run that begins. tenant: as the database knows it. key: of idempotency, with the hash of
    the request that it stands for. created_s: unix seconds, as all times here."""

    id: str
    tenant: str
    name: str | None
    document: bytes
    inputs: bytes
    created_s: float
    key: str | None = None
    request_hash: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended. error: as its last event has it. num_bytes: of all that is stored."""

    run_id: str
    name: str | None
    status: str
    error: dict[str, Any] | None
    finished_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventChunk:
    """Consecutive events of a run, or of one inside it (see the table). events: JSON."""

    run_id: str
    path: str
    first_number: int
    events: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run as the database has it. events: JSON values by path, in order."""

    id: str
    tenant: str
    owner: int
    name: str | None
    error: dict[str, Any] | None
    status: RunStatus
    created_s: float
    finished_s: float | None
    key: str | None = None
    request_hash: bytes | None = None
    num_bytes: int = 0
    document: Any = None
    inputs: Any = None
    events: dict[str, list[list[Any]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Standing:
    """Whose a stored run is, and whether it has ended."""

    owner: int
    has_ended: bool


@dataclass(slots=True, kw_only=True)
class _Row:
    id: str
    tenant: str
    owner: int
    head: bytes
    status: RunStatus
    created_s: float
    finished_s: float | None
    idempotency_key: str | None
    request_hash: bytes | None
    num_bytes: int
    document: bytes = b"null"
    inputs: bytes = b"null"

    def run(self, events: dict[str, list[list[Any]]] | None = None) -> StoredRun:
        head = orjson.loads(self.head)
        return StoredRun(
            id=self.id,
            tenant=self.tenant,
            owner=self.owner,
            name=head["name"],
            error=head["error"],
            status=self.status,
            created_s=self.created_s,
            finished_s=self.finished_s,
            key=self.idempotency_key,
            request_hash=self.request_hash,
            num_bytes=self.num_bytes,
            document=orjson.loads(self.document),
            inputs=orjson.loads(self.inputs),
            events=events or {},
        )


_HEAD: Final = """
    id, tenant, owner, head, status, idempotency_key, request_hash, num_bytes,
    extract(epoch FROM created_at)::float8 AS created_s,
    extract(epoch FROM finished_at)::float8 AS finished_s
"""
_INSERT: Final = """
    INSERT INTO shuntyard.runs (id, tenant, owner, idempotency_key, request_hash, head, document,
                                inputs, status, created_at)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, 'in_progress', to_timestamp(%s))
"""


class RunStore:
    """What can be asked of the tables. Raises StoreError where Postgres is not available."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def add(self, owner: int, run: NewRun) -> bool:
        """Store a run with a key, unless there is one of that tenant and key."""

        async def work(connection: Connection) -> bool:
            query = _INSERT + " ON CONFLICT DO NOTHING"
            cursor = await connection.execute(query, _values(owner, run))
            return bool(cursor.rowcount)

        return await self.database.run(work)

    async def by_key(self, tenant: str, key: str) -> StoredRun | None:
        """The run that a key stands for."""
        return await self._one("tenant = %s AND idempotency_key = %s", [tenant, key])

    async def by_id(self, tenant: str, run_id: str) -> StoredRun | None:
        """A tenant's run."""
        if "\0" in run_id:  # which Postgres does not take
            return None
        return await self._one("tenant = %s AND id = %s", [tenant, run_id])

    async def page(self, tenant: str, *, limit: int, after: str | None) -> list[StoredRun]:
        """A tenant's runs without what happened in them, the newest first. after: an id; its run
        and those before it in the list are left out."""
        place = ""
        if after is not None:
            place = """AND (created_at, id) < (
                SELECT created_at, id FROM shuntyard.runs
                WHERE id = %(after)s AND tenant = %(tenant)s
            )"""
        query = f"""
            SELECT {_HEAD} FROM shuntyard.runs WHERE tenant = %(tenant)s {place}
            ORDER BY created_at DESC, id DESC LIMIT %(limit)s
        """

        async def work(connection: Connection) -> list[StoredRun]:
            async with connection.cursor(row_factory=class_row(_Row)) as cursor:
                await cursor.execute(query, {"tenant": tenant, "after": after, "limit": limit})
                return [row.run() for row in await cursor.fetchall()]

        return await self.database.run(work)

    async def _one(self, condition: str, values: list[Any]) -> StoredRun | None:
        async def work(connection: Connection) -> StoredRun | None:
            async with connection.transaction():
                await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                found = await _read(connection, condition, values)
            return found[0] if found else None

        return await self.database.run(work)


@asynccontextmanager
async def owning(connection: Connection, owner: int) -> AsyncIterator[None]:
    """What is done inside is done by a server that others take for alive."""
    await connection.execute("SELECT pg_advisory_lock(%s)", [owner])
    try:
        yield
    finally:
        with suppress(psycopg.Error):  # the connection is lost, and the lock with it
            await connection.execute("SELECT pg_advisory_unlock(%s)", [owner])


async def write(
    connection: Connection,
    owner: int,
    new: Sequence[NewRun],
    chunks: Sequence[EventChunk],
    ends: Sequence[RunEnd],
) -> None:
    """All of it, or nothing. The same may be written again.

    Runs inside a run that has ended are of no use any more, and go.
    """
    async with connection.transaction(), connection.cursor() as cursor:
        if new:
            await cursor.executemany(
                _INSERT + " ON CONFLICT DO NOTHING", [_values(owner, run) for run in new]
            )
        if chunks:
            await cursor.executemany(
                "INSERT INTO shuntyard.run_events VALUES (%s, %s, %s, %b) "
                "ON CONFLICT (run_id, path, first_number) DO UPDATE SET events = EXCLUDED.events",
                [(one.run_id, one.path, one.first_number, one.events) for one in chunks],
            )
        if ends:
            await cursor.executemany(
                "UPDATE shuntyard.runs SET status = %s, head = %b, num_bytes = %s, "
                "finished_at = to_timestamp(%s) WHERE id = %s",
                [_end_values(one) for one in ends],
            )
            await cursor.execute(
                "DELETE FROM shuntyard.run_events WHERE run_id = ANY(%s) AND path <> ''",
                [[one.run_id for one in ends]],
            )


async def claim(connection: Connection, owner: int, tenants: Sequence[str] | None) -> list[str]:
    """Take the runs whose server is gone; returns their ids. tenants: only theirs, if given."""
    cursor = await connection.execute(
        "SELECT DISTINCT owner FROM shuntyard.runs WHERE finished_at IS NULL AND owner <> %s",
        [owner],
    )
    claimed: list[str] = []
    for (other,) in await cursor.fetchall():
        async with connection.transaction():
            cursor = await connection.execute("SELECT pg_try_advisory_xact_lock(%s)", [other])
            if (await cursor.fetchone()) != (True,):
                continue
            cursor = await connection.execute(
                "UPDATE shuntyard.runs SET owner = %s WHERE owner = %s AND finished_at IS NULL "
                "AND (%s::text[] IS NULL OR tenant = ANY(%s::text[])) RETURNING id",
                [owner, other, tenants, tenants],
            )
            claimed += [run_id for (run_id,) in await cursor.fetchall()]
    return claimed


async def standings(connection: Connection, run_ids: Sequence[str]) -> dict[str, Standing]:
    """Who works on these runs; those that are not stored are left out."""
    cursor = await connection.execute(
        "SELECT id, owner, finished_at IS NOT NULL FROM shuntyard.runs WHERE id = ANY(%s)",
        [list(run_ids)],
    )
    return {run_id: Standing(*rest) for run_id, *rest in await cursor.fetchall()}


async def load(connection: Connection, run_ids: Sequence[str]) -> list[StoredRun]:
    """These runs with all that happened in them, the oldest first."""
    return await _read(connection, "id = ANY(%s)", [list(run_ids)])


async def prune(connection: Connection, *, before_s: float, max_bytes: int) -> int:
    """Delete runs that ended before a time, and the oldest while all ended ones hold more than
    `max_bytes`. Returns how many those were."""
    too_old = "finished_at < to_timestamp(%s)"
    too_many = """id IN (
        SELECT id FROM (
            SELECT id, sum(num_bytes) OVER (ORDER BY finished_at DESC, id) AS total
            FROM shuntyard.runs WHERE finished_at IS NOT NULL
        ) AS ranked WHERE total > %s
    )"""
    num_deleted = 0
    for condition, value in ((too_old, before_s), (too_many, max_bytes)):
        while True:
            cursor = await connection.execute(
                "DELETE FROM shuntyard.runs WHERE id IN (SELECT id FROM shuntyard.runs "
                f"WHERE finished_at IS NOT NULL AND {condition} LIMIT {_PRUNED_AT_ONCE})",
                [value],
            )
            num_deleted += cursor.rowcount
            if cursor.rowcount < _PRUNED_AT_ONCE:
                break
    return num_deleted


async def _read(connection: Connection, condition: str, values: list[Any]) -> list[StoredRun]:
    query = f"SELECT {_HEAD}, document, inputs FROM shuntyard.runs WHERE {condition}"
    async with connection.cursor(row_factory=class_row(_Row)) as cursor:
        await cursor.execute(f"{query} ORDER BY created_at, id", values)
        rows = await cursor.fetchall()
    found = await connection.execute(
        "SELECT run_id, path, events FROM shuntyard.run_events "
        "WHERE run_id = ANY(%s) ORDER BY run_id, path, first_number",
        [[row.id for row in rows]],
    )
    events: dict[str, dict[str, list[list[Any]]]] = {row.id: {} for row in rows}
    async for run_id, path, chunk in found:
        events[run_id].setdefault(path, []).extend(orjson.loads(chunk))
    return [row.run(events[row.id]) for row in rows]


def _values(owner: int, run: NewRun) -> tuple[Any, ...]:
    return (
        run.id,
        run.tenant,
        owner,
        run.key,
        run.request_hash,
        _head(run.name, None),
        run.document,
        run.inputs,
        run.created_s,
    )


def _end_values(end: RunEnd) -> tuple[Any, ...]:
    head = _head(end.name, end.error)
    return (end.status, head, end.num_bytes, end.finished_s, end.run_id)


def _head(name: str | None, error: dict[str, Any] | None) -> bytes:
    return orjson.dumps({"name": name, "error": error})
