"""A run as the database has it, for those who ask: one that has ended, or another server's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workflows.run_events import RunEvents
from workflows.run_journal import past_events
from workflows.run_progress import Failure, RunProgress, replayed
from workflows.stores.runs import StoredRun


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """Its times are the wall clock's. events: all that are stored. document: the workflow."""

    id: str
    name: str | None
    state: RunProgress
    events: RunEvents
    request_hash: bytes | None
    document: Any

    def wall_at(self, at_s: float) -> float:
        """As of a run at work; here the clock is the wall's already."""
        return at_s


def past_run(stored: StoredRun) -> PastRun:
    """A stored run with its events, or without them for a list."""
    events = past_events(stored.events.get("", []), wall_offset_s=0.0)
    nodes = (stored.document or {}).get("nodes", [])
    state = replayed([node["id"] for node in nodes], events, created_s=stored.created_s)
    if not events:
        error = stored.error
        state.status, state.finished_s = stored.status, stored.finished_s
        state.failure = None if error is None else Failure(**error)
    shown = RunEvents(events)
    shown.close()
    return PastRun(
        id=stored.id,
        name=stored.name,
        state=state,
        events=shown,
        request_hash=stored.request_hash,
        document=stored.document,
    )
