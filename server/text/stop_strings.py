"""Stop strings over streamed text: found across pieces, and never shown half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Text that may be shown now, and the stop string that ended it, if any."""

    text: str
    stop: str | None = None


class StopStrings:
    """Holds back whatever could become a stop string.

    Where several match, the one that completes first wins, at equal ends the longest.
    include: whether the stop string itself is part of the output.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = list(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> StopMatch:
        """Add text; returns what is safe to show. After a match nothing may be pushed."""
        if not self._stops:
            return StopMatch(text)
        held = self._held + text
        match = self._first_match(held)
        if match is not None:
            stop, start = match
            self._held = ""
            return StopMatch(held[: start + len(stop)] if self._include else held[:start], stop)
        keep = self._possible_prefix(held)
        self._held = held[len(held) - keep :]
        return StopMatch(held[: len(held) - keep])

    def flush(self) -> str:
        """What was held back, once it is clear that no stop string will come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[str, int] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[2], best[1])

    def _possible_prefix(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
