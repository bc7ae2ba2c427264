"""The whole service in virtual time, whatever happens to it: made-up graphs and tenants, arrivals,
cancels, failures and deadlines, scarce slots; and servers that are killed in between.

No result crosses a tenant or differs from what its run would have got alone; every run ends; no
slot leaks; each side effect happens once; usage adds up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import anyio
import anyio.lowlevel
import hypothesis
from anyio.abc import TaskGroup
from hypothesis import strategies as st

from spot.virtual_time import run_virtual
from tests.workflows.memory_runs import MemoryRuns, MemoryStore
from tests.workflows.safety_checks import Entered, Ledger
from tests.workflows.safety_plans import Arrival, Life, Plan, lives, plans
from tests.workflows.safety_world import TENANTS, Look, World, operators
from workflows.checked import CheckedWorkflow, check_workflow
from workflows.errors import JournalUnavailable, KeyReused, RunElsewhere
from workflows.job import Job
from workflows.past_run import PastRun
from workflows.run import Run, RunKey
from workflows.run_journal import RunJournal
from workflows.scheduling.messages import CapacityChanged
from workflows.scheduling.parameters import SchedulerParameters
from workflows.service import WorkflowService
from workflows.slots import Slots

PATIENCE_S = 5.0
MAX_S = 2000.0


class WatchedService(WorkflowService):
    """Tells of each run that it works on, also of those inside others."""

    on_enter: Callable[[Run], None]

    def _enter(self, run: Run) -> None:
        self.on_enter(run)
        super()._enter(run)


class Server:
    """One server's life: its clients come, see what happens, and leave."""

    def __init__(self, plan: Plan, world: World, base_s: float = 0.0) -> None:
        self.plan = plan
        self.world = world
        self.operators = operators(world)
        self.slots = _slots(plan)
        world.base_s, world.is_dead, world.slots = base_s, False, self.slots
        world.holds.clear()
        world.jobs.clear()
        self._workflows: dict[int, CheckedWorkflow] = {}

    async def visit(self, service: WorkflowService, arrival: Arrival) -> None:
        """A client of one run."""
        workflow = self._workflow(arrival.document)
        inputs = {"topic": arrival.topic}
        run: Run | PastRun | None = None
        with anyio.move_on_after(arrival.leave_s):
            try:
                run = await self._submitted(service, workflow, inputs, arrival)
            except (JournalUnavailable, KeyReused, RunElsewhere):
                return
            if isinstance(run, Run):
                await self._until_ended(run)
            return
        # With a key, the run goes on without its client.
        if isinstance(run, Run) and arrival.key is None:
            service.cancel(run)
            await self._until_ended(run)

    async def _until_ended(self, run: Run) -> None:
        """A run that has ended stops working at once."""
        if run.ended.is_set():
            return
        await run.ended.wait()
        ended_s = run.state.finished_s
        if ended_s is not None and anyio.current_time() > ended_s and not run.is_suspended:
            self.world.wrongs.append(f"run {run.id} worked on after its end")

    async def _submitted(
        self,
        service: WorkflowService,
        workflow: CheckedWorkflow,
        inputs: dict[str, Any],
        arrival: Arrival,
    ) -> Run | PastRun:
        wall_s = self.world.now_s()
        if arrival.key is None:
            return service.submit(workflow, inputs, tenant=arrival.tenant, wall_s=wall_s)
        key = RunKey(text=arrival.key, request_hash=repr((arrival.document, inputs)).encode())
        return await service.submit_once(
            workflow, inputs, tenant=arrival.tenant, wall_s=wall_s, key=key
        )

    def _workflow(self, document: int) -> CheckedWorkflow:
        if document not in self._workflows:
            self._workflows[document] = check_workflow(
                self.plan.documents[document], self.operators
            )
        return self._workflows[document]

    async def outage(self, at_s: float, num_slots: int) -> None:
        await anyio.sleep(at_s)
        self.slots.set_slots("llm", num_slots)

    async def check_nothing_left(self, service: WorkflowService) -> None:
        """After the last run has ended."""
        await anyio.sleep(PATIENCE_S + 1.0)
        self.slots.check_invariants()
        assert self.slots.is_empty
        assert service.num_active == 0
        assert service.shared_work.num_running == 0
        assert not any(self.world.holds.values())
        look = self.operators["look"]
        assert isinstance(look, Look)
        assert not look.in_flight


