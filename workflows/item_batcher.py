"""Items of concurrent callers in common batches: texts to embed, pairs to score.

While nothing runs, a batch starts at once with what is there; while one runs, items gather for a
few milliseconds. Equal items of one tenant that are in flight are computed once; those of different
tenants never are one. Each caller has its own fate: an item that cannot be worked on fails those
who asked for it, and a caller who leaves takes along only what nobody else waits for.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from workflows.errors import NodeFailed
from workflows.pooling import BadItem

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
    """One item in flight. batch: that computes it, once it has begun."""

    tenant: str
    item: K
    done: anyio.Event = field(default_factory=anyio.Event)
    value: V | None = None
    failure: NodeFailed | None = None
    num_waiters: int = 0
    batch: _Batch[K, V] | None = None
    is_charged: bool = False


@dataclass(slots=True, eq=False)
class _Batch(Generic[K, V]):
    entries: list[_Entry[K, V]]
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class ItemBatcher(Generic[K, V]):
    """Batches for one model.

    work: computes a batch, value by value; raises BadItem or NodeFailed. group: runs the batches.
    max_batch: items of one. max_wait_s: that an item waits for others while a batch runs.
    """

    def __init__(
        self,
        work: Callable[[Sequence[K]], Awaitable[Sequence[V]]],
        group: TaskGroup,
        *,
        max_batch: int = 64,
        max_wait_s: float = 0.003,
    ) -> None:
        self._work = work
        self._group = group
        self._max_batch = max_batch
        self._max_wait_s = max_wait_s
        self._in_flight: dict[tuple[str, K], _Entry[K, V]] = {}
        self._pending: dict[_Entry[K, V], None] = {}
        self._num_running = 0
        self._is_flush_due = False
        self.statistics = BatcherStatistics()

    async def submit(self, tenant: str, items: Sequence[K]) -> list[Batched[V]]:
        """The values of the items, in order. Raises NodeFailed, of the first item that failed.

        Of a long list only two batches' worth is in flight at a time, so that others get between.
        """
        step = 2 * self._max_batch
        results: list[Batched[V]] = []
        for start in range(0, len(items), step):
            results += await self._submit(tenant, items[start : start + step])
        return results

    async def _submit(self, tenant: str, items: Sequence[K]) -> list[Batched[V]]:
        entries: dict[K, _Entry[K, V]] = {}
        for item in items:
            if item not in entries:
                entries[item] = self._join(tenant, item)
        self.statistics.num_items += len(items)
        self._flush_full()
        try:
            for entry in entries.values():
                await entry.done.wait()
                if entry.failure is not None:
                    raise _again(entry.failure)
        finally:
            for entry in entries.values():
                self._leave(entry)
        return [self._collected(entries[item]) for item in items]

    def _join(self, tenant: str, item: K) -> _Entry[K, V]:
        entry = self._in_flight.get((tenant, item))
        if entry is None:
            entry = _Entry(tenant, item)
            self._in_flight[tenant, item] = entry
            self._pending[entry] = None
        entry.num_waiters += 1
        return entry

    def _leave(self, entry: _Entry[K, V]) -> None:
        entry.num_waiters -= 1
        if entry.num_waiters or entry.done.is_set():
            return
        if entry.batch is None:
            self._pending.pop(entry, None)
            self._forget(entry)
        elif not any(one.num_waiters for one in entry.batch.entries if not one.done.is_set()):
            for one in entry.batch.entries:
                self._forget(one)
            entry.batch.scope.cancel()

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

    def _flush_full(self) -> None:
        """Start the batches that are full, and see to it that the rest starts soon."""
        while len(self._pending) >= self._max_batch:
            self._start_batch()
        if self._pending and not self._is_flush_due:
            self._is_flush_due = True
            self._group.start_soon(self._flush, self._max_wait_s if self._num_running else 0.0)

    async def _flush(self, delay_s: float) -> None:
        await anyio.sleep(delay_s)  # also of nothing: others who are ready come first
        self._is_flush_due = False
        if self._pending:
            self._start_batch()

    def _start_batch(self) -> None:
        entries = list(self._pending)[: self._max_batch]
        batch = _Batch(entries)
        for entry in entries:
            del self._pending[entry]
            entry.batch = batch
        self._num_running += 1
        self._group.start_soon(self._run, batch)

    async def _run(self, batch: _Batch[K, V]) -> None:
        try:
            with batch.scope:
                await self._compute(batch.entries)
        finally:
            self._num_running -= 1
            stopped = NodeFailed("the model was stopped", code="unavailable", is_retryable=True)
            for entry in batch.entries:
                if not entry.done.is_set():
                    self._finish(entry, failure=stopped)

    async def _compute(self, entries: list[_Entry[K, V]]) -> None:
        """Give every entry its value or its failure."""
        entries = [entry for entry in entries if entry.num_waiters]
        if not entries:
            return
        self.statistics.num_batches += 1
        self.statistics.num_computed += len(entries)
        try:
            values = await self._work([entry.item for entry in entries])
        except BadItem as bad:
            self._finish(entries[bad.index], failure=bad.failure)
            await self._compute([*entries[: bad.index], *entries[bad.index + 1 :]])
        except NodeFailed as failure:
            await self._compute_failed(entries, failure)
        except Exception:
            # The boundary of the model's own code: its bug ends these items, not the server.
            logger.exception("a batch of %d items failed", len(entries))
            bug = NodeFailed("internal error", code="internal_error", is_retryable=False)
            for entry in entries:
                self._finish(entry, failure=bug)
        else:
            for entry, value in zip(entries, values, strict=True):
                self._finish(entry, value=value)

    async def _compute_failed(self, entries: list[_Entry[K, V]], failure: NodeFailed) -> None:
        """A model that is not there fails all; one item that it refuses is looked for."""
        if failure.is_retryable or len(entries) == 1:
            for entry in entries:
                self._finish(entry, failure=failure)
            return
        middle = len(entries) // 2
        await self._compute(entries[:middle])
        await self._compute(entries[middle:])

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
