"""Items of concurrent callers, equal ones once: texts to embed, pairs to score.

The scheduler says which items go together, and when (`workflows.slots`). Equal items of one tenant
that are in flight are computed once; those of different tenants never are one. Each caller has its
own fate: an item that cannot be worked on fails those who asked for it, and a caller who leaves
takes along only what nobody else waits for.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from workflows.errors import NodeFailed
from workflows.job import Job
from workflows.pooling import BadItem
from workflows.scheduling.messages import Size
from workflows.tickets import ItemWork, OpenTicket

logger = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class BatcherStatistics:
    """Since the start. num_items: asked for. num_shared: of these, answered by an equal one that
    was in flight. num_computed: given to the model, in num_batches calls."""

    num_items: int = 0
    num_shared: int = 0
    num_computed: int = 0
    num_batches: int = 0


@dataclass(frozen=True, slots=True)
class Batched(Generic[V]):
    """One item's value. is_shared: someone else's item was the one that was computed."""

    value: V
    is_shared: bool


@dataclass(slots=True, eq=False)
class _Entry(Generic[K, V]):
    """One item in flight. ticket: with which it waits for its batch."""

    tenant: str
    item: K
    done: anyio.Event = field(default_factory=anyio.Event)
    value: V | None = None
    failure: NodeFailed | None = None
    num_waiters: int = 0
    ticket: OpenTicket | None = None
    is_charged: bool = False


class ItemBatcher(Generic[K, V]):
    """The items of one model.

    work: computes a batch, value by value; raises BadItem or NodeFailed. resource, profile: see
    `Job.items`. chars: the length of an item.
    """

    def __init__(
        self,
        work: Callable[[Sequence[K]], Awaitable[Sequence[V]]],
        *,
        resource: str,
        profile: str,
        chars: Callable[[K], int],
    ) -> None:
        self._work = work
        self._resource = resource
        self._profile = profile
        self._chars = chars
        self._in_flight: dict[tuple[str, K], _Entry[K, V]] = {}
        self._item_work = ItemWork(self._run, self._abandon)
        self.statistics = BatcherStatistics()

    async def submit(self, job: Job, tenant: str, items: Sequence[K]) -> list[Batched[V]]:
        """The values of the items, in order. Raises NodeFailed, of the first item that failed."""
        entries: dict[K, _Entry[K, V]] = {}
        for item in items:
            if item not in entries:
                entries[item] = self._join(tenant, item)
        self.statistics.num_items += len(items)
        try:
            await self._worked_on(job, list(entries.values()))
            # Who was stopped in that moment takes nothing, and is charged nothing.
            await checkpoint_if_cancelled()
        finally:
            for entry in entries.values():
                self._leave(entry)
        return [self._collected(entries[item]) for item in items]

    async def _worked_on(self, job: Job, entries: list[_Entry[K, V]]) -> None:
        """Until all have a value. Raises NodeFailed."""
        new = [entry for entry in entries if entry.ticket is None]
        also = {entry.ticket: None for entry in entries if entry.ticket is not None}
        size = Size(len(new), sum(self._chars(entry.item) for entry in new))
        async with job.items(
            self._resource,
            new,
            profile=self._profile,
            size=size,
            also=tuple(also),
            work=self._item_work,
        ) as ticket:
            for entry in new:
                entry.ticket = ticket
            for entry in entries:
                await entry.done.wait()
                if entry.failure is not None:
                    raise _again(entry.failure)

    def _join(self, tenant: str, item: K) -> _Entry[K, V]:
        entry = self._in_flight.get((tenant, item))
        if entry is None:
            entry = self._in_flight[tenant, item] = _Entry(tenant, item)
        entry.num_waiters += 1
        return entry

    def _leave(self, entry: _Entry[K, V]) -> None:
        entry.num_waiters -= 1
        if not entry.num_waiters and entry.ticket is None:
            self._forget(entry)

    def _collected(self, entry: _Entry[K, V]) -> Batched[V]:
        """The first who takes a value is the one that it was computed for."""
        is_shared, entry.is_charged = entry.is_charged, True
        self.statistics.num_shared += is_shared
        assert entry.value is not None
        return Batched(entry.value, is_shared)

    def _forget(self, entry: _Entry[K, V]) -> None:
        key = (entry.tenant, entry.item)
        if self._in_flight.get(key) is entry:
            del self._in_flight[key]

    async def _run(self, entries: Sequence[_Entry[K, V]]) -> None:
        """Give every entry its value or its failure. Raises NodeFailed if the model is not there,
        and leaves the entries to `_abandon`."""
        for entry in entries:
            if not entry.num_waiters:
                self._forget(entry)
        entries = [entry for entry in entries if entry.num_waiters]
        if not entries:
            return
        self.statistics.num_batches += 1
        self.statistics.num_computed += len(entries)
        try:
            values = await self._work([entry.item for entry in entries])
        except BadItem as bad:
            self._finish(entries[bad.index], failure=bad.failure)
            await self._run([*entries[: bad.index], *entries[bad.index + 1 :]])
        except NodeFailed as failure:
            await self._run_apart(entries, failure)
        except Exception:
            # The boundary of the model's own code: its bug ends these items, not the server.
            logger.exception("a batch of %d items failed", len(entries))
            bug = NodeFailed("internal error", code="internal_error", is_retryable=False)
            self._abandon(entries, bug)
        else:
            for entry, value in zip(entries, values, strict=True):
                self._finish(entry, value=value)

    async def _run_apart(self, entries: list[_Entry[K, V]], failure: NodeFailed) -> None:
        """A model that is not there fails all; one item that it refuses is looked for."""
        if failure.is_retryable:
            raise failure
        if len(entries) == 1:
            self._finish(entries[0], failure=failure)
            return
        middle = len(entries) // 2
        await self._run(entries[:middle])
        await self._run(entries[middle:])

    def _abandon(self, entries: Sequence[_Entry[K, V]], failure: NodeFailed) -> None:
        for entry in entries:
            if not entry.done.is_set():
                self._finish(entry, failure=failure)

    def _finish(
        self,
        entry: _Entry[K, V],
        *,
        value: V | None = None,
        failure: NodeFailed | None = None,
    ) -> None:
        entry.value, entry.failure = value, failure
        self._forget(entry)
        entry.done.set()


def _again(failure: NodeFailed) -> NodeFailed:
    """The same failure for another caller: an exception that is raised twice grows."""
    return NodeFailed(failure.message, code=failure.code, is_retryable=failure.is_retryable)
