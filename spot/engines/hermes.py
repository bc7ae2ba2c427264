"""Tool calls in the Hermes format, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Written for streaming: what comes out does not depend on how the text was cut into pieces, nor on
the order of the keys. Arguments are passed on as they arrive, as the text that the model wrote.
Text behind the first call is not content; a call that cannot be recognised is.
"""

from __future__ import annotations

import json
import secrets

from spot.parsed import ParsedDelta, ToolCallDelta

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
_SPACE = " \t\r\n"


class HermesParser:
    """Sorts streamed text into content and tool calls. A `spot.parsed.OutputParser`."""

    def __init__(self) -> None:
        self._buffer = ""
        self._call: _Call | None = None
        self._num_regions = 0
        self._num_calls = 0

    def feed(self, text: str, token_ids: list[int], finished: bool) -> ParsedDelta:
        self._buffer += text
        parsed = ParsedDelta()
        while self._advance(parsed, finished):
            pass
        if finished and self._call is not None:
            self._end_call(parsed, close_tag="")
        return parsed

    def _advance(self, parsed: ParsedDelta, finished: bool) -> bool:
        """Take the buffer up to the next tag. Returns whether there was one."""
        tag = OPEN_TAG if self._call is None else CLOSE_TAG
        before, found, after = self._buffer.partition(tag)
        if found:
            self._buffer = after
        else:
            num_held = 0 if finished else _overlap(before, tag)
            before, self._buffer = _split_end(before, num_held)
        if self._call is not None:
            self._feed_call(self._call, before, parsed)
            if found:
                self._end_call(parsed, close_tag=CLOSE_TAG)
        else:
            if self._num_regions == 0:
                parsed.content += before
            if found:
                self._num_regions += 1
                self._call = _Call()
        return bool(found)

    def _feed_call(self, call: _Call, text: str, parsed: ParsedDelta) -> None:
        call.feed(text)
        if call.name is None:
            return
        if call.index is None:
            call.index = self._num_calls
            self._num_calls += 1
            parsed.tool_calls.append(
                ToolCallDelta(call.index, new_tool_call_id(), call.name, call.take_arguments())
            )
        elif arguments := call.take_arguments():
            parsed.tool_calls.append(ToolCallDelta(call.index, arguments=arguments))

    def _end_call(self, parsed: ParsedDelta, *, close_tag: str) -> None:
        """The region is over: what was no call is given back as content."""
        assert self._call is not None
        call, self._call = self._call, None
        if call.index is None:
            parsed.content += OPEN_TAG + call.text + close_tag
        elif rest := call.missing_arguments():
            parsed.tool_calls.append(ToolCallDelta(call.index, arguments=rest))


class _Call:
    """Reads one JSON object as it arrives, and picks out its `name` and `arguments`.

    text: everything read so far, until the name is known.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.index: int | None = None
        self.text = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._piece = ""  # the key or value being read, at the object's top level
        self._has_begun = False  # whether the piece has a first character, even if it was taken
        self._reads_value = False
        self._arguments = ""
        self._seen_arguments = False

    def feed(self, text: str) -> None:
        if self.name is None:
            self.text += text
        for character in text:
            self._read(character)

    def take_arguments(self) -> str:
        """The arguments' text that was not taken before."""
        taken, self._arguments = self._arguments, ""
        if self._reads_arguments and not self._is_no_object:
            settled = self._piece.rstrip(_SPACE)
            taken += settled
            self._piece = self._piece[len(settled) :]
            self._seen_arguments |= bool(settled)
        return taken

    def missing_arguments(self) -> str:
        """What a whole call without arguments needs to be one."""
        return "" if self._seen_arguments or self._depth else "{}"

    @property
    def _reads_arguments(self) -> bool:
        return self._reads_value and self._key == "arguments"

    @property
    def _is_no_object(self) -> bool:
        """Whether the arguments must be whole before they can be passed on as an object."""
        return not self._seen_arguments and not self._piece.startswith("{")

    def _read(self, character: str) -> None:
        if self._in_string:
            self._read_in_string(character)
        elif character == '"':
            self._in_string = True
            self._keep(character)
        elif character in "{[":
            self._depth += 1
            if self._depth > 1:
                self._keep(character)
        elif character in "}]":
            self._read_closing(character)
        elif self._depth == 1 and character == ":" and not self._reads_value:
            self._start_piece(key=_decoded(self._piece.strip(_SPACE)))
        elif self._depth == 1 and character == ",":
            self._end_value()
        elif self._has_begun or character not in _SPACE:
            self._keep(character)

    def _read_in_string(self, character: str) -> None:
        self._keep(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False

    def _read_closing(self, character: str) -> None:
        if self._depth == 1:
            self._end_value()
        else:
            self._keep(character)
        self._depth = max(0, self._depth - 1)

    def _keep(self, character: str) -> None:
        if self._depth:
            self._piece += character
            self._has_begun = True

    def _start_piece(self, key: str | None) -> None:
        """Begin a key, or the value of `key`."""
        self._key, self._reads_value = key, key is not None
        self._piece, self._has_begun = "", False

    def _end_value(self) -> None:
        """A top-level value is complete."""
        piece = self._piece.rstrip(_SPACE)
        if self._key == "name" and self.name is None:
            self.name = _decoded(piece)
        elif self._reads_arguments:
            self._arguments += _as_object(piece) if self._is_no_object else piece
            self._seen_arguments = True
        self._start_piece(key=None)


def new_tool_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _decoded(text: str) -> str | None:
    """The string that a JSON text stands for, or None if it is no string."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) and value else None


def _as_object(text: str) -> str:
    """Arguments that are no JSON object: a string holds their text, null means none."""
    return "{}" if text == "null" else _decoded(text) or text


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    return next(
        (
            size
            for size in range(min(len(text), len(tag) - 1), 0, -1)
            if tag.startswith(text[-size:])
        ),
        0,
    )


def _split_end(text: str, size: int) -> tuple[str, str]:
    return text[: len(text) - size], text[len(text) - size :]
