"""Keeps runs beyond the end of the process: writes what happens in them, and finds them again.

One task writes, on one connection: while it writes, what happens meanwhile gathers, and goes out
with the next transaction. A run waits for it only where its work has effects; those who watch a run
see what has been written.

What was written is what goes on: when a server takes over the runs of one that is gone, they are
what their events say. Where Postgres is not available no run begins, and those that are at work go
on unwritten, until it is back.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import anyio
import orjson
from anyio.abc import TaskGroup

from workflows.errors import JournalUnavailable
from workflows.run_events import RunEvent, RunEvents
from workflows.run_progress import RUN_ENDS
from workflows.stores import runs as store
from workflows.stores.database import Connection
from workflows.stores.errors import StoreError
from workflows.stores.runs import EventChunk, NewRun, RunEnd, RunStore, StoredRun

logger = logging.getLogger(__name__)

_NOT_AVAILABLE: Final = "runs cannot be recorded at the moment: the server's store is not available"
_CLAIM_EVERY_S: Final = 5.0
_PRUNE_EVERY_S: Final = 60.0
_LAST_WRITE_S: Final = 5.0
_STALL_S: Final = 5.0
_MIN_BACKOFF_S: Final = 0.25
_MAX_BACKOFF_S: Final = 30.0
_LOCK_POLL_S: Final = 0.2
_LOADED_AT_ONCE: Final = 20
_MAX_BATCH_BYTES: Final = 16 * 1024 * 1024


@dataclass(slots=True, eq=False)
class _Log:
    """The events of a run, or of one inside it; the first num_written are stored."""

    events: RunEvents
    num_written: int = 0

    @property
    def last(self) -> RunEvent | None:
        return self.events.since(len(self.events) - 1)[0] if len(self.events) else None

    @property
    def has_ended(self) -> bool:
        return self.last is not None and self.last.type in RUN_ENDS

    @property
    def is_written(self) -> bool:
        return self.num_written == len(self.events)


@dataclass(slots=True, eq=False)
class Recorded:
    """A run that is being recorded. wall_offset_s: from the event loop's clock to the wall's.

    logs: by path. num_bytes: that are stored of it. is_dropped: nothing more is written.
    """

    new: NewRun
    wall_offset_s: float
    is_stored: bool = False
    is_dropped: bool = False
    num_bytes: int = 0
    logs: dict[str, _Log] = field(default_factory=dict)

    @property
    def is_written(self) -> bool:
        return all(log.is_written for log in self.logs.values())


class RunJournal:
    """An async context manager. Entering it opens the database, in the background.

    identities: what the database calls tenants whose names do not last. tenants: all that there
    are; runs of others are left alone. now_wall_s: unix seconds. ttl_s, max_bytes: how long runs
    that have ended are kept, and how much of them. patience_s: how long those wait for Postgres who
    have to.

    adopt, abandon: what to do with a run (and its tenant) that was taken over from a server that is
    gone, or that somebody else goes on with, from what is on record; set by who uses the journal.
    taking_over: held while runs are being taken over.
    """

    def __init__(
        self,
        run_store: RunStore,
        *,
        now_wall_s: Callable[[], float],
        identities: Mapping[str, str],
        tenants: Sequence[str],
        ttl_s: float = 7 * 86400.0,
        max_bytes: int = 10 * 1024**3,
        patience_s: float = 30.0,
    ) -> None:
        self._store = run_store
        self.now_wall_s = now_wall_s
        self._identities = dict(identities)
        self._tenants = {self._identities.get(name, name): name for name in tenants}
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._patience_s = patience_s
        self._runs: dict[str, Recorded] = {}
        self._unwritten: dict[str, Recorded] = {}
        self._owner = 0
        self._former_owners: set[int] = set()
        self._is_up = False
        self._is_closing = False
        self._was_tried = anyio.Event()
        self._wanted = anyio.Event()
        self._changed = anyio.Event()
        self._group: TaskGroup | None = None
        self.taking_over = anyio.Lock()
        self.adopt: Callable[[StoredRun, str], None] = lambda run, tenant: None
        self.abandon: Callable[[str], None] = lambda run_id: None

    async def __aenter__(self) -> Self:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._keep_writing)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._group is not None
        await self.close()
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(exc_type, exc, traceback)

    async def close(self) -> None:
        """Write what there is, and nothing that happens from now on. Abandons the runs whose end is
        not written."""
        if self._is_closing:
            return
        self._is_closing = True
        self._wanted.set()
        with anyio.move_on_after(_LAST_WRITE_S, shield=True):
            while self._is_up:
                await self._changed.wait()
        for run_id in list(self._runs):
            self._give_away(run_id)

    async def ready(self) -> None:
        """Wait until it is known whether runs can be recorded. Raises JournalUnavailable if not."""
        with anyio.move_on_after(self._patience_s):
            await self._was_tried.wait()
        if not self.is_up:
            raise JournalUnavailable(_NOT_AVAILABLE)

    @property
    def is_up(self) -> bool:
        """Whether what happens now is being written."""
        return self._is_up and not self._is_closing

    def is_ours(self, stored: StoredRun) -> bool:
        """Whether a run that is stored as at work is so at this server."""
        return stored.owner == self._owner or stored.owner in self._former_owners

    def identity(self, tenant: str) -> str:
        """What the database calls a tenant."""
        return self._identities.get(tenant, tenant)

    def record(
        self, new: NewRun, events: RunEvents, *, wall_offset_s: float, is_stored: bool = False
    ) -> Recorded:
        """Write what happens in a run from now on. is_stored: the run itself is there."""
        run = Recorded(new, wall_offset_s, is_stored=is_stored)
        run.num_bytes = len(new.document) + len(new.inputs)
        self._runs[new.id] = run
        self._watch(run, "", events)
        self._note(run)
        return run

    def record_again(
        self, stored: StoredRun, events: RunEvents, *, wall_offset_s: float
    ) -> Recorded:
        """Go on writing a run that was taken over; its past is written."""
        new = NewRun(
            id=stored.id,
            tenant=stored.tenant,
            name=stored.name,
            document=orjson.dumps(stored.document),
            inputs=orjson.dumps(stored.inputs),
            created_s=stored.created_s,
            key=stored.key,
            request_hash=stored.request_hash,
        )
        run = self.record(new, events, wall_offset_s=wall_offset_s, is_stored=True)
        run.num_bytes += sum(len(orjson.dumps(some)) for some in stored.events.values())
        return run

    def record_inside(self, run: Recorded, path: str, events: RunEvents) -> None:
        """Write what happens in a run inside of `run`, too."""
        if not run.is_dropped and path not in run.logs:
            self._watch(run, path, events)

    def _watch(self, run: Recorded, path: str, events: RunEvents) -> None:
        """What stands in the events already is written: it came from there."""
        run.logs[path] = _Log(events, len(events))
        events.on_add = partial(self._note, run)

    async def add(self, new: NewRun) -> StoredRun | None:
        """Store a run with a key, before it begins; the other run if the key stands for one.

        Raises JournalUnavailable.
        """
        assert new.key is not None
        try:
            while not await self._store.add(self._owner, new):
                stored = await self._store.by_key(new.tenant, new.key)
                if stored is not None:
                    return stored
        except StoreError as error:
            raise JournalUnavailable(_NOT_AVAILABLE) from error
        return None

    async def find(self, tenant: str, run_id: str) -> StoredRun | None:
        """A tenant's stored run. Raises JournalUnavailable."""
        await self.ready()
        try:
            return await self._store.by_id(self.identity(tenant), run_id)
        except StoreError as error:
            raise JournalUnavailable(_NOT_AVAILABLE) from error

    async def page(self, tenant: str, *, limit: int, after: str | None) -> list[StoredRun]:
        """See `RunStore.page`. Raises JournalUnavailable."""
        await self.ready()
        try:
            return await self._store.page(self.identity(tenant), limit=limit, after=after)
        except StoreError as error:
            raise JournalUnavailable(_NOT_AVAILABLE) from error

    async def written(self, run: Recorded) -> None:
        """Wait until all that has happened in a run is stored. Raises JournalUnavailable if that
        takes longer than may be."""
        targets = [(log, len(log.events)) for log in run.logs.values()]
        with anyio.move_on_after(self._patience_s):
            while any(log.num_written < target for log, target in targets):
                if run.is_dropped:
                    break
                await self._changed.wait()
            else:
                return
        raise JournalUnavailable(_NOT_AVAILABLE)

    def _note(self, run: Recorded) -> None:
        """Something has happened in a run."""
        self._unwritten[run.new.id] = run
        self._wanted.set()
        if not self._is_up and not self._is_closing:
            _show(run)

    def _give_away(self, run_id: str) -> None:
        """Somebody else goes on with a run. What is not on record is not shown."""
        self.abandon(run_id)
        self._drop(self._runs[run_id])

    def _drop(self, run: Recorded) -> None:
        """Write no more of a run."""
        run.is_dropped = True
        self._runs.pop(run.new.id, None)
        self._unwritten.pop(run.new.id, None)
        for log in run.logs.values():
            log.events.on_add = None
        _show(run)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _keep_writing(self) -> None:
        backoff_s = _MIN_BACKOFF_S
        while not self._is_closing:
            try:
                await self._store.database.run(self._session)
            except StoreError:
                pass  # the database has said why
            except Exception:
                # The boundary of the journal: whatever is wrong here, the server serves on.
                logger.exception("runs could not be recorded")
            backoff_s = _MIN_BACKOFF_S if self._is_up else min(2 * backoff_s, _MAX_BACKOFF_S)
            self._go_down()
            await anyio.sleep(backoff_s)

    def _go_down(self) -> None:
        """Postgres is not there, or does not answer: nobody who can do without waits for it."""
        self._is_up = False
        self._was_tried.set()
        if not self._is_closing:
            for run in self._unwritten.values():
                _show(run)
        self._tell()

    async def _session(self, connection: Connection) -> None:
        """Write until there is no more, or the connection is lost."""
        if self._owner:
            self._former_owners.add(self._owner)
        self._owner = secrets.randbits(62)
        async with store.owning(connection, self._owner):
            self._is_up = True
            await self._take_over(connection)
            self._was_tried.set()
            await self._write_until_closed(connection)

    async def _take_over(self, connection: Connection) -> None:
        """Own what is ours once more, and what is nobody's."""
        while True:
            await self._claim(connection)
            standings = await store.standings(connection, list(self._runs))
            if not any(
                one.owner in self._former_owners and not one.has_ended for one in standings.values()
            ):
                break
            await anyio.sleep(_LOCK_POLL_S)  # until Postgres has noticed that we were gone
        for run_id, run in list(self._runs.items()):
            standing = standings.get(run_id)
            if standing is None:
                run.is_stored = False
                for log in run.logs.values():
                    log.num_written = 0
                self._note(run)
            elif standing.owner not in (self._owner, *self._former_owners):
                logger.warning("run %s is at work on another server by now", run_id)
                self._give_away(run_id)
            elif standing.has_ended:  # the answer to our last write was lost
                self._drop(run)

    async def _claim(self, connection: Connection) -> None:
        """Take over the runs of servers that are gone."""
        async with self.taking_over:
            claimed = await store.claim(connection, self._owner, list(self._tenants))
            unknown = [run_id for run_id in claimed if run_id not in self._runs]
            if unknown:
                logger.info("going on with %d runs of a server that is gone", len(unknown))
            for start in range(0, len(unknown), _LOADED_AT_ONCE):
                batch = unknown[start : start + _LOADED_AT_ONCE]
                for stored in await store.load(connection, batch):
                    self._hand_over(stored)

    def _hand_over(self, stored: StoredRun) -> None:
        try:
            self.adopt(stored, self._tenants[stored.tenant])
        except Exception:
            # One run that cannot be restored must keep neither the others nor the server from it.
            logger.exception("run %s cannot be gone on with", stored.id)

    async def _write_until_closed(self, connection: Connection) -> None:
        claim_s = anyio.current_time() + _CLAIM_EVERY_S
        prune_s = anyio.current_time()
        while self._unwritten or not self._is_closing:
            self._wanted = anyio.Event()
            if self._unwritten:
                await self._write(connection)
            now_s = anyio.current_time()
            if now_s >= prune_s and not self._is_closing:
                before_s = self.now_wall_s() - self._ttl_s
                await store.prune(connection, before_s=before_s, max_bytes=self._max_bytes)
                prune_s = now_s + _PRUNE_EVERY_S
            if now_s >= claim_s and not self._is_closing:
                await self._claim(connection)
                claim_s = now_s + _CLAIM_EVERY_S
            if not self._unwritten and not self._is_closing:
                with anyio.move_on_after(min(claim_s, prune_s) - now_s):
                    await self._wanted.wait()

    async def _write(self, connection: Connection) -> None:
        batch = _Batch()
        for run in list(self._unwritten.values()):
            try:
                batch.add(run)
            except Exception:
                # What cannot be written of one run must not keep the others from it.
                logger.exception("run %s cannot be recorded any further", run.new.id)
                self._drop(run)
            if batch.num_bytes > _MAX_BATCH_BYTES:
                break
        stalled = asyncio.get_running_loop().call_later(_STALL_S, self._go_down)
        try:
            await store.write(connection, self._owner, batch.new, batch.chunks, batch.ends)
        finally:
            stalled.cancel()
        self._is_up = True
        for run, num_bytes in batch.runs:
            run.is_stored = True
            run.num_bytes = num_bytes
        for log, num_written in batch.logs:
            log.num_written = num_written
            log.events.show(num_written)
        for run, _ in batch.runs:
            for path in [
                path for path, log in run.logs.items() if path and log.has_ended and log.is_written
            ]:
                del run.logs[path]
            if run.is_written:
                self._unwritten.pop(run.new.id, None)
                if run.logs[""].has_ended:
                    self._drop(run)
        self._tell()