def _slots(plan: Plan) -> Slots:
    return Slots(
        resources=[
            CapacityChanged(resource="llm", num_slots=plan.num_llm, is_preemptible=True),
            CapacityChanged(resource="embed", num_slots=2, max_batch=3, max_wait_s=0.05),
            CapacityChanged(resource="http", num_slots=2),
        ],
        parameters=SchedulerParameters(policy=plan.policy, min_long_sample=2, sweep_tickets=3),
        weights={"x": 2.0},
        patience_s=PATIENCE_S,
    )


def _world(plan: Plan) -> World:
    return World(max_slots={"llm": 3, "embed": 2, "http": 2}, changes=plan.changes)


async def _at(at_s: float, work: Callable[..., Any], *args: Any) -> None:
    await anyio.sleep(max(0.0, at_s))
    await work(*args)


def play(plan: Plan) -> None:
    """Without a journal: one server, until all have left."""
    world = _world(plan)
    entered: list[Entered] = []

    async def main() -> None:
        server = Server(plan, world)
        async with WatchedService(server.slots) as service:
            service.on_enter = lambda run: entered.append(Entered(run, 0.0))
            await anyio.lowlevel.checkpoint()
            tasks_before = asyncio.all_tasks()
            async with anyio.create_task_group() as tasks:
                for arrival in plan.arrivals:
                    tasks.start_soon(_at, arrival.at_s, server.visit, service, arrival)
                for outage in plan.outages:
                    tasks.start_soon(server.outage, *outage)
                tasks.start_soon(_watch_slots, server, service)
            await server.check_nothing_left(service)
            assert asyncio.all_tasks() == tasks_before
        Ledger(world, entered).check()

    run_virtual(main)


async def _watch_slots(server: Server, service: WorkflowService) -> None:
    """Until all runs have ended, which they must. No slot is held where nobody waits."""
    unwanted: set[Job] = set()
    with anyio.fail_after(MAX_S):
        last_s = max(arrival.at_s for arrival in server.plan.arrivals)
        while anyio.current_time() <= last_s or service.num_active:
            server.slots.check_invariants()
            still_unwanted = {job for job in server.world.jobs if not job.members}
            assert not still_unwanted & unwanted
            unwanted = still_unwanted
            await anyio.sleep(0.4)


@hypothesis.settings(max_examples=300, derandomize=True)
@hypothesis.given(plan=plans())
def test_runs_are_what_they_would_be_alone(plan: Plan) -> None:
    play(plan)


