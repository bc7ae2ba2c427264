"""Tool calls that were asked for: `tool_choice` required or named, as constrained JSON.

The engine is constrained to a JSON text; these parsers turn that text, piece by piece, into calls.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from server.protocol.chat import Tool
from spot.errors import InvalidRequest
from spot.generation import StructuredOutput
from spot.parsed import ParsedDelta, ToolCallDelta

# A small model that may call without end does, until its output is cut.
MAX_CALLS = 64


def new_tool_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def _hoisted(tools: list[Tool]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Parameter schemas without their `$defs`, and those, since references start at the root.

    Raises InvalidRequest where that cannot be: no object, or two definitions of one name.
    """
    schemas: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        schema = dict(_parameters(tool))
        own = schema.pop("$defs", None) or {}
        if not isinstance(own, dict):
            raise InvalidRequest(
                "$defs must be an object.", param=f"tools.{index}.function.parameters.$defs"
            )
        for name, definition in own.items():
            if definitions.setdefault(name, definition) != definition:
                raise InvalidRequest(
                    f"Another tool has a different definition of '{name[:64]}'; with tool_choice "
                    '"required" the names in $defs must agree.',
                    param=f"tools.{index}.function.parameters.$defs",
                )
        schemas.append(schema)
    return schemas, definitions


def named_constraint(tool: Tool) -> StructuredOutput:
    """The output is the arguments of this one tool."""
    return StructuredOutput(json_schema=_parameters(tool))


def required_constraint(tools: list[Tool], *, at_most_one: bool) -> StructuredOutput:
    """The output is an array of 1 to 64 calls: `[{"name": …, "parameters": {…}}, …]`."""
    schemas, definitions = _hoisted(tools)
    variants = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [tool.function.name]},
                "parameters": schema,
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool, schema in zip(tools, schemas, strict=True)
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "maxItems": 1 if at_most_one else MAX_CALLS,
        "items": {"anyOf": variants},
    }
    if definitions:
        schema["$defs"] = definitions
    return StructuredOutput(json_schema=schema)


class NamedToolParser:
    """All text is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str, token_ids: list[int], finished: bool) -> ParsedDelta:
        if not text:
            return ParsedDelta()
        if self._started:
            return ParsedDelta(tool_calls=[ToolCallDelta(0, arguments=text)])
        self._started = True
        call = ToolCallDelta(0, new_tool_call_id(), self._name, text)
        return ParsedDelta(tool_calls=[call])


class RequiredToolParser:
    """Reads `[{"name": "f", "parameters": {…}}, …]` as it grows.

    Only the structure is tracked (strings and brackets). The grammar puts the name first; where a
    model writes it last, the arguments wait for it.
    """

    def __init__(self, *, at_most_one: bool = False) -> None:
        self._at_most_one = at_most_one
        self._index = -1
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key = ""
        self._token = ""
        self._after_colon = False
        self._name: str | None = None
        self._announced = False
        self._pending = ""
        self._value_depth: int | None = None

    def feed(self, text: str, token_ids: list[int], finished: bool) -> ParsedDelta:
        calls: list[ToolCallDelta] = []
        fragment: list[str] = []
        for char in text:
            in_value = self._value_depth is not None
            self._advance(char)
            if in_value and (self._value_depth is not None or char in "}]"):
                closes_call = self._value_depth is None and self._depth < 2
                if not closes_call:
                    fragment.append(char)
            elif self._value_depth is not None:
                fragment.append(char)
            if fragment and self._value_depth is None:
                self._emit(calls, "".join(fragment))
                fragment.clear()
            if self._name is not None and not self._announced:
                self._announce(calls)
        if fragment:
            self._emit(calls, "".join(fragment))
        if self._at_most_one:
            calls = [call for call in calls if call.index == 0]
        return ParsedDelta(tool_calls=calls)

    def _announce(self, calls: list[ToolCallDelta]) -> None:
        self._announced = True
        calls.append(ToolCallDelta(self._index, new_tool_call_id(), self._name, self._pending))
        self._pending = ""

    def _emit(self, calls: list[ToolCallDelta], arguments: str) -> None:
        if not self._announced:
            self._pending += arguments
        elif calls and calls[-1].index == self._index:
            calls[-1].arguments += arguments
        else:
            calls.append(ToolCallDelta(self._index, arguments=arguments))

    def _advance(self, char: str) -> None:
        """One character of JSON structure. Depth 1 is the array, depth 2 a call's object."""
        if self._in_string:
            self._string_char(char)
        elif char == '"':
            self._in_string, self._token = True, ""
        elif char in "[{":
            self._open(char)
        elif char in "]}":
            self._depth -= 1
            if self._value_depth is not None and self._depth <= self._value_depth:
                self._value_depth = None
                self._after_colon = False
        elif char == ":" and self._depth == 2:
            self._after_colon = True
        elif char == "," and self._depth == 2:
            self._after_colon = False

    def _open(self, char: str) -> None:
        if self._depth == 1 and char == "{":
            self._index += 1
            self._name, self._announced, self._pending = None, False, ""
            self._after_colon = False
        if self._depth == 2 and self._after_colon and self._key in ("parameters", "arguments"):
            self._value_depth = 2
        self._depth += 1

    def _string_char(self, char: str) -> None:
        if not self._escaped and char == '"':
            self._in_string = False
            if self._depth == 2 and self._value_depth is None:
                if not self._after_colon:
                    self._key = _unescaped(self._token)
                elif self._key == "name":
                    self._name = _unescaped(self._token)
            return
        self._escaped = char == "\\" and not self._escaped
        if self._value_depth is None:
            self._token += char


def _unescaped(text: str) -> str:
    """The string that stands between the quotes of JSON text."""
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return text
