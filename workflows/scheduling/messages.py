"""What the scheduler is told, and what it answers. See `workflows.scheduling.scheduler`.

All times are seconds on the clock of the caller, and reach the scheduler as `now_s`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Size:
    """How large a piece of work is, in the units of its profile.

    outputs: what is made: tokens of an `llm` node, vectors, scores, calls.
    inputs: what is read: tokens or characters. The unit is free, as long as one profile keeps to
    one: the profile's fitted rates carry it, and nothing else looks at it.
    """

    outputs: float = 1.0
    inputs: float = 0.0

    def share(self, fraction: float) -> Size:
        return Size(self.outputs * fraction, self.inputs * fraction)

    def __add__(self, other: Size) -> Size:
        return Size(self.outputs + other.outputs, self.inputs + other.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNode:
    """A node as it is known before it is ready.

    profile: what its time is predicted by, such as `embed:bge-large`. size: expected.
    children: ids of the nodes that depend on it.
    resource: None for a node that takes no slot, such as a text operator.
    """

    id: str
    profile: str
    size: Size = Size()
    children: tuple[str, ...] = ()
    resource: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A ready node that wants a slot.

    id: new for each try of a node. profile: only tickets of the same one may share a batch.
    num_items: pieces that can run apart, such as the texts of an `embed` node; 1 for an `llm` node.
    max_split: parts into which the scheduler may cut the items for speed; 1 for none. A ticket
    above the batch limit of its resource is cut whatever it says.
    priority: declared; lower goes first, as in the engines.
    """

    id: str
    run_id: str
    node_id: str
    resource: str
    profile: str
    size: Size = Size()
    num_items: int = 1
    max_split: int = 1
    priority: int = 0


# Events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArrived:
    """A run begins. deadline_s: absolute."""

    run_id: str
    nodes: tuple[PlannedNode, ...]
    tenant: str = ""
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesAdded:
    """A run has grown: a map over a list, another round of a loop."""

    run_id: str
    nodes: tuple[PlannedNode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesRemoved:
    """A part of a run that had been added is over, and nobody asks for it any more."""

    run_id: str
    node_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnded:
    """A node ended without a ticket: skipped, from a cache, or of an operator without resource."""

    run_id: str
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """A run is over, however it ended. It leaves the tickets that it still has."""

    run_id: str
    is_completed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketReady:
    """A node became ready, or is tried again."""

    ticket: Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketJoined:
    """A node of the same signature shares a ticket that is queued or runs."""

    ticket_id: str
    run_id: str
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketLeft:
    """A node no longer wants a ticket. The ticket is cancelled when the last one leaves."""

    ticket_id: str
    run_id: str
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchProgressed:
    """A sub-node of running work ended, such as 64 decoded tokens.

    service_s: what the dispatch has taken so far, from its start. done: the share of its expected
    work that is done, which passes 1 where the work turns out longer.
    """

    dispatch_id: int
    service_s: float
    done: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchEnded:
    """A slot is free again. service_s: what the dispatch took.

    size: what it turned out to be, where that was not known before (tokens of an answer).
    `stopped` answers Abort; a ticket of a `failed` dispatch is over, with all of its parts.
    """

    dispatch_id: int
    service_s: float
    outcome: Literal["completed", "failed", "stopped"] = "completed"
    size: Size | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityChanged:
    """A resource has this many slots now.

    num_slots: dispatches at once; the admission limit for engines that batch by themselves.
    max_batch: items in one dispatch. max_wait_s: how long a batch that is not full may be held
    while the load is high, though a slot is free; 0 keeps every slot busy.
    is_preemptible: priorities may change while work runs.
    """

    resource: str
    num_slots: int
    max_batch: int = 1
    max_wait_s: float = 0.0
    is_preemptible: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed: `Scheduler.next_wake_s` was reached."""


Event = (
    RunArrived
    | NodesAdded
    | NodesRemoved
    | NodeEnded
    | RunEnded
    | TicketReady
    | TicketJoined
    | TicketLeft
    | DispatchProgressed
    | DispatchEnded
    | CapacityChanged
    | Tick
)

# Commands ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """Some items of a ticket, counted from 0."""

    ticket: Ticket
    first_item: int
    num_items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Run these parts as one batch in one slot, then report DispatchEnded.

    split: how many dispatches this decision made at once (k).
    priority: for the engine; lower goes first.
    """

    id: int
    resource: str
    parts: tuple[Part, ...]
    priority: int
    split: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reprioritise:
    """Tell the engine that runs it: it counts from the next sub-node on."""

    dispatch_id: int
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Nobody wants what this dispatch still does. The slot is free once its end is reported."""

    dispatch_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expire:
    """The ticket's last deadline passed while it was queued; it is forgotten."""

    ticket: Ticket


Command = Dispatch | Reprioritise | Abort | Expire