class Story:
    """Servers on one database, one after the other. seen: what the clients of runs were told."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._world = _world(plan)
        self._world.is_recorded = True
        self._memory = MemoryRuns(self._stored)
        self._entered: list[Entered] = []
        self._waiting = list(plan.arrivals)
        self._seen: dict[str, list[Any]] = {}
        self._end_s = 0.0

    def _stored(self, run_id: str, path: str, events: list[list[Any]]) -> None:
        for kind, _, node_id, _ in events:
            if kind == "node.completed":
                self._world.recorded.add(f"{run_id}:{path}{node_id}")

    def play(self, lives: list[Life]) -> None:
        base_s = 0.0
        with mock.patch("workflows.run_journal.store", self._memory):
            for life in lives:
                run_virtual(self._live, base_s, life)
                base_s = self._end_s + life.down_s
            run_virtual(self._live, base_s, None)
        self._check(is_all_shown_stored=not any(life.losses for life in lives))

    async def _live(self, base_s: float, life: Life | None) -> None:
        server, store = Server(self._plan, self._world, base_s), MemoryStore(self._memory)
        journal = RunJournal(
            store,  # type: ignore[arg-type]
            now_wall_s=self._world.now_s,
            identities={"x": "key:x"},
            tenants=TENANTS,
        )
        compiled = partial(check_workflow, operators=server.operators)
        with anyio.CancelScope() as process:
            async with (
                WatchedService(server.slots, journal=journal, compiled=compiled) as service,
                anyio.create_task_group() as tasks,
            ):
                service.on_enter = partial(self._entered_by, base_s, tasks)
                await service.ready()
                for arrival in self._waiting:
                    wait_s = arrival.at_s - base_s
                    tasks.start_soon(_at, wait_s, self._visit, server, service, arrival)
                for outage in self._plan.outages:
                    tasks.start_soon(server.outage, *outage)
                if life is None:
                    await self._until_all_have_ended(server, service)
                else:
                    await self._end(life, service, store, process)
                tasks.cancel_scope.cancel()
        self._end_s = self._world.now_s()

    def _entered_by(self, base_s: float, tasks: TaskGroup, run: Run) -> None:
        self._entered.append(Entered(run, base_s))
        self._world.runs[run.id] = run
        if run.root is None:
            tasks.start_soon(self._watch, run)

    async def _visit(self, server: Server, service: WorkflowService, arrival: Arrival) -> None:
        self._waiting.remove(arrival)
        await server.visit(service, arrival)

    async def _watch(self, run: Run) -> None:
        """As somebody who reads the events, and comes back to a server's successor."""
        seen = self._seen.setdefault(run.id, [])
        while events := await run.events.after(len(seen)):
            if self._world.is_dead:
                return
            seen += [(event.type, event.node_id, event.data) for event in events]

    async def _end(
        self,
        life: Life,
        service: WorkflowService,
        store: MemoryStore,
        process: anyio.CancelScope,
    ) -> None:
        async with anyio.create_task_group() as tasks:
            for at_s in life.losses:
                tasks.start_soon(_at, at_s, self._lose_connections)
            await anyio.sleep(life.lasts_s)
            tasks.cancel_scope.cancel()
        if life.ends == "stop":
            await service.suspend()
            return
        assert service.journal is not None
        service.journal.abandon = lambda run_id: None  # the dead tidy nothing up
        self._world.is_dead = store.is_dead = True
        self._memory.lose_connections()
        process.cancel()

    async def _lose_connections(self) -> None:
        self._memory.lose_connections()

    async def _until_all_have_ended(self, server: Server, service: WorkflowService) -> None:
        with anyio.fail_after(MAX_S):
            while self._waiting or service.num_active or self._num_unfinished:
                server.slots.check_invariants()
                await anyio.sleep(0.4)
        await server.check_nothing_left(service)

    @property
    def _num_unfinished(self) -> int:
        return sum(row.finished_s is None for row in self._memory.rows.values())

    def _check(self, *, is_all_shown_stored: bool) -> None:
        # One that was never on record is not known to anybody.
        entered = [one for one in self._entered if one.root.id in self._memory.rows]
        ledger = Ledger(self._world, entered)
        ledger.check()
        for run_id in self._memory.rows:
            run = ledger.latest[run_id, ""].run
            stored = self._memory.stored(run_id)
            assert stored.status == run.state.status
            told = [(event.type, event.node_id, event.data) for event in run.events.since(0)]
            assert [(kind, node, data) for kind, _, node, data in stored.events[""]] == told
            seen = self._seen.get(run_id, [])
            if is_all_shown_stored:
                assert told[: len(seen)] == seen
        if is_all_shown_stored:
            assert {run_id for run_id, seen in self._seen.items() if seen} <= set(self._memory.rows)


@hypothesis.example(
    # All of it is done at once, and nothing of that is on record when its deadline has passed.
    plan=Plan(
        documents=[
            {
                "nodes": [
                    {
                        "id": "n0",
                        "op": "read",
                        "params": {
                            "prompt": "a",
                            "takes_s": 0.0,
                            "num_failures": 0,
                            "is_refused": False,
                        },
                        "when": "inputs.topic == 'a'",
                    }
                ],
                "deadline_s": 20.0,
            }
        ],
        arrivals=[Arrival(document=0, tenant="x", at_s=0.0, topic="b", key="k", leave_s=None)],
        policy="fcfs",
        num_llm=2,
        outages=[],
        changes=[1.0],
    ),
    ends=[Life(lasts_s=3.1, ends="stop", down_s=40.0, losses=[0.005])],
)
@hypothesis.settings(max_examples=200, derandomize=True)
@hypothesis.given(plan=plans(), ends=st.deferred(lives))
def test_runs_whose_server_is_killed_are_no_worse(plan: Plan, ends: list[Life]) -> None:
    Story(plan).play(ends)
