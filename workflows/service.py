"""Runs workflows: carries out what `workflows.run_state` decides, and keeps what has ended a while.

Every node's work is a task of its own. Nothing here decides what runs next.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio
import orjson
from anyio.abc import TaskGroup

from workflows.checked import CheckedNode, CheckedWorkflow, complete_inputs
from workflows.errors import InvalidWorkflow, NodeFailed, RunNotFound, TooManyRuns
from workflows.execution import NodeExecutor
from workflows.operators.base import NodeContext, NodeResult
from workflows.run_events import RunEvents
from workflows.run_slots import RunSlots
from workflows.run_state import Command, Happened, RunState, StartNode, StopNode
from workflows.shared_work import SharedWork
from workflows.slots import Slots

# Of a cancelled one the scheduler learns with the end of its run.
_NODE_ENDS = frozenset({"node.completed", "node.failed", "node.skipped"})


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """One run.

    wall_s: the wall clock when it was created. root: the outermost run around it, of which
    num_nested counts those inside, and num_bytes what all their nodes have put out. slots: its
    place in the scheduler. ended: is set once its last event was logged and all of its work has
    stopped.
    """

    id: str
    tenant: str
    wall_s: float
    state: RunState
    slots: RunSlots
    root: Run | None = None
    num_nested: int = 0
    num_bytes: int = 0
    events: RunEvents = field(default_factory=RunEvents)
    ended: anyio.Event = field(default_factory=anyio.Event)
    _scopes: dict[str, anyio.CancelScope] = field(default_factory=dict)
    _num_tasks: int = 0

    def wall_at(self, at_s: float) -> float:
        """The wall clock at a moment of the event loop's clock."""
        return self.wall_s + (at_s - self.state.created_s)