class _Batch:
    """What one transaction writes. runs: with the bytes stored of each; logs: how far."""

    def __init__(self) -> None:
        self.new: list[NewRun] = []
        self.chunks: list[EventChunk] = []
        self.ends: list[RunEnd] = []
        self.runs: list[tuple[Recorded, int]] = []
        self.logs: list[tuple[_Log, int]] = []
        self.num_bytes = 0

    def add(self, run: Recorded) -> None:
        """All that is unwritten of a run: whatever is written is its state at one moment."""
        chunks = [
            EventChunk(
                run_id=run.new.id,
                path=path,
                first_number=fresh[0].sequence_number,
                events=_encoded(fresh, run.wall_offset_s),
            )
            for path, log in run.logs.items()
            if (fresh := log.events.since(log.num_written))
        ]
        num_bytes = run.num_bytes + sum(len(chunk.events) for chunk in chunks)
        if not run.is_stored:
            self.new.append(run.new)
        self.chunks += chunks
        self.logs += [(log, len(log.events)) for log in run.logs.values()]
        last = run.logs[""].last
        if last is not None and last.type in RUN_ENDS:
            end = RunEnd(
                run_id=run.new.id,
                name=run.new.name,
                status=last.type.removeprefix("run."),
                error=last.data.get("error"),
                finished_s=last.at_s + run.wall_offset_s,
                num_bytes=num_bytes,
            )
            self.ends.append(end)
        self.num_bytes += num_bytes - run.num_bytes
        self.runs.append((run, num_bytes))


def past_events(values: Sequence[Sequence[Any]], *, wall_offset_s: float) -> list[RunEvent]:
    """Stored events, with their times by a clock that is so far behind the wall's."""
    return [
        RunEvent(
            sequence_number=place, type=kind, at_s=at_s - wall_offset_s, node_id=node_id, data=data
        )
        for place, (kind, at_s, node_id, data) in enumerate(values, start=1)
    ]


def _encoded(events: Sequence[RunEvent], wall_offset_s: float) -> bytes:
    return orjson.dumps(
        [[one.type, one.at_s + wall_offset_s, one.node_id, one.data] for one in events]
    )


def _show(run: Recorded) -> None:
    """What cannot be written now must not wait for it."""
    events = run.logs[""].events
    events.show(len(events))
