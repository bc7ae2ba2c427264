"""A ticket from ready to ended, and those who share it."""

from __future__ import annotations

from dataclasses import dataclass, field

from workflows.scheduling.active_run import ActiveRun
from workflows.scheduling.messages import Part, Size, Ticket


@dataclass(slots=True, eq=False)
class Member:
    """A logical node that wants the ticket's result. The first of a ticket's members leads.

    joined_at: the share of the work that was done when it came; only what came after is charged
    to a follower.
    """

    run: ActiveRun
    node_id: str
    joined_at: float = 0.0


@dataclass(slots=True, eq=False)
class LiveTicket:
    """A ticket that is queued, runs, or both, if only some of its items were dispatched.

    key: rank, lower goes first. version: grows with each new key, so that old heap entries show.
    is_heavy: y. is_urgent: one of its runs must go on now to meet its deadline.
    num_taken, num_done: items. done: share of the work, 0..1 or more.
    """

    ticket: Ticket
    order: int
    ready_s: float
    leader: ActiveRun
    members: dict[tuple[str, str], Member] = field(default_factory=dict)
    dispatches: dict[int, Running] = field(default_factory=dict)
    key: float = 0.0
    version: int = 0
    is_heavy: bool = False
    is_urgent: bool = False
    is_queued: bool = False
    has_ended: bool = False
    num_taken: int = 0
    num_done: int = 0
    num_parts: int = 0
    done: float = 0.0
    expires_s: float | None = None

    @property
    def num_left(self) -> int:
        """Items that nobody has begun."""
        return self.ticket.num_items - self.num_taken

    @property
    def tenant(self) -> str:
        """Who pays: the tenant of the leader. When it leaves, the next one leads."""
        return self.leader.tenant

    def size_of(self, num_items: int) -> Size:
        return self.ticket.size.share(num_items / self.ticket.num_items)


@dataclass(slots=True, eq=False)
class Running:
    """A dispatch that has not ended.

    predicted_s: what its tenants were charged for it. charged_s: what its runs were, so far.
    done: the share of it that was reported.
    """

    id: int
    resource: str
    parts: tuple[tuple[LiveTicket, Part], ...]
    size: Size
    priority: int
    is_heavy: bool
    predicted_s: float
    charged_s: float = 0.0
    done: float = 0.0
    is_aborted: bool = False

    def share(self, part: Part) -> float:
        """Of this dispatch, by items."""
        return part.num_items / sum(one.num_items for _, one in self.parts)
