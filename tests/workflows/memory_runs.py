"""`workflows.stores.runs` without Postgres, in the time of the event loop, with connections that
break before and after what they were asked for was done. The real one is tested in
`tests/integration/test_run_store.py` and `test_durable_runs.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import anyio
import orjson

from workflows.stores.errors import StoreUnavailable
from workflows.stores.runs import EventChunk, NewRun, RunEnd, Standing, StoredRun

T = TypeVar("T")

_HALF_TURN_S = 0.005


@dataclass(slots=True, eq=False)
class MemoryConnection:
    """A connection. locks: that end with it."""

    is_lost: bool = False
    locks: set[int] = field(default_factory=set)

    async def half_turn(self) -> None:
        """To the database, or back. Raises StoreUnavailable."""
        await anyio.sleep(_HALF_TURN_S)
        if self.is_lost:
            raise StoreUnavailable("the connection is lost")


class MemoryRuns:
    """The tables, which outlive every server, and what can be asked of them.

    on_stored: is told of events that have become durable: the run, the path in it, and they.
    """

    def __init__(self, on_stored: Callable[[str, str, list[list[Any]]], None]) -> None:
        self.rows: dict[str, StoredRun] = {}
        self.connections: list[MemoryConnection] = []
        self._chunks: dict[tuple[str, str, int], bytes] = {}
        self._on_stored = on_stored

    def lose_connections(self) -> None:
        """All that there are. What is on its way arrives, or not; its answer never does."""
        for connection in self.connections:
            connection.is_lost = True
            connection.locks.clear()
        self.connections.clear()

    # What `workflows.run_journal` calls as `store.…`

    @asynccontextmanager
    async def owning(self, connection: MemoryConnection, owner: int) -> AsyncIterator[None]:
        await connection.half_turn()
        connection.locks.add(owner)
        try:
            yield
        finally:
            if not connection.is_lost:
                await anyio.sleep(_HALF_TURN_S)
            connection.locks.discard(owner)

    async def write(
        self,
        connection: MemoryConnection,
        owner: int,
        new: Sequence[NewRun],
        chunks: Sequence[EventChunk],
        ends: Sequence[RunEnd],
    ) -> None:
        await connection.half_turn()
        for run in new:
            self._insert(owner, run)
        for one in chunks:
            assert one.run_id in self.rows
            self._chunks[one.run_id, one.path, one.first_number] = one.events
            self._on_stored(one.run_id, one.path, orjson.loads(one.events))
        for end in ends:
            self.rows[end.run_id] = replace(
                self.rows[end.run_id],
                status=end.status,  # type: ignore[arg-type]
                error=end.error,
                finished_s=end.finished_s,
                num_bytes=end.num_bytes,
            )
            for key in [key for key in self._chunks if key[0] == end.run_id and key[1]]:
                del self._chunks[key]
        await connection.half_turn()

    async def claim(
        self, connection: MemoryConnection, owner: int, tenants: Sequence[str] | None
    ) -> list[str]:
        await connection.half_turn()
        alive = {lock for one in self.connections for lock in one.locks}
        free = [
            run_id
            for run_id, row in self.rows.items()
            if row.finished_s is None and row.owner not in alive
            if tenants is None or row.tenant in tenants
        ]
        for run_id in free:
            self.rows[run_id] = replace(self.rows[run_id], owner=owner)
        await connection.half_turn()
        return free

    async def standings(
        self, connection: MemoryConnection, run_ids: Sequence[str]
    ) -> dict[str, Standing]:
        await connection.half_turn()
        return {
            run_id: Standing(self.rows[run_id].owner, self.rows[run_id].finished_s is not None)
            for run_id in run_ids
            if run_id in self.rows
        }

    async def load(self, connection: MemoryConnection, run_ids: Sequence[str]) -> list[StoredRun]:
        await connection.half_turn()
        return [self.stored(run_id) for run_id in self.rows if run_id in run_ids]

    async def prune(self, connection: MemoryConnection, *, before_s: float, max_bytes: int) -> int:
        await connection.half_turn()
        return 0

    def stored(self, run_id: str) -> StoredRun:
        """A run with its events."""
        events: dict[str, list[list[Any]]] = {}
        for of_run, path, number in sorted(self._chunks):
            if of_run == run_id:
                found = events.setdefault(path, [])
                assert number == len(found) + 1, "events are missing, or stored twice"
                found += orjson.loads(self._chunks[of_run, path, number])
        return replace(self.rows[run_id], events=events)

    def _insert(self, owner: int, run: NewRun) -> bool:
        taken = any(
            row.tenant == run.tenant and row.key == run.key
            for row in self.rows.values()
            if run.key is not None
        )
        if run.id in self.rows or taken:
            return False
        self.rows[run.id] = StoredRun(
            id=run.id,
            tenant=run.tenant,
            owner=owner,
            name=run.name,
            error=None,
            status="in_progress",
            created_s=run.created_s,
            finished_s=None,
            key=run.key,
            request_hash=run.request_hash,
            document=orjson.loads(run.document),
            inputs=orjson.loads(run.inputs),
        )
        return True


class MemoryStore:
    """As `RunStore`, for one server, and as its `Database`. is_dead: of the server."""

    def __init__(self, runs: MemoryRuns) -> None:
        self._runs = runs
        self.database = self
        self.is_dead = False

    async def run(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """As `Database.run`."""
        if self.is_dead:
            raise StoreUnavailable("nobody is there to ask")
        connection = MemoryConnection()
        self._runs.connections.append(connection)
        try:
            return await work(connection)
        finally:
            if connection in self._runs.connections:
                self._runs.connections.remove(connection)
            connection.locks.clear()

    async def add(self, owner: int, run: NewRun) -> bool:
        async def work(connection: MemoryConnection) -> bool:
            await connection.half_turn()
            is_new = self._runs._insert(owner, run)
            await connection.half_turn()
            return is_new

        return await self.run(work)

    async def by_key(self, tenant: str, key: str) -> StoredRun | None:
        async def work(connection: MemoryConnection) -> StoredRun | None:
            await connection.half_turn()
            found = [
                row for row in self._runs.rows.values() if row.tenant == tenant and row.key == key
            ]
            await connection.half_turn()
            return self._runs.stored(found[0].id) if found else None

        return await self.run(work)