class WorkflowService:
    """An async context manager; leaving it cancels every run.

    slots: where nodes get slots for their work; entered and left with the service.
    max_active: runs at once. max_kept, max_kept_s: how many ended runs can still be asked for, and
    for how long. max_cache_bytes: of results that equal nodes may use again.
    max_nested: runs inside one run, all together. max_run_bytes: of the outputs of one run's nodes,
    as JSON. max_kept_bytes: of those of all ended runs.
    """

    def __init__(
        self,
        slots: Slots | None = None,
        *,
        max_active: int = 1000,
        max_kept: int = 1000,
        max_kept_s: float = 3600.0,
        max_cache_bytes: int = 64 * 1024 * 1024,
        max_nested: int = 10_000,
        max_run_bytes: int = 64 * 1024 * 1024,
        max_kept_bytes: int = 256 * 1024 * 1024,
    ) -> None:
        self.slots = slots or Slots()
        self._max_active = max_active
        self._max_kept = max_kept
        self._max_kept_s = max_kept_s
        self._max_nested = max_nested
        self._max_run_bytes = max_run_bytes
        self._max_kept_bytes = max_kept_bytes
        self._kept_bytes = 0
        self._active: dict[str, Run] = {}
        self._kept: OrderedDict[str, Run] = OrderedDict()
        self._group: TaskGroup | None = None
        self.shared_work = SharedWork(max_bytes=max_cache_bytes)
        self._executor: NodeExecutor | None = None

    @property
    def num_active(self) -> int:
        return len(self._active)

    async def __aenter__(self) -> Self:
        await self.slots.__aenter__()
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._executor = NodeExecutor(self.shared_work, self._group)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._group is not None
        for run in list(self._active.values()):
            self.cancel(run)
        self._group.cancel_scope.cancel()
        try:
            await self._group.__aexit__(exc_type, exc, traceback)
        finally:
            await self.slots.__aexit__(exc_type, exc, traceback)

    def submit(
        self,
        workflow: CheckedWorkflow,
        inputs: Mapping[str, Any],
        *,
        tenant: str,
        wall_s: float = 0.0,
    ) -> Run:
        """Start a run. Raises InvalidWorkflow for inputs that the workflow does not take, and
        TooManyRuns."""
        if len(self._active) >= self._max_active:
            raise TooManyRuns(f"{self._max_active} runs are active; try again later")
        run = self._start(workflow, inputs, tenant=tenant, wall_s=wall_s, root=None)
        if not run.ended.is_set():
            self._active[run.id] = run
        return run

    def _start(
        self,
        workflow: CheckedWorkflow,
        inputs: Mapping[str, Any],
        *,
        tenant: str,
        wall_s: float,
        root: Run | None,
    ) -> Run:
        """Raises InvalidWorkflow."""
        inputs = complete_inputs(workflow.spec, inputs)
        now_s = anyio.current_time()
        run_id = f"run_{secrets.token_hex(12)}"
        run = Run(
            id=run_id,
            tenant=tenant,
            wall_s=wall_s,
            root=root,
            slots=RunSlots(
                self.slots,
                workflow,
                run_id=run_id,
                root_id=run_id if root is None else root.id,
                tenant=tenant,
                now_s=now_s,
            ),
            state=RunState(
                workflow,
                inputs,
                now_s=now_s,
                rendering=None if root is None else root.state.rendering,
            ),
        )
        if workflow.spec.deadline_s is not None:
            self._spawn(run, "", self._expire, run, workflow.spec.deadline_s)
        self._carry_out(run, run.state.start(now_s=now_s))
        return run

    def find(self, run_id: str, *, tenant: str) -> Run:
        """A run that is active or kept. Raises RunNotFound, also for another tenant's."""
        self._forget_old()
        run = self._active.get(run_id) or self._kept.get(run_id)
        if run is None or run.tenant != tenant:
            raise RunNotFound(f"there is no run {run_id[:64]!r}")
        return run

    def runs(self, *, tenant: str) -> list[Run]:
        """A tenant's runs, the newest first."""
        self._forget_old()
        runs = [*self._kept.values(), *self._active.values()]
        mine = [run for run in reversed(runs) if run.tenant == tenant]
        return sorted(mine, key=lambda run: run.state.created_s, reverse=True)

    def cancel(self, run: Run) -> None:
        """Stop a run. Does nothing if it has ended."""
        self._carry_out(run, run.state.cancel(now_s=anyio.current_time()))

    def _carry_out(self, run: Run, commands: list[Command]) -> None:
        now_s = anyio.current_time()
        for command in commands:
            match command:
                case Happened(type=kind, node_id=node_id, data=data):
                    run.events.add(kind, node_id, data, now_s=now_s)
                    if kind in _NODE_ENDS and node_id is not None:
                        run.slots.node_ended(node_id)
                case StartNode(node=node):
                    self._spawn(run, node.spec.id, self._work, run, command)
                case StopNode(node_id=node_id):
                    run._scopes[node_id].cancel()
        if run.state.has_ended:
            self._end_if_idle(run)

    def _spawn(self, run: Run, key: str, work: Callable[..., Any], *args: Any) -> None:
        """Run `work` in a task that can be stopped by `key` (the empty one: with the run)."""
        assert self._group is not None
        scope = anyio.CancelScope()
        run._scopes[key] = scope
        run._num_tasks += 1

        async def task() -> None:
            try:
                with scope:
                    await work(*args)
            finally:
                run._num_tasks -= 1
                if run.state.has_ended:
                    self._end_if_idle(run)

        self._group.start_soon(task)

    def _end_if_idle(self, run: Run) -> None:
        """Close a run that has ended, as soon as none of its tasks is left."""
        deadline = run._scopes.get("")
        if deadline is not None:
            deadline.cancel()
        if run._num_tasks or run.ended.is_set():
            return
        run.events.close()
        run.slots.ended(is_completed=run.state.status == "completed")
        run.ended.set()
        if run.root is None:
            self._active.pop(run.id, None)
            self._kept[run.id] = run
            self._kept_bytes += run.num_bytes
            self._forget_old()

    def _forget_old(self) -> None:
        oldest_s = anyio.current_time() - self._max_kept_s
        while self._kept:
            run = next(iter(self._kept.values()))
            ended_s = run.state.finished_s
            assert ended_s is not None
            is_room = len(self._kept) <= self._max_kept and self._kept_bytes <= self._max_kept_bytes
            if is_room and ended_s >= oldest_s:
                return
            del self._kept[run.id]
            self._kept_bytes -= run.num_bytes

    async def _expire(self, run: Run, deadline_s: float) -> None:
        await anyio.sleep(deadline_s)
        self._carry_out(run, run.state.expire(now_s=anyio.current_time()))

    async def _work(self, run: Run, start: StartNode) -> None:
        """One try of one node, and its report."""
        node_id, state = start.node.spec.id, run.state
        await anyio.sleep(start.delay_s)
        self._carry_out(run, state.work_started(node_id, now_s=anyio.current_time()))
        context = NodeContext(
            run_id=run.id,
            node_id=node_id,
            tenant=run.tenant,
            idempotency_key=f"{run.id}:{node_id}",
            job=run.slots.job(node_id),
            attempt=start.attempt,
            emit=partial(_log, run, "node.delta", node_id, "text"),
            note_shared=partial(_log, run, "node.shared", node_id, "shared"),
            run_nested=partial(self._run_nested, run, start.node),
        )
        assert self._executor is not None
        try:
            outcome = await self._executor.execute(start, context)
            self._count_bytes(run, outcome.result)
        except NodeFailed as error:
            now_s = anyio.current_time()
            self._carry_out(run, state.work_failed(node_id, error, now_s=now_s))
            return
        commands = state.work_completed(
            node_id,
            outcome.result,
            now_s=anyio.current_time(),
            shared=outcome.shared,
            shared_reason=outcome.reason,
        )
        self._carry_out(run, commands)

    def _count_bytes(self, run: Run, result: NodeResult) -> None:
        """Raises NodeFailed if the run would hold too much."""
        root = run.root or run
        root.num_bytes += len(orjson.dumps(result.output))
        if root.num_bytes > self._max_run_bytes:
            message = f"a run may hold {self._max_run_bytes:,} bytes of outputs at most"
            raise NodeFailed(message, code="output_too_large", is_retryable=False)

    async def _run_nested(self, run: Run, node: CheckedNode, inputs: dict[str, Any]) -> NodeResult:
        """A run inside a node. It is cancelled with the node, and counts to the run around it."""
        assert node.nested is not None
        root = run.root or run
        root.num_nested += 1
        if root.num_nested > self._max_nested:
            message = f"a run may have {self._max_nested} runs inside at most"
            raise NodeFailed(message, code="too_many_runs", is_retryable=False)
        try:
            inner = self._start(
                node.nested, inputs, tenant=run.tenant, wall_s=run.wall_s, root=root
            )
        except InvalidWorkflow as error:
            raise NodeFailed(error.message, code="invalid_input", is_retryable=False) from None
        try:
            await inner.ended.wait()
        finally:
            self.cancel(inner)
            with anyio.CancelScope(shield=True):
                # The run around it has not stopped before this one has.
                await inner.ended.wait()
        failure = inner.state.failure
        if failure is not None:
            message = (
                f"node {failure.node_id}: {failure.message}" if failure.node_id else failure.message
            )
            # Its nodes have used up their own tries.
            raise NodeFailed(message, code=failure.code, is_retryable=False)
        assert inner.state.outputs is not None
        return NodeResult(output=inner.state.outputs, usage=inner.state.usage)


def _log(run: Run, kind: str, node_id: str, name: str, value: str) -> None:
    """One thing that a node says while it works."""
    run.events.add(kind, node_id, {name: value}, now_s=anyio.current_time())
