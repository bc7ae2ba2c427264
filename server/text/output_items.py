"""Pieces of one choice as output items of the Responses API, and as the events that tell of them.

At most one item is open. Each kind has its events, in this order:

    message        output_item.added, content_part.added, output_text.delta …, output_text.done,
                   content_part.done, output_item.done
    reasoning      the same with reasoning_text
    function_call  output_item.added, function_call_arguments.delta …, ….done, output_item.done
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from server.text.assembler import Piece, TokenEntry
from server.text.items import new_id
from spot.parsed import ToolCallDelta

logger = logging.getLogger(__name__)

JsonObject = dict[str, Any]
Event = tuple[str, JsonObject]
ItemEnd = Literal["completed", "incomplete"]
Logprobs = Callable[[Sequence[TokenEntry]], list[JsonObject]]


@dataclass(slots=True)
class _OpenText:
    """A message or a reasoning item, with one part of text that grows."""

    index: int
    is_reasoning: bool
    id: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[JsonObject] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = new_id("rs" if self.is_reasoning else "msg")

    def render(self, status: str, *, with_part: bool = True) -> JsonObject:
        kind = "reasoning" if self.is_reasoning else "message"
        item: JsonObject = {"id": self.id, "type": kind, "status": status}
        if self.is_reasoning:
            item["summary"] = []
        else:
            item["role"] = "assistant"
        parts = [self._part("".join(self.texts), self.logprobs)] if with_part else []
        return {**item, "content": parts}

    def _part(self, text: str, logprobs: list[JsonObject]) -> JsonObject:
        if self.is_reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    @property
    def _place(self) -> JsonObject:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    @property
    def _event(self) -> str:
        return "response.reasoning_text" if self.is_reasoning else "response.output_text"

    def opened(self) -> list[Event]:
        item = self.render("in_progress", with_part=False)
        part = {**self._place, "part": self._part("", [])}
        return [
            ("response.output_item.added", {"output_index": self.index, "item": item}),
            ("response.content_part.added", part),
        ]

    def add(self, text: str, logprobs: list[JsonObject]) -> list[Event]:
        self.texts.append(text)
        self.logprobs += logprobs
        if not text and not logprobs:
            return []
        fields = {**self._place, "delta": text}
        if not self.is_reasoning:
            fields["logprobs"] = logprobs
        return [(f"{self._event}.delta", fields)]

    def closed(self, status: ItemEnd) -> list[Event]:
        item = self.render(status)
        part = item["content"][0]
        done = {**self._place, "text": part["text"]}
        if not self.is_reasoning:
            done["logprobs"] = part["logprobs"]
        return [
            (f"{self._event}.done", done),
            ("response.content_part.done", {**self._place, "part": part}),
            ("response.output_item.done", {"output_index": self.index, "item": item}),
        ]


@dataclass(slots=True)
class _OpenCall:
    """A call whose arguments grow. number: counts the calls of the answer."""

    index: int
    number: int
    call_id: str
    name: str
    id: str = field(default_factory=lambda: new_id("fc"))
    fragments: list[str] = field(default_factory=list)

    def render(self, status: str) -> JsonObject:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": "".join(self.fragments),
        }

    def opened(self) -> list[Event]:
        item = self.render("in_progress")
        return [("response.output_item.added", {"output_index": self.index, "item": item})]

    def add(self, fragment: str) -> list[Event]:
        if not fragment:
            return []
        self.fragments.append(fragment)
        fields = {"item_id": self.id, "output_index": self.index, "delta": fragment}
        return [("response.function_call_arguments.delta", fields)]

    def closed(self, status: ItemEnd) -> list[Event]:
        item = self.render(status)
        done = {"item_id": self.id, "output_index": self.index, "arguments": item["arguments"]}
        return [
            ("response.function_call_arguments.done", done),
            ("response.output_item.done", {"output_index": self.index, "item": item}),
        ]


class OutputItems:
    """Takes pieces, makes items and events.

    White space alone begins no message: it is held until other text follows it, since models put
    some before and between calls.
    logprobs: renders entries where log probabilities were asked for. Those of tokens that became no
        text are held as well: the next text has them, unless reasoning or a call comes first.
    count_tokens: of a text; for pieces that hold the end of the reasoning and more.
    num_reasoning_tokens: tokens that became reasoning.
    """

    def __init__(
        self,
        *,
        logprobs: Logprobs | None = None,
        count_tokens: Callable[[str], int] = len,
        show_reasoning: bool = True,
    ) -> None:
        self._logprobs = logprobs
        self._count_tokens = count_tokens
        self._show_reasoning = show_reasoning
        self._is_thinking = False
        self._done: list[JsonObject] = []
        self._open: _OpenText | _OpenCall | None = None
        self._held_text = ""
        self._held_logprobs: list[JsonObject] = []
        self.num_reasoning_tokens = 0

    @property
    def items(self) -> list[JsonObject]:
        """All items; the one that is still open is incomplete."""
        return self._done + ([] if self._open is None else [self._open.render("incomplete")])

    def push(self, piece: Piece) -> list[Event]:
        """Sort one piece in: its reasoning, then its text, then its calls."""
        events: list[Event] = []
        if piece.reasoning:
            events += self._reasoning(piece)
        if piece.content or (piece.entries and not (self._is_thinking or piece.tool_calls)):
            events += self._text(piece)
        for call in piece.tool_calls:
            events += self._call(call)
        return events

    def finish(self, *, is_cut: bool) -> list[Event]:
        """Close the last item. is_cut: it was ended by a limit. An answer has at least one item."""
        events: list[Event] = []
        if self._open is None:
            events += self._begin(_OpenText(len(self._done), is_reasoning=False))
        if isinstance(self._open, _OpenText) and not self._open.is_reasoning:
            events += self._flush_text("")
        return events + self._close("incomplete" if is_cut else "completed")

    def _begin(self, item: _OpenText | _OpenCall) -> list[Event]:
        events = self._close("completed")
        self._open = item
        return events + item.opened()

    def _close(self, status: ItemEnd) -> list[Event]:
        if self._open is None:
            return []
        closed, self._open = self._open, None
        self._done.append(closed.render(status))
        return closed.closed(status)

    @property
    def _next_index(self) -> int:
        return len(self._done) + (self._open is not None)

    def _reasoning(self, piece: Piece) -> list[Event]:
        num_tokens = len(piece.token_ids)
        if piece.content or piece.tool_calls:
            num_tokens = min(num_tokens, self._count_tokens(piece.reasoning))
        self.num_reasoning_tokens += num_tokens
        self._is_thinking = True
        self._held_text, self._held_logprobs = "", []
        if not self._show_reasoning:
            return []
        events: list[Event] = []
        if not (isinstance(self._open, _OpenText) and self._open.is_reasoning):
            events += self._begin(_OpenText(self._next_index, is_reasoning=True))
        assert isinstance(self._open, _OpenText)
        return events + self._open.add(piece.reasoning, [])

    def _text(self, piece: Piece) -> list[Event]:
        if self._logprobs is not None and piece.entries:
            self._held_logprobs += self._logprobs(piece.entries)
        if not piece.content:
            return []
        self._is_thinking = False
        if isinstance(self._open, _OpenText) and not self._open.is_reasoning:
            return self._flush_text(piece.content)
        self._held_text += piece.content
        if not self._held_text.strip():
            return []
        opened = self._begin(_OpenText(self._next_index, is_reasoning=False))
        return opened + self._flush_text("")

    def _flush_text(self, text: str) -> list[Event]:
        assert isinstance(self._open, _OpenText)
        text, logprobs = self._held_text + text, self._held_logprobs
        self._held_text, self._held_logprobs = "", []
        return self._open.add(text, logprobs)

    def _call(self, call: ToolCallDelta) -> list[Event]:
        if isinstance(self._open, _OpenCall) and self._open.number == call.index:
            return self._open.add(call.arguments)
        if call.name is None:
            logger.warning("a piece of a tool call came after the next one had begun")
            return []
        self._held_text, self._held_logprobs, self._is_thinking = "", [], False
        call_id = call.id or new_id("call")
        opened = _OpenCall(self._next_index, call.index, call_id, call.name)
        return self._begin(opened) + opened.add(call.arguments)
