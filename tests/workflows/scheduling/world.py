"""The world around a scheduler under test: carries out its commands, and checks each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from workflows.scheduling.costs import Cost, CostModel, FixedCosts
from workflows.scheduling.messages import (
    Abort,
    CapacityChanged,
    Command,
    Dispatch,
    DispatchEnded,
    Event,
    Expire,
    PlannedNode,
    Reprioritise,
    RunArrived,
    RunEnded,
    Size,
    Ticket,
    TicketReady,
)
from workflows.scheduling.parameters import SchedulerParameters
from workflows.scheduling.scheduler import Scheduler

# One output takes a second, and nothing else does.
SECONDS = FixedCosts({}, default=Cost(overhead_s=0.0, per_output_s=1.0))


def node(
    name: str, service_s: float = 1.0, *, resource: str = "llm", children: tuple[str, ...] = ()
) -> PlannedNode:
    return PlannedNode(
        id=name, profile=resource, size=Size(service_s), resource=resource, children=children
    )


@dataclass
class World:
    """Slots, and what runs in them. `log`: ids of tickets in the order in which they started."""

    parameters: SchedulerParameters = field(default_factory=SchedulerParameters)
    costs: CostModel = SECONDS
    weights: Mapping[str, float] = field(default_factory=dict)
    now_s: float = 0.0
    running: dict[int, Dispatch] = field(default_factory=dict)
    started: Counter[str] = field(default_factory=Counter)
    open_items: dict[str, int] = field(default_factory=dict)
    slots: dict[str, CapacityChanged] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    dispatches: list[Dispatch] = field(default_factory=list)
    aborted: set[int] = field(default_factory=set)
    priorities: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.costs, self.parameters, weights=self.weights)

    def handle(self, event: Event) -> list[Command]:
        commands = self.scheduler.handle(event, now_s=self.now_s)
        for command in commands:
            match command:
                case Dispatch():
                    self._start(command)
                case Abort(dispatch_id=dispatch_id):
                    assert dispatch_id in self.running
                    assert dispatch_id not in self.aborted
                    self.aborted.add(dispatch_id)
                case Expire(ticket=ticket):
                    assert self.open_items.pop(ticket.id) == ticket.num_items
                case Reprioritise(dispatch_id=dispatch_id, priority=priority):
                    assert dispatch_id in self.running
                    assert self.priorities[dispatch_id] != priority
                    self.priorities[dispatch_id] = priority
        self.scheduler.check_invariants()
        return commands

    def _start(self, dispatch: Dispatch) -> None:
        assert dispatch.id not in self.running
        assert dispatch.parts
        limits = self.slots[dispatch.resource]
        self.running[dispatch.id] = dispatch
        self.dispatches.append(dispatch)
        self.priorities[dispatch.id] = dispatch.priority
        assert self.num_running(dispatch.resource) <= limits.num_slots
        num_items = sum(part.num_items for part in dispatch.parts)
        assert num_items <= limits.max_batch or len(dispatch.parts) == 1
        assert len({part.ticket.profile for part in dispatch.parts}) == 1
        for part in dispatch.parts:
            ticket = part.ticket
            assert ticket.resource == dispatch.resource
            # The items of a ticket are given out once each, in order.
            assert part.first_item == ticket.num_items - self.open_items[ticket.id]
            self.open_items[ticket.id] -= part.num_items
            assert self.open_items[ticket.id] >= 0
            self.log.append(ticket.id)

    def num_running(self, resource: str) -> int:
        return sum(dispatch.resource == resource for dispatch in self.running.values())

    # Shorthands ----------------------------------------------------------------------------

    def capacity(self, resource: str, num_slots: int, **options: object) -> list[Command]:
        event = CapacityChanged(resource=resource, num_slots=num_slots, **options)  # type: ignore[arg-type]
        self.slots[resource] = event
        return self.handle(event)

    def run(self, name: str, *nodes: PlannedNode, **options: object) -> list[Command]:
        return self.handle(RunArrived(run_id=name, nodes=nodes, **options))  # type: ignore[arg-type]

    def ready(
        self, run: str, node: str, service_s: float = 1.0, **options: object
    ) -> list[Command]:
        values: dict[str, object] = {"resource": "llm", **options}
        values.setdefault("profile", values["resource"])
        ticket = Ticket(
            id=f"{run}.{node}",
            run_id=run,
            node_id=node,
            size=Size(service_s),
            **values,  # type: ignore[arg-type]
        )
        self.open_items[ticket.id] = ticket.num_items
        return self.handle(TicketReady(ticket=ticket))

    def single(self, name: str, service_s: float = 1.0, **options: object) -> list[Command]:
        """A run of one node, which is ready."""
        self.run(name, node("n", service_s), **options)
        return self.ready(name, "n", service_s)

    def dispatch_of(self, ticket_id: str) -> Dispatch:
        found = [
            dispatch
            for dispatch in self.running.values()
            if any(part.ticket.id == ticket_id for part in dispatch.parts)
        ]
        assert len(found) == 1
        return found[0]

    def finish(
        self, dispatch: Dispatch, service_s: float = 1.0, outcome: str = "completed"
    ) -> None:
        del self.running[dispatch.id]
        self.handle(
            DispatchEnded(dispatch_id=dispatch.id, service_s=service_s, outcome=outcome)  # type: ignore[arg-type]
        )

    def finish_ticket(self, ticket_id: str, service_s: float = 1.0) -> None:
        self.finish(self.dispatch_of(ticket_id), service_s)

    def end(self, run: str) -> None:
        self.handle(RunEnded(run_id=run))

    def drain(self, *, step_s: float = 1.0) -> None:
        """Let all that runs end, the oldest first, until nothing does."""
        while self.running:
            self.now_s += step_s
            oldest = min(self.running)
            outcome = "stopped" if oldest in self.aborted else "completed"
            self.finish(self.running[oldest], outcome=outcome)
