"""One run, as the service holds it."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

import anyio
import orjson

from workflows.run_events import RunEvent, RunEvents
from workflows.run_journal import Recorded
from workflows.run_slots import RunSlots
from workflows.run_state import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """A client's word for a run that it wants once. request_hash: of what it asked for by it."""

    text: str
    request_hash: bytes


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """One run.

    wall_s: the wall clock when it was created. root: the outermost run around it, of which
    num_nested counts those inside, and num_bytes what all their nodes have put out. slots: its
    place in the scheduler, once it is worked on. ended: is set once its last event was logged and
    all of its work has stopped.

    path: of a run inside, where it stands in the root, unique there. inside: such runs of nodes
    that are at work, by path; past: what those had done that were interrupted.

    key: of idempotency. recorded: by the journal, if there is one. num_effects: nodes that changed
    something, of which so many are known to be on record. is_suspended: it has stopped without an
    end; another server, or the next one, goes on with it.
    """

    id: str
    tenant: str
    wall_s: float
    state: RunState
    slots: RunSlots | None = None
    root: Run | None = None
    num_nested: int = 0
    num_bytes: int = 0
    events: RunEvents = field(default_factory=RunEvents)
    ended: anyio.Event = field(default_factory=anyio.Event)
    path: str = ""
    key: RunKey | None = None
    recorded: Recorded | None = None
    is_suspended: bool = False
    num_effects: int = 0
    num_effects_recorded: int = 0
    inside: dict[str, Run] = field(default_factory=dict)
    past: dict[str, list[RunEvent]] = field(default_factory=dict)
    _digest: str = ""
    _scopes: dict[str, anyio.CancelScope] = field(default_factory=dict)
    _num_tasks: int = 0

    @property
    def request_hash(self) -> bytes | None:
        return None if self.key is None else self.key.request_hash

    @property
    def name(self) -> str | None:
        return self.state.workflow.spec.name

    def workflow_digest(self) -> str:
        """Equal for runs of equal workflows."""
        if not self._digest:
            document = self.state.workflow.spec.model_dump(mode="json", exclude_unset=True)
            text = orjson.dumps(document, option=orjson.OPT_SORT_KEYS)
            self._digest = hashlib.sha256(text).hexdigest()
        return self._digest

    def stop_task(self, key: str) -> None:
        """Stop the task of this key, if there is one."""
        if key in self._scopes:
            self._scopes[key].cancel()

    def wall_at(self, at_s: float) -> float:
        """The wall clock at a moment of the event loop's clock."""
        return self.wall_s + (at_s - self.state.created_s)


def new_run_id() -> str:
    return f"run_{secrets.token_hex(12)}"
