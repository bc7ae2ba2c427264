"""Ids of the events of a journaled stream: what a client has once it has the event.

7            7 output tokens of the only choice
7.5f         of two choices: 7 tokens, and all 5 of one that has finished
7+1.5f       the same, and the first event of what comes after the 7 tokens
+1           the first event of the opening
8f.5f;1      all choices, and the first event of the closing
8f.5f;end    everything
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from server.endpoints.streaming import ChunkWriter
from server.errors import ErrorReply
from server.generation_run import GenerationRun
from server.journaling import Journaling
from server.text.assembler import Piece
from spot.errors import InvalidRequest

HEADER = "Last-Event-ID"
_NUM_EVENTS = "[1-9][0-9]{0,3}"
_CHOICE = re.compile(rf"(0|[1-9][0-9]{{0,8}})(f?)(?:\+({_NUM_EVENTS}))?")
_OPENING = re.compile(rf"\+({_NUM_EVENTS})")
_CLOSING = re.compile(f"end|{_NUM_EVENTS}")


@dataclass(slots=True)
class Reached:
    """How far a client is with one choice: events beyond those of its tokens in `num_events`."""

    num_tokens: int = 0
    is_finished: bool = False
    num_events: int = 0

    def __bytes__(self) -> bytes:
        events = b"+%d" % self.num_events if self.num_events else b""
        return b"%d%b%b" % (self.num_tokens, b"f" if self.is_finished else b"", events)

    def includes(self, num_tokens: int, is_finished: bool) -> bool:
        return (num_tokens, is_finished) <= (self.num_tokens, self.is_finished)


@dataclass(slots=True)
class Position:
    """How far a client is with a stream. num_opening: None once it has all of the opening."""

    choices: list[Reached]
    num_opening: int | None = None
    num_closing: int = 0
    is_done: bool = False


def position_of(event_id: str, *, num_choices: int) -> Position:
    """Raises InvalidRequest for what is no id of a stream with so many choices."""
    if opening := _OPENING.fullmatch(event_id):
        return Position([Reached() for _ in range(num_choices)], int(opening[1]))
    reached, semicolon, closing = event_id.partition(";")
    found = [_CHOICE.fullmatch(part) for part in reached.split(".")]
    choices = [Reached(int(f[1]), bool(f[2]), int(f[3] or 0)) for f in found if f]
    is_sane = len(choices) == len(found) == num_choices
    if semicolon and not (_CLOSING.fullmatch(closing) and all(c.is_finished for c in choices)):
        is_sane = False
    if not is_sane:
        raise _no_event(event_id)
    is_done = closing == "end"
    return Position(choices, None, int(closing) if semicolon and not is_done else 0, is_done)


def _no_event(event_id: str) -> InvalidRequest:
    return InvalidRequest(
        f"{HEADER} '{event_id[:80]}' is not the id of an event of this stream.", param=HEADER
    )


def with_event_ids(
    writer: ChunkWriter, journaling: Journaling | None, *, num_choices: int
) -> ChunkWriter:
    """The writer of a stream, which is one with event ids if the answer is journaled.

    Raises InvalidRequest and Conflict for a Last-Event-ID with which the stream cannot go on.
    """
    if journaling is None:
        return writer
    had = None
    if journaling.last_event_id is not None:
        had = position_of(journaling.last_event_id, num_choices=num_choices)
        _check_around(had, writer, journaling.last_event_id)
        for index, reached in enumerate(had.choices):
            num_begun = bool(reached.num_events)
            journaling.check_has(
                index, reached.num_tokens + num_begun, is_finished=reached.is_finished
            )
    return NumberedWriter(writer, num_choices=num_choices, had=had)


def _check_around(had: Position, writer: ChunkWriter, event_id: str) -> None:
    """Raises InvalidRequest for more events than the opening or the closing has.

    The last event of each has an id of another form.
    """
    is_beyond_opening = had.num_opening is not None and had.num_opening >= len(
        _frames(writer.opening())
    )
    is_beyond_closing = had.num_closing > 0 and had.num_closing >= len(_frames(writer.closing()))
    if is_beyond_opening or is_beyond_closing:
        raise _no_event(event_id)


class NumberedWriter(ChunkWriter):
    """Gives another writer's events ids, and leaves out those that the client has."""

    def __init__(self, writer: ChunkWriter, *, num_choices: int, had: Position | None) -> None:
        self._writer = writer
        self._had = had
        self._num_tokens = [0] * num_choices
        self._shown = [Reached() for _ in range(num_choices)] if had is None else had.choices
        self._parts = [bytes(reached) for reached in self._shown]

    @property
    def _id(self) -> bytes:
        parts = self._parts
        return parts[0] if len(parts) == 1 else b".".join(parts)

    def opening(self) -> bytes:
        frames = _frames(self._writer.opening())
        skipped = 0
        if self._had is not None:
            skipped = len(frames) if self._had.num_opening is None else self._had.num_opening
        last = len(frames) - 1
        numbered = [
            _numbered(self._id if position == last else b"+%d" % (position + 1), frame)
            for position, frame in enumerate(frames)
        ]
        return b"".join(numbered[skipped:])

    def piece(self, index: int, piece: Piece, run: GenerationRun) -> bytes:
        data = self._writer.piece(index, piece, run)
        num_tokens = self._num_tokens[index] + len(piece.token_ids)
        self._num_tokens[index] = num_tokens
        is_finished = piece.finish_reason is not None
        shown = self._shown[index]
        if num_tokens <= shown.num_tokens and shown.includes(num_tokens, is_finished):
            return b""
        if not is_finished and not shown.num_events and data.count(b"\n\n") == 1:
            # The common case, without ado.
            shown.num_tokens = num_tokens
            self._parts[index] = b"%d" % num_tokens
            return b"id: %b\n%b" % (self._id, data)
        return self._piece(index, _frames(data), num_tokens, is_finished)

    def _piece(self, index: int, frames: list[bytes], num_tokens: int, is_finished: bool) -> bytes:
        shown = self._shown[index]
        if not frames and shown.num_events:
            return b""  # the events that the client has are those of a later piece
        if frames and shown.num_events >= len(frames):
            raise _no_event(self._id.decode())
        reached = Reached(num_tokens, is_finished)
        numbered: list[bytes] = []
        for position in range(shown.num_events, len(frames)):
            is_last = position == len(frames) - 1
            self._show(
                index,
                reached if is_last else Reached(shown.num_tokens, shown.is_finished, position + 1),
            )
            numbered.append(_numbered(self._id, frames[position]))
        if not numbered:
            self._show(index, reached)
        return b"".join(numbered)

    def _show(self, index: int, reached: Reached) -> None:
        self._shown[index], self._parts[index] = reached, bytes(reached)

    def closing(self) -> bytes:
        frames = _frames(self._writer.closing())
        skipped = 0
        if self._had is not None:
            skipped = len(frames) - 1 if self._had.is_done else self._had.num_closing
        last = len(frames) - 1
        numbered = [
            _numbered(self._id + (b";end" if position == last else b";%d" % (position + 1)), frame)
            for position, frame in enumerate(frames)
        ]
        return b"".join(numbered[skipped:])

    def failure(self, reply: ErrorReply) -> bytes:
        return self._writer.failure(reply)


def _frames(data: bytes) -> list[bytes]:
    return data.split(b"\n\n")[:-1]


def _numbered(event_id: bytes, frame: bytes) -> bytes:
    return b"id: %b\n%b\n\n" % (event_id, frame)
