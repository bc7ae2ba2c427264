"""Runs workflows: carries out what `workflows.run_state` decides, and keeps what has ended a while.

Every node's work is a task of its own. Nothing here decides what runs next.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

import anyio
import orjson
from anyio.abc import TaskGroup

from workflows.checked import CheckedNode, CheckedWorkflow
from workflows.errors import (
    InvalidWorkflow,
    JournalUnavailable,
    KeyReused,
    NodeFailed,
    RunElsewhere,
    RunNotFound,
    TooManyRuns,
)
from workflows.execution import NodeExecutor
from workflows.input_schema import complete_inputs, known_inputs
from workflows.operators.base import Foreseeing, NodeContext, NodeResult
from workflows.past_run import PastRun, past_run
from workflows.run import Run, RunKey, new_run_id
from workflows.run_journal import RunJournal
from workflows.run_progress import ENDED
from workflows.run_restoring import (
    end_lost_run,
    new_row,
    restored_run,
    run_inside,
    stored_events,
)
from workflows.run_slots import RunSlots
from workflows.run_state import (
    Command,
    ForeseeNode,
    Happened,
    RunState,
    StartNode,
    StopNode,
)
from workflows.shared_work import SharedWork
from workflows.slots import Slots
from workflows.stores.runs import StoredRun

logger = logging.getLogger(__name__)

# Before the ids of nodes in whose name something is done before they are ready.
_AHEAD = "ahead of "
# Of a cancelled one the scheduler learns with the end of its run.
_NODE_ENDS = frozenset({"node.completed", "node.failed", "node.skipped"})


class WorkflowService:
    """An async context manager; leaving it ends the work of every run.

    slots: where nodes get slots for their work; entered and left with the service.
    max_active: runs at once. max_kept, max_kept_s: how many ended runs can still be asked for, and
    for how long. max_cache_bytes: of results that equal nodes may use again.
    max_nested: runs inside one run, all together. max_run_bytes: of the outputs of one run's nodes,
    as JSON. max_kept_bytes: of those of all ended runs.
    journal: keeps runs beyond the end of the process; those that are at work then are gone on with
    by the next one. compiled: the workflow of a document, for those; raises InvalidWorkflow.
    Without a journal all runs are cancelled at the end.
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
        journal: RunJournal | None = None,
        compiled: Callable[[Any], CheckedWorkflow] | None = None,
    ) -> None:
        self.slots = slots or Slots()
        assert (journal is None) == (compiled is None), "they belong together"
        self._journal = journal
        self._compiled = compiled
        self._keyed: dict[tuple[str, str], Run] = {}
        self._turns: WeakValueDictionary[tuple[str, str], anyio.Lock] = WeakValueDictionary()
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
    def journal(self) -> RunJournal | None:
        return self._journal

    @property
    def num_active(self) -> int:
        return len(self._active)

    async def __aenter__(self) -> Self:
        await self.slots.__aenter__()
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._executor = NodeExecutor(self.shared_work, self._group)
        if self._journal is not None:
            self._journal.adopt, self._journal.abandon = self._adopt, self._abandon
            await self._journal.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._group is not None
        try:
            if self._journal is not None:
                await self._journal.__aexit__(exc_type, exc, traceback)
        finally:
            for run in list(self._active.values()):
                self.cancel(run)
            self._group.cancel_scope.cancel()
            try:
                await self._group.__aexit__(exc_type, exc, traceback)
            finally:
                await self.slots.__aexit__(exc_type, exc, traceback)

    async def suspend(self) -> None:
        """Stop the work of runs that the journal keeps. It will be gone on with."""
        if self._journal is not None:
            await self._journal.close()

    async def ready(self) -> None:
        """Wait until runs can be submitted. Raises JournalUnavailable."""
        if self._journal is not None:
            await self._journal.ready()

    async def written(self, run: Run) -> None:
        """Wait until a run is on record, to be gone on with whatever happens. Raises
        JournalUnavailable."""
        if self._journal is not None and run.recorded is not None:
            await self._journal.written(run.recorded)

    def submit(
        self,
        workflow: CheckedWorkflow,
        inputs: Mapping[str, Any],
        *,
        tenant: str,
        wall_s: float = 0.0,
    ) -> Run:
        """Start a run. Raises InvalidWorkflow for inputs that the workflow does not take,
        TooManyRuns, and JournalUnavailable."""
        if self._journal is not None and not self._journal.is_up:
            raise JournalUnavailable("runs cannot be recorded at the moment")
        run = self._new_run(workflow, inputs, tenant=tenant, wall_s=wall_s, key=None)
        self._begin(run, is_stored=False)
        return run

    async def submit_once(
        self,
        workflow: CheckedWorkflow,
        inputs: Mapping[str, Any],
        *,
        tenant: str,
        wall_s: float,
        key: RunKey,
    ) -> Run | PastRun:
        """The run of a key: the one that was started with it, or a new one.

        Raises what `submit` raises, and KeyReused if the key stands for another request, and
        RunElsewhere.
        """
        name, asked_s = (tenant, key.text), anyio.current_time()
        turn = self._turns.setdefault(name, anyio.Lock())
        async with turn:
            run: Run | PastRun
            if name in self._keyed:
                run = self._keyed[name]
            else:
                wall_s += anyio.current_time() - asked_s
                fresh = self._new_run(workflow, inputs, tenant=tenant, wall_s=wall_s, key=key)
                # Who leaves now must not leave a run behind that is stored and never begun.
                with anyio.CancelScope(shield=True):
                    run = await self._begin_once(fresh)
        if run.request_hash != key.request_hash:
            raise KeyReused("this Idempotency-Key was used with another body")
        if isinstance(run, PastRun) and run.state.finished_s is None:
            raise RunElsewhere(f"run {run.id} is at work on another server; ask that one")
        return run

    async def _begin_once(self, run: Run) -> Run | PastRun:
        if self._journal is not None:
            await self._journal.ready()
            other = await self._journal.add(new_row(run, self._journal.identity(run.tenant)))
            if other is not None:
                return await self._of_key(other, run.tenant)
        self._begin(run, is_stored=True)
        return run

    async def _of_key(self, stored: StoredRun, tenant: str) -> Run | PastRun:
        """The run that a key stood for already."""
        assert self._journal is not None
        async with self._journal.taking_over:
            here = self._active.get(stored.id) or self._kept.get(stored.id)
            if here is None and stored.finished_s is None and self._journal.is_ours(stored):
                # It was stored, but Postgres' word of that was lost: it has not begun.
                self._adopt(stored, tenant)
                here = self._active.get(stored.id)
        return here or past_run(stored)

    def _new_run(
        self,
        workflow: CheckedWorkflow,
        inputs: Mapping[str, Any],
        *,
        tenant: str,
        wall_s: float,
        key: RunKey | None,
    ) -> Run:
        """Raises InvalidWorkflow and TooManyRuns."""
        if len(self._active) >= self._max_active:
            raise TooManyRuns(f"{self._max_active} runs are active; try again later")
        inputs = complete_inputs(workflow.spec, inputs)
        return Run(
            id=new_run_id(),
            tenant=tenant,
            wall_s=wall_s,
            key=key,
            state=RunState(workflow, inputs, now_s=anyio.current_time()),
        )

    def _begin(self, run: Run, *, is_stored: bool) -> None:
        if self._journal is not None:
            run.recorded = self._journal.record(
                new_row(run, self._journal.identity(run.tenant)),
                run.events,
                wall_offset_s=run.wall_s - run.state.created_s,
                is_stored=is_stored,
            )
        self._enter(run)

    def _enter(self, run: Run) -> None:
        """Work on a run, from its beginning or from where it was."""
        if run.root is None:
            self._active[run.id] = run
            if run.key is not None:
                self._keyed[run.tenant, run.key.text] = run
        run.slots = RunSlots(
            self.slots,
            run.state.workflow,
            run_id=run.id,
            root_id=(run.root or run).id,
            tenant=run.tenant,
            created_s=run.state.created_s,
        )
        for name, node in run.state.nodes.items():
            if node.status in ENDED:
                run.slots.node_ended(name)
        now_s, deadline_s = anyio.current_time(), run.state.workflow.spec.deadline_s
        if deadline_s is not None and not run.state.has_ended:
            self._spawn(run, "", self._expire, run, run.state.created_s + deadline_s - now_s)
        self._carry_out(run, run.state.resume(now_s=now_s), now_s)
        self._carry_out(run, run.state.foresee(now_s=now_s), now_s)

    def _adopt(self, stored: StoredRun, tenant: str) -> None:
        """Go on with a run of a process that is gone."""
        assert self._journal is not None
        assert self._compiled is not None
        offset_s = self._journal.now_wall_s() - anyio.current_time()
        try:
            workflow = self._compiled(stored.document)
        except InvalidWorkflow as error:
            events = stored_events(stored, wall_offset_s=offset_s)
            self._journal.record_again(stored, events, wall_offset_s=offset_s)
            end_lost_run(stored, events, error)
            return
        run = restored_run(stored, tenant, workflow, wall_offset_s=offset_s)
        run.recorded = self._journal.record_again(stored, run.events, wall_offset_s=offset_s)
        self._enter(run)

    def _abandon(self, run_id: str) -> None:
        """Stop the work of a run, without an end: somebody else goes on with it. It may have ended
        here, if nobody knows yet."""
        run = self._active.pop(run_id, None)
        if run is None:
            run = self._kept.pop(run_id, None)
            if run is None:
                return
            self._kept_bytes -= run.num_bytes
        if run.key is not None:
            self._keyed.pop((run.tenant, run.key.text), None)
        run.is_suspended = True
        self._stop(run)
        run.events.cut()
        run.ended.set()

    def _stop(self, run: Run) -> None:
        """Stop a run's work, and say nothing of it."""
        for scope in list(run._scopes.values()):
            scope.cancel()
        self._end_if_idle(run)

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
        now_s = anyio.current_time()
        self._carry_out(run, run.state.cancel(now_s=now_s), now_s)

    def _carry_out(self, run: Run, commands: Sequence[Command], now_s: float) -> None:
        """now_s: when the run decided on them, so that its events tell the times that it knows."""
        if (run.root or run).is_suspended:
            return
        for command in commands:
            match command:
                case Happened(type=kind, node_id=node_id, data=data):
                    run.events.add(kind, node_id, data, now_s=now_s)
                    if kind in _NODE_ENDS and node_id is not None and run.slots is not None:
                        run.slots.node_ended(node_id)
                case StartNode(node=node):
                    run.stop_task(_AHEAD + node.spec.id)
                    self._spawn(run, node.spec.id, self._work, run, command)
                case StopNode(node_id=node_id):
                    run.stop_task(node_id)
                case ForeseeNode(node=node, params=params):
                    assert isinstance(node.operator, Foreseeing)
                    foresee = partial(node.operator.foresee, params, tenant=run.tenant)
                    # What is under way is a beginning of this.
                    run.stop_task(_AHEAD + node.spec.id)
                    self._spawn(run, _AHEAD + node.spec.id, foresee)
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
            except Exception:
                # A bug; the runs of others go on, and this one without what it foresaw.
                logger.exception("run %s: a fault in %r", run.id, key)
                if not key.startswith(_AHEAD):
                    self.cancel(run)
            finally:
                run._num_tasks -= 1
                if run.state.has_ended or (run.root or run).is_suspended:
                    self._end_if_idle(run)

        self._group.start_soon(task)

    def _end_if_idle(self, run: Run) -> None:
        """Close a run that has ended or was stopped, as soon as none of its tasks is left."""
        for key, scope in run._scopes.items():
            if key.startswith(_AHEAD) or not key:
                scope.cancel()
        if run._num_tasks:
            return
        if run.slots is not None:
            run.slots.ended(is_completed=run.state.status == "completed")
        if run.root is None:
            self.shared_work.release(run.id)
        if run.ended.is_set():
            return
        run.events.close()
        run.ended.set()
        if run.root is None and not run.is_suspended:
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
            if run.key is not None:
                self._keyed.pop((run.tenant, run.key.text), None)

    async def _expire(self, run: Run, left_s: float) -> None:
        await anyio.sleep(max(0.0, left_s))
        now_s = anyio.current_time()
        self._carry_out(run, run.state.expire(now_s=now_s), now_s)

    async def _work(self, run: Run, start: StartNode) -> None:
        """One try of one node, and its report."""
        node_id, state = start.node.spec.id, run.state
        await anyio.sleep(start.delay_s)
        now_s = anyio.current_time()
        self._carry_out(run, state.work_started(node_id, now_s=now_s), now_s)
        root = run.root or run
        assert run.slots is not None, "it is worked on"
        context = NodeContext(
            run_id=run.id,
            node_id=node_id,
            tenant=run.tenant,
            idempotency_key=f"{root.id}:{run.path}{node_id}",
            job=run.slots.job(node_id),
            workflow_digest=root.workflow_digest,
            attempt=start.attempt,
            # Nobody watches the runs inside of others.
            emit=partial(_log, run, "node.delta", node_id, "text") if run is root else _nobody,
            pass_on=partial(self._pass_on, run, node_id) if state.is_heard(node_id) else _nobody,
            note_shared=partial(_log, run, "node.shared", node_id, "shared"),
            run_nested=partial(self._run_nested, run, start.node),
        )
        assert self._executor is not None
        recorded = partial(self._recorded, root)
        try:
            if root.num_effects > root.num_effects_recorded:
                await recorded()
            outcome = await self._executor.execute(start, context, recorded=recorded)
            self._count_bytes(run, outcome.result)
        except NodeFailed as error:
            self._fail(run, node_id, error)
            return
        except Exception:
            # A bug around an operator ends its run, not those of others.
            logger.exception("node %s of run %s failed", node_id, run.id)
            bug = NodeFailed("internal error", code="internal_error", is_retryable=False)
            self._fail(run, node_id, bug)
            return
        root.num_effects += outcome.is_write
        now_s = anyio.current_time()
        commands = state.work_completed(
            node_id,
            outcome.result,
            now_s=now_s,
            shared=outcome.shared,
            shared_reason=outcome.reason,
        )
        self._carry_out(run, commands, now_s)
        self._carry_out(run, state.foresee(now_s=now_s), now_s)
        if start.node.nested is not None:
            _forget_inside(root, f"{run.path}{node_id}[")

    def _fail(self, run: Run, node_id: str, error: NodeFailed) -> None:
        now_s = anyio.current_time()
        self._carry_out(run, run.state.work_failed(node_id, error, now_s=now_s), now_s)

    def _pass_on(self, run: Run, node_id: str, text: str) -> None:
        now_s = anyio.current_time()
        self._carry_out(run, run.state.work_said(node_id, text, now_s=now_s), now_s)

    async def _recorded(self, root: Run) -> None:
        """Wait until all that a run has done is on record. Raises NodeFailed."""
        num_effects = root.num_effects
        try:
            await self.written(root)
        except JournalUnavailable as error:
            message = error.message
            raise NodeFailed(message, code="store_unavailable", is_retryable=True) from None
        root.num_effects_recorded = max(root.num_effects_recorded, num_effects)

    def _count_bytes(self, run: Run, result: NodeResult) -> None:
        """Raises NodeFailed if the run would hold too much."""
        root = run.root or run
        root.num_bytes += len(orjson.dumps(result.output))
        if root.num_bytes > self._max_run_bytes:
            # What the run does not keep, it must not hold for others.
            self.shared_work.release(root.id)
            message = f"a run may hold {self._max_run_bytes:,} bytes of outputs at most"
            raise NodeFailed(message, code="output_too_large", is_retryable=False)

    async def _run_nested(
        self,
        run: Run,
        node: CheckedNode,
        inputs: Mapping[str, Any],
        added: Mapping[str, Any],
        key: str,
    ) -> NodeResult:
        """A run inside a node. It is cancelled with the node, and counts to the run around it.

        Where there was one of that key before, it goes on: in an earlier try of the node, or before
        the server's end.
        """
        assert node.nested is not None
        root = run.root or run
        root.num_nested += 1
        if root.num_nested > self._max_nested:
            message = f"a run may have {self._max_nested} runs inside at most"
            raise NodeFailed(message, code="too_many_runs", is_retryable=False)
        try:
            workflow = node.nested.spec
            completed = complete_inputs(workflow, {**inputs, **known_inputs(workflow, added)})
        except InvalidWorkflow as error:
            raise NodeFailed(error.message, code="invalid_input", is_retryable=False) from None
        inner = run_inside(run, node.nested, completed, f"{run.path}{node.spec.id}[{key}].")
        if self._journal is not None and root.recorded is not None:
            self._journal.record_inside(root.recorded, inner.path, inner.events)
        self._enter(inner)
        try:
            await inner.ended.wait()
        finally:
            if root.is_suspended:
                self._stop(inner)
            else:
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


def _forget_inside(root: Run, prefix: str) -> None:
    """The runs inside a node that is done are of no use any more."""
    for path in [path for path in root.inside if path.startswith(prefix)]:
        del root.inside[path]


def _nobody(text: str) -> None:
    """Takes what a node says where nobody listens."""


def _log(run: Run, kind: str, node_id: str, name: str, value: str) -> None:
    """One thing that a node says while it works. It may have been stopped in this moment."""
    if run.state.nodes[node_id].status == "running":
        run.events.add(kind, node_id, {name: value}, now_s=anyio.current_time())
