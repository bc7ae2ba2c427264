"""Equal work is done once: the first who needs it starts it, the others subscribe.

The work belongs to none of them. It runs in a task of its own, until the last subscriber has left;
so nobody's cancellation, timeout or failure touches the others. When it fails, every subscriber
learns that, and decides with its own budget whether to try again; the first to do so starts it
anew, the others find it running.

What has ended is found by those who come later: of pure work, while a run that has used it is
active; of any, for a time that they say.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

import anyio
import orjson
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint_if_cancelled

from workflows.errors import NodeFailed
from workflows.held_results import Finished, HeldResults
from workflows.job import Job, NodeKey
from workflows.operators.base import NodeResult

Emit = Callable[[str], None]
Work = Callable[[Emit], Awaitable[NodeResult]]
# What a node is said to have shared.
Shared = Literal["none", "inflight", "cache", "item"]
# Where a result came from: own work, equal work that was running, an active run, what is kept.
Source = Literal["none", "inflight", "held", "cache"]

# Python's own cost of a kept result, roughly.
_ENTRY_BYTES = 512


@dataclass(slots=True, eq=False)
class _Subscriber:
    run_id: str
    emit: Emit


@dataclass(slots=True, eq=False)
class _Group:
    """One execution, and those who wait for it.

    job: asks for slots for it, on behalf of all of them. is_charged: somebody bears its cost,
    the first who took the result.
    """

    job: Job
    is_pure: bool
    subscribers: dict[_Subscriber, None] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    done: anyio.Event = field(default_factory=anyio.Event)
    finished: Finished | None = None
    error: NodeFailed | None = None
    is_charged: bool = False

    def emit(self, text: str) -> None:
        self.said.append(text)
        for subscriber in self.subscribers:
            subscriber.emit(text)


@dataclass(frozen=True, slots=True)
class _Kept:
    finished: Finished
    num_bytes: int
    kept_s: float


class SharedWork:
    """Work by signature.

    max_bytes: of results that are kept for a time; those used longest ago go first.
    """

    def __init__(self, *, max_bytes: int = 64 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._groups: dict[str, _Group] = {}
        self._held = HeldResults()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self.num_bytes = 0
        self.num_executed = 0
        self.num_shared: dict[Shared, int] = {"inflight": 0, "cache": 0}

    @property
    def num_running(self) -> int:
        return len(self._groups)

    @property
    def num_held(self) -> int:
        """Results that active runs have used."""
        return len(self._held)

    def source(self, key: str, *, ttl_s: float | None) -> Source:
        """What `result` would find now."""
        found = self._find(key, ttl_s)
        if found is not None:
            return found[1]
        return "inflight" if key in self._groups else "none"

    async def result(
        self,
        key: str,
        work: Work,
        *,
        job: Job,
        emit: Emit,
        ttl_s: float | None,
        is_pure: bool,
        tasks: TaskGroup,
    ) -> tuple[NodeResult, Source]:
        """The result of `work`, or of equal work, and where it came from.

        job: for the node that asks; it does the work, unless that runs already. emit: gets all text
        of the output, that from before this call at once. ttl_s: how old a kept result may be, and
        whether this one is kept; None for no. is_pure: see `Identity.is_pure`; the same for equal
        keys. tasks: where the work runs. Raises the work's NodeFailed.
        """
        found = self._find(key, ttl_s)
        if found is not None:
            finished, source = found
            self.num_shared["cache"] += 1
            if source == "cache":
                self._kept.move_to_end(key)
            if is_pure:
                self._held.hold(key, finished, job.node.run_id)
            if finished.said:
                emit(finished.said)
            return finished.result, source
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(job, is_pure)
            tasks.start_soon(self._execute, key, group, work)
        return await self._subscribe(key, group, job.node, emit, ttl_s)

    def release(self, run_id: str) -> None:
        """A run has ended, and all of its work has stopped: what it has used, it holds no more.

        run_id: of the outermost run.
        """
        self._held.release(run_id)

    async def _subscribe(
        self, key: str, group: _Group, node: NodeKey, emit: Emit, ttl_s: float | None
    ) -> tuple[NodeResult, Source]:
        subscriber = _Subscriber(node.run_id, emit)
        if group.said:
            emit("".join(group.said))
        group.subscribers[subscriber] = None
        group.job.join(node)
        try:
            await group.done.wait()
            # Who was stopped in that moment takes nothing, and is charged nothing.
            await checkpoint_if_cancelled()
        finally:
            del group.subscribers[subscriber]
            group.job.leave(node)
            if not group.subscribers and not group.done.is_set():
                group.scope.cancel()
                # Whoever comes now must not wait for what is being stopped.
                self._forget(key, group)
        if group.error is not None:
            error = group.error
            raise NodeFailed(error.message, code=error.code, is_retryable=error.is_retryable)
        assert group.finished is not None
        result = group.finished.result
        if ttl_s is not None and result.may_be_kept:
            self._keep(key, group.finished)
        is_charged, group.is_charged = group.is_charged, True
        if not is_charged:
            return result, "none"
        self.num_shared["inflight"] += 1
        return result, "inflight"

    async def _execute(self, key: str, group: _Group, work: Work) -> None:
        self.num_executed += 1
        try:
            with group.scope:
                result = await work(group.emit)
                group.finished = Finished(result, "".join(group.said))
        except NodeFailed as error:
            group.error = error
        finally:
            self._forget(key, group)
            # At once, so that nobody who comes before they wake does it again.
            self._hold(key, group)
            group.done.set()

    def _hold(self, key: str, group: _Group) -> None:
        finished = group.finished
        if finished is None or not group.is_pure or not finished.result.may_be_kept:
            return
        for subscriber in group.subscribers:
            self._held.hold(key, finished, subscriber.run_id)

    def _forget(self, key: str, group: _Group) -> None:
        if self._groups.get(key) is group:
            del self._groups[key]

    def _find(self, key: str, ttl_s: float | None) -> tuple[Finished, Source] | None:
        held = self._held.find(key)
        if held is not None:
            return held, "held"
        kept = self._kept.get(key)
        if kept is None or ttl_s is None or anyio.current_time() - kept.kept_s > ttl_s:
            return None
        return kept.finished, "cache"

    def _keep(self, key: str, finished: Finished) -> None:
        if key in self._kept:
            self.num_bytes -= self._kept.pop(key).num_bytes
        num_bytes = len(orjson.dumps(finished.result.output)) + len(finished.said.encode())
        num_bytes += _ENTRY_BYTES
        if num_bytes > self._max_bytes:
            return
        self._kept[key] = _Kept(finished, num_bytes, anyio.current_time())
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes
