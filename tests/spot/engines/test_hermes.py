"""Hermes tool calls: the same result however the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot.engines.hermes import HermesParser
from spot.parsed import ParsedDelta


def parse(text: str, cuts: list[int] | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a text that is fed in pieces. Checks the contract on the way."""
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts or []), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    parser = HermesParser()
    deltas = [
        parser.feed(piece, [], number == len(pieces) - 1) for number, piece in enumerate(pieces)
    ]
    return "".join(delta.content for delta in deltas), joined_calls(deltas)


def joined_calls(deltas: list[ParsedDelta]) -> list[tuple[str, str]]:
    calls: list[list[str]] = []
    ids: list[str] = []
    for piece in (call for delta in deltas for call in delta.tool_calls):
        if piece.index == len(calls):
            assert piece.id
            assert piece.name
            ids.append(piece.id)
            calls.append([piece.name, ""])
        else:
            assert piece.id is None
            assert piece.name is None
        calls[piece.index][1] += piece.arguments
    assert len(set(ids)) == len(ids)
    return [(name, arguments) for name, arguments in calls]


def in_chunks(text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    return parse(text, list(range(size, len(text), size)))


CALL = '<tool_call>{"name": "f", "arguments": {"trigger": true}}</tool_call>'


@pytest.mark.parametrize("size", range(1, 9))
def test_a_boolean_argument_survives_any_chunk_size(size: int) -> None:
    assert in_chunks(CALL, size) == ("", [("f", '{"trigger": true}')])


@pytest.mark.parametrize("size", [1, 3, 8, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call < here", "no call < here", []),
        ("<tool", "<tool", []),
        ("Let me see.\n" + CALL, "Let me see.\n", [("f", '{"trigger": true}')]),
        (CALL + "\n" + CALL + " done", "", [("f", '{"trigger": true}')] * 2),
        (CALL.replace("{", "{ \n").replace("</", "\n</"), "", [("f", '{ \n"trigger": true}')]),
        ('<tool_call>{"arguments": {"name": "bob"}, "name": "f"}</tool_call>', "",
         [("f", '{"name": "bob"}')]),
        ('<tool_call>{"name":"f","arguments":{"a":1} ,"id":"x"}</tool_call>', "",
         [("f", '{"a":1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
         [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": tr', "", [("f", '{"a": tr')]),
        ('<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        ('<tool_call>{"name": 7, "arguments": {}}</tool_call>',
         '<tool_call>{"name": 7, "arguments": {}}</tool_call>', []),
        ('<tool_call>{"name": "f", "arguments": {"a": "} \\" </tool {"}}</tool_call>', "",
         [("f", '{"a": "} \\" </tool {"}')]),
    ],
)  # fmt: skip
def test_texts(text: str, content: str, calls: list[tuple[str, str]], size: int) -> None:
    assert in_chunks(text, size) == (content, calls)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
calls = st.tuples(
    st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=5), json_values, max_size=3)
)


@given(
    content=st.text(alphabet="ab <to", max_size=12).filter(lambda text: "<tool_call>" not in text),
    wanted=st.lists(calls, max_size=3),
    name_first=st.booleans(),
    spaces=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
    cuts=st.lists(st.integers(0, 10**6), max_size=20),
)
def test_calls_are_read_back_however_they_are_written_and_cut(
    content: str,
    wanted: list[tuple[str, dict[str, Any]]],
    name_first: bool,
    spaces: int | None,
    ascii_only: bool,
    cuts: list[int],
) -> None:
    written = []
    for name, arguments in wanted:
        items = [("name", name), ("arguments", arguments)]
        call = dict(items if name_first else reversed(items))
        written.append(json.dumps(call, indent=spaces, ensure_ascii=ascii_only))
    if any("</tool_call>" in call or "<tool_call>" in call for call in written):
        return
    text = content + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
    found_content, found = parse(text, cuts)
    assert found_content == content
    assert [(name, json.loads(arguments)) for name, arguments in found] == wanted


def test_arguments_arrive_as_they_are_written() -> None:
    parser = HermesParser()
    parser.feed('<tool_call>{"name": "f", "arguments": {"text": "one ', [], False)
    (piece,) = parser.feed("two three", [], False).tool_calls
    assert piece.arguments == " two three"
