"""How the tools of a chat request are used: who decides on a call, and who finds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.gateway import Gateway
from server.protocol.chat import ChatCompletionRequest, NamedToolChoice, Tool
from server.text.tool_choice import (
    NamedToolParser,
    RequiredToolParser,
    named_constraint,
    required_constraint,
)
from spot.errors import InvalidRequest
from spot.generation import StructuredOutput
from spot.parsed import ChainedParser, OutputParser, ParsedDelta, ParserSource


@dataclass(slots=True)
class ToolPlan:
    """How tools are used in this request.

    mode: none (no calls), auto (the model decides, a parser finds the calls), required, named.
    """

    mode: str
    tools: list[Tool]
    named: Tool | None = None
    at_most_one: bool = False

    @property
    def constraint(self) -> StructuredOutput | None:
        """What makes the model call a tool that it must call."""
        if self.mode == "named" and self.named is not None:
            return named_constraint(self.named)
        if self.mode == "required":
            return required_constraint(self.tools, at_most_one=self.at_most_one)
        return None

    def parser(
        self, parsers: ParserSource | None, raw: dict[str, Any], prompt_ids: list[int]
    ) -> OutputParser | None:
        """What sorts one choice's output: a parser of the model's, of ours, or both in a row."""
        parser: OutputParser | None = None
        if self.mode == "named" and self.named is not None:
            parser = NamedToolParser(self.named.function.name)
        elif self.mode == "required":
            parser = RequiredToolParser(at_most_one=self.at_most_one)
        if parsers is not None:
            found = parsers.new(raw, prompt_ids)
            parser = found if parser is None else ChainedParser(found, parser)
            if self.at_most_one:
                parser = _SingleCall(parser)
        return parser


def plan_tools(body: ChatCompletionRequest, gateway: Gateway) -> ToolPlan:
    """Raises InvalidRequest for a choice that the tools or the server cannot meet."""
    choice = body.tool_choice
    tools = body.tools or []
    at_most_one = body.parallel_tool_calls is False
    if not tools:
        if choice is not None and choice != "none":
            raise InvalidRequest("tool_choice is only allowed with tools.", param="tool_choice")
        return ToolPlan("none", [])
    if isinstance(choice, NamedToolChoice):
        named = next((t for t in tools if t.function.name == choice.function.name), None)
        if named is None:
            raise InvalidRequest(
                f"tool_choice names '{choice.function.name[:64]}', which is not in tools.",
                param="tool_choice.function.name",
            )
        return ToolPlan("named", tools, named, at_most_one)
    mode = choice or "auto"
    options = gateway.model.chat
    if mode == "auto" and not (options.enable_auto_tool_choice and options.has_tool_parser):
        raise InvalidRequest(
            'tool_choice "auto" (the default with tools) needs a server started with '
            "--enable-auto-tool-choice and --tool-call-parser; "
            'use "required", a named tool or "none" here.',
            param="tool_choice",
            code="unsupported_value",
        )
    return ToolPlan(mode, tools, None, at_most_one)


class _SingleCall:
    """Lets only the first tool call of a parser through (`parallel_tool_calls: false`)."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    def feed(self, text: str, token_ids: list[int], finished: bool) -> ParsedDelta:
        parsed = self._parser.feed(text, token_ids, finished)
        parsed.tool_calls = [call for call in parsed.tool_calls if call.index == 0]
        return parsed
