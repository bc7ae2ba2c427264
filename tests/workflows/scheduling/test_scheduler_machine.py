"""Whatever happens, in whatever order: nothing is lost, doubled, over capacity, or left to idle."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.workflows.scheduling.world import World, node
from workflows.scheduling.costs import Cost, FixedCosts
from workflows.scheduling.messages import (
    DispatchProgressed,
    NodeEnded,
    Size,
    Tick,
    Ticket,
    TicketJoined,
    TicketLeft,
    TicketReady,
)
from workflows.scheduling.parameters import SchedulerParameters

COSTS = FixedCosts(
    {
        "llm": Cost(overhead_s=0.1, per_output_s=1.0),
        "embed": Cost(overhead_s=0.2, per_output_s=0.1),
    }
)
RESOURCES = ("llm", "embed")


class SchedulerMachine(RuleBasedStateMachine):
    """Runs of up to five nodes, of which any may become ready, join, leave, fail, or be tried
    again, at any time."""

    policy = "hera"

    def __init__(self) -> None:
        super().__init__()
        parameters = SchedulerParameters(
            policy=self.policy,  # type: ignore[arg-type]
            min_long_sample=2,
            sweep_tickets=3,
        )
        self.world = World(parameters, COSTS, weights={"x": 2.0})
        for resource in RESOURCES:
            self.world.capacity(resource, 0)
        self.nodes: dict[str, list[str]] = {}
        self.num_tickets = 0

    def active(self) -> list[str]:
        return sorted(self.nodes)

    @rule(
        works=st.lists(st.tuples(st.sampled_from(RESOURCES), st.floats(0.1, 100.0)), max_size=5),
        tenant=st.sampled_from("xyz"),
        deadline_s=st.none() | st.floats(0.0, 100.0),
    )
    def arrive(self, works: list[tuple[str, float]], tenant: str, deadline_s: float | None) -> None:
        name = f"r{len(self.world.log)}-{self.num_tickets}-{len(self.nodes)}"
        if name in self.nodes:
            return
        nodes = [node(f"n{i}", work, resource=kind) for i, (kind, work) in enumerate(works)]
        self.nodes[name] = [one.id for one in nodes]
        deadline_s = None if deadline_s is None else self.world.now_s + deadline_s
        self.world.run(name, *nodes, tenant=tenant, deadline_s=deadline_s)

    @precondition(lambda self: any(self.nodes.values()))
    @rule(
        data=st.data(),
        resource=st.sampled_from(RESOURCES),
        num_items=st.integers(1, 40),
        max_split=st.integers(1, 4),
    )
    def ready(self, data: st.DataObject, resource: str, num_items: int, max_split: int) -> None:
        run, name = self._some_node(data)
        self.num_tickets += 1
        ticket_id = f"{run}.{name}.{self.num_tickets}"
        num_items = num_items if resource == "embed" else 1
        ticket = Ticket(
            id=ticket_id,
            run_id=run,
            node_id=name,
            resource=resource,
            profile=resource,
            size=Size(float(num_items)),
            num_items=num_items,
            max_split=max_split,
        )
        self.world.open_items[ticket_id] = num_items
        self.world.handle(TicketReady(ticket=ticket))

    def _some_node(self, data: st.DataObject) -> tuple[str, str]:
        run = data.draw(st.sampled_from([name for name in self.active() if self.nodes[name]]))
        return run, data.draw(st.sampled_from(self.nodes[run]))

    @precondition(lambda self: any(self.nodes.values()) and self.world.scheduler._book.tickets)
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        run, name = self._some_node(data)
        ticket_id = data.draw(st.sampled_from(sorted(self.world.scheduler._book.tickets)))
        live = self.world.scheduler._book.tickets[ticket_id]
        if (run, name) not in live.members:
            self.world.handle(TicketJoined(ticket_id=ticket_id, run_id=run, node_id=name))

    @precondition(lambda self: self.world.scheduler._book.tickets)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        tickets = self.world.scheduler._book.tickets
        live = tickets[data.draw(st.sampled_from(sorted(tickets)))]
        run_id, node_id = data.draw(st.sampled_from(sorted(live.members)))
        self.world.handle(TicketLeft(ticket_id=live.ticket.id, run_id=run_id, node_id=node_id))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), service_s=st.floats(0.0, 200.0), fails=st.booleans())
    def finish(self, data: st.DataObject, service_s: float, fails: bool) -> None:
        dispatch_id = data.draw(st.sampled_from(sorted(self.world.running)))
        outcome = "failed" if fails else "completed"
        if dispatch_id in self.world.aborted and fails:
            outcome = "stopped"
        self.world.finish(self.world.running[dispatch_id], service_s, outcome)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), done=st.floats(0.0, 2.0))
    def progress(self, data: st.DataObject, done: float) -> None:
        dispatch_id = data.draw(st.sampled_from(sorted(self.world.running)))
        known = self.world.scheduler._book.running[dispatch_id]
        event = DispatchProgressed(
            dispatch_id=dispatch_id,
            service_s=known.charged_s + done,
            done=max(known.done, done),
        )
        self.world.handle(event)

    @precondition(lambda self: any(self.nodes.values()))
    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        run, name = self._some_node(data)
        self.world.handle(NodeEnded(run_id=run, node_id=name))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.active()))
        del self.nodes[run]
        self.world.end(run)

    @rule(
        resource=st.sampled_from(RESOURCES),
        num_slots=st.integers(0, 4),
        max_batch=st.integers(1, 16),
    )
    def capacity(self, resource: str, num_slots: int, max_batch: int) -> None:
        num_slots = max(num_slots, self.world.num_running(resource))
        self.world.capacity(
            resource, num_slots, max_batch=max_batch, is_preemptible=resource == "llm"
        )

    @rule(seconds=st.floats(0.0, 50.0))
    def wait(self, seconds: float) -> None:
        self.world.now_s += seconds
        self.world.handle(Tick())

    @invariant()
    def nothing_idles(self) -> None:
        for name, pool in self.world.scheduler.statistics().items():
            assert pool.num_running == self.world.num_running(name)
            assert not pool.num_queued or pool.num_running >= pool.num_slots

    @invariant()
    def queues_hold_what_was_not_given_out(self) -> None:
        book = self.world.scheduler._book
        for ticket_id, live in book.tickets.items():
            assert live.num_left == self.world.open_items[ticket_id]

    def teardown(self) -> None:
        for resource in RESOURCES:
            self.world.capacity(resource, 4, max_batch=16)
        self.world.drain(step_s=0.0)
        assert not self.world.scheduler._book.tickets
        assert not self.world.scheduler._book.running
        for run in self.active():
            self.world.end(run)
        assert not self.world.scheduler._book.runs
        assert all(pool.num_queued == 0 for pool in self.world.scheduler.statistics().values())


class SrtfMachine(SchedulerMachine):
    policy = "srtf"


TestHera = SchedulerMachine.TestCase
TestHera.settings = hypothesis.settings(max_examples=40, stateful_step_count=30, deadline=None)
TestSrtf = SrtfMachine.TestCase
TestSrtf.settings = hypothesis.settings(max_examples=10, stateful_step_count=30, deadline=None)
