"""The scheduler among real runs: tells it what happens, and carries out what it decides.

    runs, nodes, jobs ──events──► Scheduler ──Dispatch──► a waiting task, or a batch of items
         engines ──sub-nodes──►             ──Reprioritise──► the engine
         fleet ──capacity──►                ──Abort, Expire──► the batch, the waiting task

Events of one turn of the event loop are handled together, so that of several nodes that become
ready at once the best gets the free slot, and not the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self

import anyio
from anyio.abc import TaskGroup

from workflows.errors import NodeFailed
from workflows.job import Job, NodeKey
from workflows.profiler import Profiler
from workflows.scheduling.costs import CostsOfModels
from workflows.scheduling.messages import (
    Abort,
    CapacityChanged,
    Command,
    Dispatch,
    DispatchEnded,
    DispatchProgressed,
    Event,
    Expire,
    Reprioritise,
    Size,
    Tick,
    Ticket,
    TicketJoined,
    TicketLeft,
    TicketReady,
)
from workflows.scheduling.parameters import SchedulerParameters, preset
from workflows.scheduling.pool import PoolStatistics
from workflows.scheduling.ranking import Standing
from workflows.scheduling.scheduler import Scheduler
from workflows.tickets import ItemWork, OpenTicket, SingleWork, Turn

# Where nobody says otherwise. `llm` is not known before the fleet has told.
DEFAULT_RESOURCES = (
    CapacityChanged(resource="llm", num_slots=256, is_preemptible=True),
    CapacityChanged(resource="embed", num_slots=1, max_batch=64, max_wait_s=0.003),
    CapacityChanged(resource="rerank", num_slots=1, max_batch=64, max_wait_s=0.003),
    CapacityChanged(resource="search", num_slots=8),
    CapacityChanged(resource="http", num_slots=64),
    CapacityChanged(resource="web_search", num_slots=8),
)
# Parts into which items may be cut, to be done sooner.
_MAX_SPLIT = 4


@dataclass(slots=True, eq=False)
class _Running:
    """A dispatch. scope: of the batch; None for work in its own task."""

    dispatch: Dispatch
    tickets: list[OpenTicket]
    started_s: float
    scope: anyio.CancelScope | None = None


@dataclass(slots=True)
class Waits:
    """Of one resource, since the start. num_waits: wishes that have begun to be fulfilled."""

    num_dispatches: int = 0
    num_waits: int = 0
    waited_s: float = 0.0


class Slots:
    """An async context manager. All methods are called on its event loop.

    resources: their slots at first. patience_s: how long work waits for a resource that has no
    slots at all; then it gets one, to learn from the resource what is wrong. on_reprioritise: takes
    a work's id and its new head start (see `job.Slot`) when its place among other work of its
    engine changes.
    """

    def __init__(
        self,
        *,
        parameters: SchedulerParameters | None = None,
        weights: Mapping[str, float] | None = None,
        resources: Iterable[CapacityChanged] = DEFAULT_RESOURCES,
        profiler: Profiler | None = None,
        patience_s: float = 120.0,
    ) -> None:
        self.parameters = parameters or preset("balanced")
        self.profiler = profiler or Profiler()
        self.waits: dict[str, Waits] = {}
        self.on_reprioritise: Callable[[str, float], None] = lambda _id, _s: None
        self._scheduler = Scheduler(CostsOfModels(self.profiler), self.parameters, weights=weights)
        self.resources = {one.resource: one for one in resources}
        self._events: list[Event] = list(self.resources.values())
        self._patience_s = patience_s
        self._open: dict[str, OpenTicket] = {}
        self._running: dict[int, _Running] = {}
        self._by_work: dict[str, _Running] = {}
        self._last_profiles: dict[str, str] = {}
        self._num_tickets = 0
        self._is_flush_due = False
        self._wake_s: float | None = None
        self._rewake = anyio.Event()
        self._group: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._flush()
        self._group.start_soon(self._tick)
        for one in self.resources.values():
            if not one.num_slots:
                self._group.start_soon(self._lose_patience, one)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._group is not None
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(exc_type, exc, traceback)
        self._group = None

    # What happens --------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Something happened. It is handled with all else of this turn of the loop."""
        self._events.append(event)
        if not self._is_flush_due and self._group is not None:
            self._is_flush_due = True
            self._group.start_soon(self._flush_soon)

    def set_slots(self, resource: str, num_slots: int) -> None:
        """A resource has this many slots from now on."""
        changed = self.resources[resource] = replace(self.resources[resource], num_slots=num_slots)
        self.tell(changed)
        if not num_slots and self._group is not None:
            self._group.start_soon(self._lose_patience, changed)

    async def _lose_patience(self, without: CapacityChanged) -> None:
        await anyio.sleep(self._patience_s)
        if self.resources[without.resource] is without:
            self.set_slots(without.resource, 1)

    def attained(self, work_id: str, num_outputs: int) -> None:
        """A sub-node of work ended with so many new outputs. Unknown work is ignored."""
        running = self._by_work.get(work_id)
        if running is None:
            return
        opened = running.tickets[0]
        assert isinstance(opened.work, SingleWork)
        opened.work.num_attained += num_outputs
        self.tell(
            DispatchProgressed(
                dispatch_id=running.dispatch.id,
                service_s=anyio.current_time() - running.started_s,
                done=opened.work.num_attained / max(1.0, opened.ticket.size.outputs),
            )
        )

    # What is asked -------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether no run is known, nothing waits and nothing runs."""
        is_told = all(isinstance(event, CapacityChanged) for event in self._events)
        return is_told and self._scheduler.is_empty and not (self._open or self._running)

    def statistics(self) -> dict[str, PoolStatistics]:
        """Of each resource."""
        return self._scheduler.statistics()

    def standing(self, turn: Turn) -> Standing | None:
        """The rank of what waits or runs; None once it has ended."""
        return self._scheduler.standing(turn.ticket_id)

    def remaining_s(self, run_id: str) -> float:
        """Seconds of service that a run probably still needs. Raises UnknownRun."""
        return self._scheduler.remaining_service_s(run_id)

    def usual_profile(self, resource: str) -> str:
        """By which to predict work of which only the resource is known yet."""
        return self._last_profiles.get(resource, resource)

    def check_invariants(self) -> None:
        """Raises AssertionError if the state cannot be. For tests."""
        self._scheduler.check_invariants()
        assert set(self._by_work.values()) <= set(self._running.values())
        for opened in self._open.values():
            assert opened.jobs
            assert all(job.tickets[opened.ticket.id] is opened for job in opened.jobs)

    # What jobs do --------------------------------------------------------------------------

    def open(
        self,
        job: Job,
        resource: str,
        *,
        profile: str,
        size: Size,
        priority: int,
        work: SingleWork | ItemWork,
        items: Sequence[Any] = (),
    ) -> OpenTicket:
        """A job wants slots of a resource: one, or one for each batch with some of the items."""
        self._num_tickets += 1
        first, *others = job.members
        ticket = Ticket(
            id=f"t{self._num_tickets}",
            run_id=first.run_id,
            node_id=first.stage(resource),
            resource=resource,
            profile=profile,
            size=size,
            num_items=max(1, len(items)),
            max_split=_MAX_SPLIT if items else 1,
            priority=priority,
        )
        turn = Turn(
            resource=resource,
            asked_s=anyio.current_time(),
            ticket_id=ticket.id,
            num_items=ticket.num_items,
        )
        opened = OpenTicket(ticket, work, turn, items)
        job.turns.append(turn)
        if profile.partition(":")[0] == resource:
            self._last_profiles[resource] = profile
        self._open[ticket.id] = opened
        opened.jobs[job] = None
        job.tickets[ticket.id] = opened
        self.tell(TicketReady(ticket=ticket))
        for node in others:
            self.add_member(opened, node)
        return opened

    def share(self, opened: OpenTicket, job: Job) -> None:
        """A job wants a ticket of another one as well. Does nothing if it has ended."""
        if opened.ticket.id in self._open and job not in opened.jobs:
            opened.jobs[job] = None
            job.tickets[opened.ticket.id] = opened
            job.turns.append(opened.turn)
            for node in job.members:
                self.add_member(opened, node)

    def unshare(self, opened: OpenTicket, job: Job) -> None:
        """A job has what it wanted of a ticket, or wants it no more."""
        if job in opened.jobs:
            for node in job.members:
                self.remove_member(opened, node)
            self.drop_job(opened, job)

    def add_member(self, opened: OpenTicket, node: NodeKey) -> None:
        stage = node.stage(opened.ticket.resource)
        self.tell(TicketJoined(ticket_id=opened.ticket.id, run_id=node.run_id, node_id=stage))

    def remove_member(self, opened: OpenTicket, node: NodeKey) -> None:
        stage = node.stage(opened.ticket.resource)
        self.tell(TicketLeft(ticket_id=opened.ticket.id, run_id=node.run_id, node_id=stage))

    def drop_job(self, opened: OpenTicket, job: Job) -> None:
        """None of a job's nodes wants a ticket any more. Without any job it has ended."""
        del opened.jobs[job], job.tickets[opened.ticket.id]
        if not opened.jobs:
            # Whoever comes now must not wait for what is being stopped.
            failure = NodeFailed("nobody waits for it", code="cancelled", is_retryable=False)
            self._abandon(opened, failure)

    def finish_single(
        self,
        opened: OpenTicket,
        job: Job,
        outcome: Literal["completed", "failed", "stopped"],
        size: Size | None,
    ) -> None:
        """Work in its own task is over, whether it had got its slot or not."""
        assert isinstance(opened.work, SingleWork)
        running = self._running.get(opened.work.dispatch_id or 0)
        if running is None:
            self.unshare(opened, job)
        else:
            self._close(opened)
            self._ended(running, outcome, size)

    # Events and commands -------------------------------------------------------------------

    async def _flush_soon(self) -> None:
        self._flush()

    def _flush(self) -> None:
        self._is_flush_due = False
        events, self._events = self._events, []
        for command in self._scheduler.handle_all(events, now_s=anyio.current_time()):
            self._carry_out(command)
        wake_s = self._scheduler.next_wake_s
        if wake_s != self._wake_s:
            self._wake_s = wake_s
            self._rewake.set()

    async def _tick(self) -> None:
        """Wake the scheduler when it wants that."""
        while True:
            self._rewake = anyio.Event()
            wake_s = math.inf if self._wake_s is None else self._wake_s
            with anyio.move_on_after(wake_s - anyio.current_time()) as waiting:
                await self._rewake.wait()
            if waiting.cancelled_caught:
                self._events.append(Tick())
                self._flush()

    def _carry_out(self, command: Command) -> None:
        match command:
            case Dispatch():
                self._start(command)
            case Reprioritise(dispatch_id=dispatch_id):
                running = self._running.get(dispatch_id)
                if running is not None:
                    self._reprioritise(running)
            case Abort(dispatch_id=dispatch_id):
                running = self._running.get(dispatch_id)
                # The task of single work is being cancelled by those who wanted it.
                if running is not None and running.scope is not None:
                    running.scope.cancel()
            case Expire(ticket=ticket):
                self._expire(ticket.id)

    def _start(self, dispatch: Dispatch) -> None:
        now_s = anyio.current_time()
        tickets = [self._open[part.ticket.id] for part in dispatch.parts]
        running = _Running(dispatch, tickets, now_s)
        self._running[dispatch.id] = running
        waits = self.waits.setdefault(dispatch.resource, Waits())
        waits.num_dispatches += 1
        for opened in tickets:
            turn = opened.turn
            if turn.started_s is None:
                turn.started_s = now_s
                turn.num_together, turn.split = len(tickets), dispatch.split
                turn.priority = dispatch.priority
                waits.num_waits += 1
                waits.waited_s += now_s - turn.asked_s
        work = tickets[0].work
        if isinstance(work, SingleWork):
            work.dispatch_id = dispatch.id
            work.head_start_s = self._head_start_s(tickets[0])
            if work.work_id is not None:
                self._by_work[work.work_id] = running
            work.decided.set()
        else:
            running.scope = anyio.CancelScope()
            assert self._group is not None
            self._group.start_soon(self._run_batch, running, work, running.scope)

    async def _run_batch(self, running: _Running, work: ItemWork, scope: anyio.CancelScope) -> None:
        items = [
            item
            for opened, part in zip(running.tickets, running.dispatch.parts, strict=True)
            for item in opened.items[part.first_item : part.first_item + part.num_items]
        ]
        outcome: Literal["completed", "failed", "stopped"] = "stopped"
        try:
            with scope:
                await work.run(items)
                outcome = "completed"
        except NodeFailed as failure:
            # What was cut fails as one.
            outcome = "failed"
            for opened in running.tickets:
                self._abandon(opened, failure)
        finally:
            for opened, part in zip(running.tickets, running.dispatch.parts, strict=True):
                opened.num_done += part.num_items
                if opened.num_done == opened.ticket.num_items:
                    self._close(opened)
            self._ended(running, outcome, None)

    def _ended(
        self,
        running: _Running,
        outcome: Literal["completed", "failed", "stopped"],
        size: Size | None,
    ) -> None:
        dispatch_id, now_s = running.dispatch.id, anyio.current_time()
        del self._running[dispatch_id]
        for opened in running.tickets:
            opened.turn.ended_s = now_s
            if isinstance(opened.work, SingleWork) and opened.work.work_id is not None:
                del self._by_work[opened.work.work_id]
        event = DispatchEnded(
            dispatch_id=dispatch_id,
            service_s=now_s - running.started_s,
            outcome=outcome,
            size=size,
        )
        self.tell(event)

    def _expire(self, ticket_id: str) -> None:
        opened = self._open.get(ticket_id)
        if opened is not None:
            message = "the deadline passed before its turn came"
            failure = NodeFailed(message, code="deadline_exceeded", is_retryable=False)
            self._abandon(opened, failure)

    def _abandon(self, opened: OpenTicket, failure: NodeFailed) -> None:
        """Tell those who wait for a ticket that nothing will come of it."""
        self._close(opened)
        if isinstance(opened.work, ItemWork):
            opened.work.abandon(opened.items, failure)
        else:
            opened.work.failure = failure
            opened.work.decided.set()

    def _close(self, opened: OpenTicket) -> None:
        """Nothing more happens to a ticket, or it is known already."""
        if self._open.pop(opened.ticket.id, None) is None:
            return
        for job in opened.jobs:
            del job.tickets[opened.ticket.id]
        opened.jobs.clear()

    # Priorities ----------------------------------------------------------------------------

    def _reprioritise(self, running: _Running) -> None:
        work = running.tickets[0].work
        if isinstance(work, SingleWork) and work.work_id is not None:
            self.on_reprioritise(work.work_id, self._head_start_s(running.tickets[0]))

    def _head_start_s(self, opened: OpenTicket) -> float:
        """How much earlier than it got its slot it counts as having come, in the policy's eyes.

        Not from the arrival of its run: a run of a thousand nodes would keep all that came later,
        and is not scheduled here, out of the engine until its end.
        """
        standing = self.standing(opened.turn)
        return 0.0 if standing is None else standing.gain_s
