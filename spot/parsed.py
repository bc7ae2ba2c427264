"""Model output as people think of it: content, reasoning, tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class ToolCallDelta:
    """A piece of a tool call. `id` and `name` come once, with the first piece of that index.

    index: counts tool calls only, from 0.
    arguments: a fragment of JSON text; the fragments of an index joined are the arguments.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ParsedDelta:
    """What a piece of output adds to each part."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


class OutputParser(Protocol):
    """Sorts streamed text into content, reasoning and tool calls. One per choice."""

    def feed(self, text: str, token_ids: list[int], finished: bool) -> ParsedDelta:
        """Take the next piece; `finished` with the last one (which may be empty)."""
