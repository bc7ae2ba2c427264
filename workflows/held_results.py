"""Results that equal work may use again while a run that has used them goes on.

So an equal run that comes late goes through what the earlier one has done at once, and joins it
where it is at work. Nothing is held beyond what the runs themselves hold, and their bound is its
bound.

Source: HeraSys section 4.2, asynchronous reuse of completed nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workflows.operators.base import NodeResult


@dataclass(frozen=True, slots=True)
class Finished:
    """A result, and all text of the output that was said on the way to it."""

    result: NodeResult
    said: str


@dataclass(slots=True)
class _Held:
    finished: Finished
    run_ids: set[str] = field(default_factory=set)


class HeldResults:
    """Results by signature, and the runs that have used them."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._keys: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def find(self, key: str) -> Finished | None:
        held = self._held.get(key)
        return None if held is None else held.finished

    def hold(self, key: str, finished: Finished, run_id: str) -> None:
        """A run uses a result. Where one is held already, that one stays: they are equal."""
        self._held.setdefault(key, _Held(finished)).run_ids.add(run_id)
        self._keys.setdefault(run_id, set()).add(key)

    def release(self, run_id: str) -> None:
        """A run has ended; results that no other one has used go with it."""
        for key in self._keys.pop(run_id, ()):
            run_ids = self._held[key].run_ids
            run_ids.remove(run_id)
            if not run_ids:
                del self._held[key]
