"""Required and named tool calls: constraints for the engine, parsers for its output."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.protocol.chat import FunctionDefinition, Tool
from server.text.tool_choice import (
    MAX_CALLS,
    NamedToolParser,
    RequiredToolParser,
    named_constraint,
    required_constraint,
)
from spot.errors import InvalidRequest
from spot.parsed import OutputParser, ToolCallDelta

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\{}[],:é😀\n', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "parameters", "x", '"']), inner, max_size=3)
    ),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["name", "parameters", "arguments", "x", 'q"}']), JSON_VALUES, max_size=4
)
NAMES = st.sampled_from(["f", "get_weather", "g-2"])
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=4)


def joined(parser: OutputParser, pieces: list[str]) -> list[dict[str, Any]]:
    """The calls as a client puts them together; strict about what comes when."""
    calls: list[dict[str, Any]] = []
    for position, piece in enumerate(pieces):
        parsed = parser.feed(piece, [], position == len(pieces) - 1)
        assert parsed.content == parsed.reasoning == ""
        for delta in parsed.tool_calls:
            add(calls, delta)
    return calls


def add(calls: list[dict[str, Any]], delta: ToolCallDelta) -> None:
    if delta.index == len(calls):
        assert delta.id is not None
        assert delta.name is not None
        calls.append({"id": delta.id, "name": delta.name, "arguments": ""})
    else:
        assert delta.index == len(calls) - 1, "calls come one after the other"
        assert delta.id is None
        assert delta.name is None
    calls[delta.index]["arguments"] += delta.arguments


def decoded(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def split(text: str, cuts: list[int]) -> list[str]:
    positions = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(positions)]


def as_output(calls: list[tuple[str, Any]], **options: Any) -> str:
    return json.dumps([{"name": name, "parameters": args} for name, args in calls], **options)


@given(CALLS, st.lists(st.integers(0, 400), max_size=20), st.booleans(), st.booleans())
def test_required_calls_are_what_json_says_at_any_chunking(
    calls: list[tuple[str, Any]], cuts: list[int], indent: bool, ascii_only: bool
) -> None:
    text = as_output(calls, indent=1 if indent else None, ensure_ascii=ascii_only)
    whole = decoded(joined(RequiredToolParser(), [text]))
    assert whole == calls
    assert decoded(joined(RequiredToolParser(), split(text, cuts))) == calls
    assert decoded(joined(RequiredToolParser(), list(text))) == calls


@given(CALLS, st.lists(st.integers(0, 400), max_size=10))
def test_the_order_of_the_keys_does_not_matter(
    calls: list[tuple[str, Any]], cuts: list[int]
) -> None:
    text = json.dumps([{"parameters": args, "name": name} for name, args in calls])
    assert decoded(joined(RequiredToolParser(), split(text, cuts))) == calls


@given(CALLS, st.lists(st.integers(0, 400), max_size=10))
def test_at_most_one_is_the_first(calls: list[tuple[str, Any]], cuts: list[int]) -> None:
    pieces = split(as_output(calls), cuts)
    assert decoded(joined(RequiredToolParser(at_most_one=True), pieces)) == calls[:1]


@given(CALLS, st.integers(0, 400))
def test_a_cut_output_gives_a_beginning_of_the_calls(
    calls: list[tuple[str, Any]], cut: int
) -> None:
    text = as_output(calls)
    found = joined(RequiredToolParser(), [text[: cut % (len(text) + 1)]])
    for call, (name, arguments) in zip(found, calls, strict=False):
        assert call["name"] == name
        assert json.dumps(arguments).startswith(call["arguments"])


def test_an_escaped_name_is_decoded() -> None:
    text = '[{"name": "caf\\u00e9", "parameters": {}}]'
    assert decoded(joined(RequiredToolParser(), list(text))) == [("café", {})]


def test_calls_have_ids_of_their_own() -> None:
    calls = joined(RequiredToolParser(), [as_output([("f", {}), ("f", {})])])
    assert len({call["id"] for call in calls}) == 2
    assert all(call["id"].startswith("call_") for call in calls)


@given(ARGUMENTS, st.lists(st.integers(0, 400), max_size=10))
def test_a_named_call_is_all_of_the_text(arguments: Any, cuts: list[int]) -> None:
    text = json.dumps(arguments)
    (call,) = joined(NamedToolParser("f"), split(text, cuts))
    assert (call["name"], call["arguments"]) == ("f", text)


def test_no_text_is_no_named_call() -> None:
    assert joined(NamedToolParser("f"), ["", ""]) == []


def tool(name: str, parameters: dict[str, Any] | None = None) -> Tool:
    function = FunctionDefinition(name=name, parameters=parameters)
    return Tool(type="function", function=function)


def test_the_named_constraint_is_the_tools_own_schema() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    assert named_constraint(tool("f", schema)).json_schema == schema
    assert named_constraint(tool("f")).json_schema == {"type": "object", "properties": {}}


def test_the_required_constraint_lists_every_tool() -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {}}}
    constraint = required_constraint([tool("f", schema), tool("g")], at_most_one=False).json_schema
    assert isinstance(constraint, dict)
    names = [variant["properties"]["name"]["enum"] for variant in constraint["items"]["anyOf"]]
    assert names == [["f"], ["g"]]
    assert constraint["minItems"] == 1
    assert constraint["maxItems"] == MAX_CALLS
    assert constraint["$defs"] == {"X": {}}
    assert "$defs" in schema, "the request's own schema is left alone"


def test_definitions_are_shared_when_they_agree() -> None:
    schema = {"type": "object", "$defs": {"item": {"type": "string"}}}
    constraint = required_constraint([tool("f", schema), tool("g", schema)], at_most_one=False)
    assert isinstance(constraint.json_schema, dict)
    assert constraint.json_schema["$defs"] == {"item": {"type": "string"}}


@pytest.mark.parametrize("definitions", [5, True, "x", ["a"], [[]], {"item": {"type": "number"}}])
def test_definitions_that_cannot_be_shared_are_refused(definitions: Any) -> None:
    tools = [
        tool("f", {"type": "object", "$defs": {"item": {"type": "string"}}}),
        tool("g", {"type": "object", "$defs": definitions}),
    ]
    with pytest.raises(InvalidRequest) as caught:
        required_constraint(tools, at_most_one=False)
    assert caught.value.param == "tools.1.function.parameters.$defs"


def test_at_most_one_is_part_of_the_constraint() -> None:
    constraint = required_constraint([tool("f")], at_most_one=True).json_schema
    assert isinstance(constraint, dict)
    assert constraint["maxItems"] == 1


@pytest.mark.parametrize("text", ["", "[", "nonsense", "[]", "[1, 2]", '{"name": "f"}', "]]}}"])
def test_what_is_no_call_breaks_nothing(text: str) -> None:
    assert joined(RequiredToolParser(), [text]) == []
