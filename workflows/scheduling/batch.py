"""Parts for dispatches out of queued tickets, in their order."""

from __future__ import annotations

from collections.abc import Iterable

from workflows.scheduling.allocation import Choice
from workflows.scheduling.live_ticket import LiveTicket
from workflows.scheduling.messages import Part

Unit = list[tuple[LiveTicket, Part]]


def cut(tickets: Iterable[LiveTicket], choice: Choice, max_batch: int) -> list[Unit]:
    """At most `choice.split` units of about equal numbers of items; marks the items as taken.

    A ticket that may not be split stays whole, unless it alone is more than a batch.
    """
    target = min(max_batch, -(-choice.num_items // choice.split))
    units: list[Unit] = [[]]
    room, num_open = target, choice.num_items
    for live in tickets:
        while live.num_left and num_open > 0:
            if not room:
                if len(units) == choice.split:
                    return units
                units.append([])
                room = target
            num_taken = _fitting(live, min(room, num_open), max_batch, is_first=not units[-1])
            if not num_taken:
                room = 0
                continue
            units[-1].append((live, Part(live.ticket, live.num_taken, num_taken)))
            live.num_taken += num_taken
            live.num_parts += 1
            room = max(0, room - num_taken)
            num_open -= num_taken
    return units


def _fitting(live: LiveTicket, room: int, max_batch: int, *, is_first: bool) -> int:
    """How many of a ticket's items go into a unit with this room; 0 to leave it for the next."""
    if live.num_left <= room:
        return live.num_left
    if live.ticket.max_split > 1 or live.num_left > max_batch:
        return room
    return live.num_left if is_first else 0
