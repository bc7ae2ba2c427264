"""Model output as people think of it: content, reasoning, tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


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


class ParserSource(Protocol):
    """Makes the output parsers of one model (`--tool-call-parser`, `--reasoning-parser`)."""

    def new(self, body: dict[str, Any], prompt_token_ids: list[int]) -> OutputParser:
        """A parser for one choice of this chat request."""

    def adjust(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Fields of the request that the parsers want changed, or None."""

    def reasoning_ended(self, body: dict[str, Any], prompt_token_ids: list[int]) -> bool | None:
        """Whether the output starts behind the reasoning; None without a reasoning parser."""


class ChainedParser:
    """Reasoning by one parser; what that leaves as content goes to another."""

    def __init__(self, reasoning: OutputParser, tools: OutputParser) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str, token_ids: list[int], finished: bool) -> ParsedDelta:
        first = self._reasoning.feed(text, token_ids, finished)
        parsed = self._tools.feed(first.content, token_ids, finished)
        parsed.reasoning = first.reasoning
        return parsed
