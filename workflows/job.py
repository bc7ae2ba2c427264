"""One execution of a node's work, with all the nodes that want its result."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import anyio

from workflows.scheduling.messages import Size
from workflows.tickets import ItemWork, OpenTicket, SingleWork, Turn

if TYPE_CHECKING:
    from workflows.slots import Slots


class NodeKey(NamedTuple):
    """A node as the scheduler knows it. run_id: of the outermost run, to which nested ones belong.

    node_id: unique among all nodes of that run and of those inside.
    """

    run_id: str
    node_id: str

    def stage(self, resource: str) -> str:
        """The id of the part of the node that takes slots of a resource."""
        return f"{self.node_id}/{resource}"


class Slot:
    """A slot that work holds. head_start_s: how much earlier than it was given it counts as having
    come, among other work of its engine (below 0: later).

    size: what the work turned out to be, if that was not known before; the holder sets it.
    """

    def __init__(self, head_start_s: float) -> None:
        self.head_start_s = head_start_s
        self.size: Size | None = None


class Job:
    """Asks for slots on behalf of the nodes that want its result: none of them alone.

    Whoever joins shares the tickets that are open and those that come; whoever leaves takes back
    its wish, and the last one all of it.

    node: the one that it was made for. resources: of which it may take slots. priority: declared,
    of all of its wishes; lower goes first.
    turns: what came of its wishes, for those who ask later.
    """

    def __init__(
        self, slots: Slots, node: NodeKey, resources: Sequence[str], *, priority: int = 0
    ) -> None:
        self.node = node
        self.priority = priority
        self.turns: list[Turn] = []
        self.members: dict[NodeKey, None] = {}
        self.tickets: dict[str, OpenTicket] = {}
        self._slots = slots
        self._resources = frozenset(resources)

    def join(self, node: NodeKey) -> None:
        """A node wants the result."""
        self.members[node] = None
        for ticket in self.tickets.values():
            self._slots.add_member(ticket, node)

    def leave(self, node: NodeKey) -> None:
        """A node has the result, or wants it no more."""
        del self.members[node]
        for ticket in list(self.tickets.values()):
            self._slots.remove_member(ticket, node)
            if not self.members:
                self._slots.drop_job(ticket, self)

    def expected_outputs(self, profile: str, *, limit: float | None = None) -> float:
        """Tokens that an answer will probably have. limit: `max_tokens`."""
        return self._slots.profiler.expected_outputs(profile, limit=limit)

    @asynccontextmanager
    async def slot(
        self,
        resource: str,
        *,
        profile: str | None = None,
        size: Size | None = None,
        priority: int | None = None,
        work_id: str | None = None,
    ) -> AsyncIterator[Slot]:
        """Wait for a slot and hold it.

        profile: what its time is predicted by; the resource alone by default. priority: if it is
        not the job's. work_id: by which the engine knows the work, if it tells of sub-nodes and
        can be told of priorities. Raises NodeFailed when the last deadline has passed before.
        """
        await self._wanted(resource)
        work = SingleWork(work_id)
        opened = self._slots.open(
            self,
            resource,
            profile=profile or resource,
            size=size or Size(),
            priority=self.priority if priority is None else priority,
            work=work,
        )
        outcome: Literal["completed", "failed", "stopped"] = "stopped"
        slot: Slot | None = None
        try:
            await work.decided.wait()
            if work.failure is not None:
                raise work.failure
            slot = Slot(work.head_start_s)
            yield slot
            outcome = "completed"
        except Exception:
            outcome = "failed"
            raise
        finally:
            self._slots.finish_single(opened, self, outcome, None if slot is None else slot.size)

    @asynccontextmanager
    async def items(
        self,
        resource: str,
        items: Sequence[Any],
        *,
        profile: str,
        size: Size,
        also: Sequence[OpenTicket] = (),
        work: ItemWork,
    ) -> AsyncIterator[OpenTicket | None]:
        """Have items worked on, in batches with others of the same profile, while this is held.

        The scheduler says which of them go when, and with whom. also: tickets of other jobs, of
        which some items are wanted here as well. Gives the ticket of the items, if there are any.
        """
        await self._wanted(resource)
        opened = None
        if items:
            opened = self._slots.open(
                self,
                resource,
                profile=profile,
                size=size,
                priority=self.priority,
                work=work,
                items=items,
            )
        for ticket in also:
            self._slots.share(ticket, self)
        try:
            yield opened
        finally:
            for ticket in (*also, *([opened] if opened else ())):
                self._slots.unshare(ticket, self)

    async def _wanted(self, resource: str) -> None:
        assert resource in self._resources, f"{resource} is no resource of this operator"
        if not self.members:
            # Nobody wants it any more: the cancellation is on its way.
            await anyio.sleep_forever()
