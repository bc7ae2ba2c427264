"""What is known of work that waits for slots, or holds them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from workflows.errors import NodeFailed
from workflows.scheduling.messages import Ticket

if TYPE_CHECKING:
    from workflows.job import Job


@dataclass(slots=True, kw_only=True)
class Turn:
    """What came of one wish for a resource.

    started_s: None while it waits. num_items: of this wish. num_together: wishes in the same batch.
    split: into how many batches it was cut at once. ended_s: None as long as it is not done.
    priority: lower went first; comparable among turns of one moment.
    """

    resource: str
    asked_s: float
    ticket_id: str
    num_items: int = 1
    started_s: float | None = None
    ended_s: float | None = None
    num_together: int = 1
    split: int = 1
    priority: int = 0


@dataclass(slots=True, eq=False)
class SingleWork:
    """Work that its own task does, once `decided` is set: with a slot, or with a failure.

    work_id: by which the engine knows it. head_start_s: see `job.Slot`. num_attained: outputs so
    far.
    """

    work_id: str | None = None
    decided: anyio.Event = field(default_factory=anyio.Event)
    failure: NodeFailed | None = None
    head_start_s: float = 0.0
    dispatch_id: int | None = None
    num_attained: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ItemWork:
    """What is done with items. run: of one batch; raises NodeFailed if nothing of it was done.

    abandon: they will not be worked on.
    """

    run: Callable[[Sequence[Any]], Awaitable[None]]
    abandon: Callable[[Sequence[Any], NodeFailed], None]


@dataclass(slots=True, eq=False)
class OpenTicket:
    """A ticket that has not ended, and the jobs that want it. num_done: items."""

    ticket: Ticket
    work: SingleWork | ItemWork
    turn: Turn
    items: Sequence[Any] = ()
    jobs: dict[Job, None] = field(default_factory=dict)
    num_done: int = 0
