"""Pieces become items, and events that are well nested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from server.text.assembler import Piece, TokenEntry
from server.text.output_items import Event, OutputItems
from spot.generation import TokenLogprobs
from spot.parsed import ToolCallDelta


def run(*pieces: Piece, is_cut: bool = False, **options: Any) -> tuple[list[Any], list[Event]]:
    """Items and events. The events are checked to say the same as the items."""
    output = OutputItems(**options)
    events = [event for piece in pieces for event in output.push(piece)]
    events += output.finish(is_cut=is_cut)
    assert told(events) == output.items
    return output.items, events


def told(events: list[Event]) -> list[Any]:
    """The items that the events tell of."""
    items: list[Any] = []
    texts = ""
    is_open = part_is_open = False
    for name, fields in events:
        if name == "response.output_item.added":
            assert not is_open
            assert fields["item"]["status"] == "in_progress"
            is_open, texts = True, ""
            item_id = fields["item"]["id"]
        assert is_open
        assert fields["output_index"] == len(items)
        if "item" not in fields:
            assert fields["item_id"] == item_id
        if name == "response.content_part.added":
            assert not part_is_open
            part_is_open = True
        elif name.endswith(".delta"):
            texts += fields["delta"]
        elif name.endswith(("text.done", "arguments.done")):
            assert fields.get("text", fields.get("arguments")) == texts
        elif name == "response.content_part.done":
            assert part_is_open
            assert fields["part"]["text"] == texts
            part_is_open = False
        elif name == "response.output_item.done":
            assert not part_is_open
            assert fields["item"]["id"] == item_id
            items.append(fields["item"])
            is_open = False
    assert not is_open
    return items


def kinds(items: list[Any]) -> list[str]:
    return [item["type"] for item in items]


def text_of(item: Any) -> str:
    return str(item["content"][0]["text"])


def call(index: int, arguments: str, name: str | None = None) -> Piece:
    call_id = None if name is None else f"call_{index}"
    return Piece(tool_calls=[ToolCallDelta(index, call_id, name, arguments)])


def test_text_is_a_message() -> None:
    items, events = run(Piece(content="Hel"), Piece(content="lo."))
    assert kinds(items) == ["message"]
    assert text_of(items[0]) == "Hello."
    assert items[0]["status"] == "completed"
    assert [name.removeprefix("response.") for name, _ in events] == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]


def test_the_last_item_of_a_cut_answer_is_incomplete() -> None:
    items, _ = run(Piece(reasoning="hm"), Piece(content="wel"), is_cut=True)
    assert [item["status"] for item in items] == ["completed", "incomplete"]
    items, _ = run(call(0, "{", "f"), is_cut=True)
    assert [item["status"] for item in items] == ["incomplete"]


def test_one_piece_may_hold_everything() -> None:
    piece = Piece(reasoning="hm", content="well", tool_calls=[ToolCallDelta(0, "c", "f", "{}")])
    items, _ = run(piece)
    assert kinds(items) == ["reasoning", "message", "function_call"]


def test_calls_are_items_of_their_own() -> None:
    items, _ = run(call(0, "", "f"), call(0, '{"a":'), call(0, "1}"), call(1, "{}", "g"))
    assert [(item["name"], item["arguments"]) for item in items] == [("f", '{"a":1}'), ("g", "{}")]
    assert [item["call_id"] for item in items] == ["call_0", "call_1"]


def test_white_space_around_calls_is_no_message() -> None:
    space = Piece(content="\n")
    items, _ = run(space, call(0, "{}", "f"), space, call(1, "{}", "g"), space)
    assert kinds(items) == ["function_call", "function_call"]


def test_white_space_before_text_belongs_to_it() -> None:
    items, _ = run(Piece(content="\n"), Piece(content=" "), Piece(content="a"))
    assert text_of(items[0]) == "\n a"


def test_nothing_but_white_space_is_still_an_answer() -> None:
    for pieces in ([], [Piece(content="\n")]):
        items, _ = run(*pieces)
        assert kinds(items) == ["message"]
        assert text_of(items[0]) == "".join(piece.content for piece in pieces)


def test_reasoning_can_be_left_out_and_is_counted_all_the_same() -> None:
    output = OutputItems(show_reasoning=False)
    output.push(Piece(reasoning="hm", token_ids=[1, 2]))
    output.push(Piece(content="well", token_ids=[3]))
    output.finish(is_cut=False)
    assert kinds(output.items) == ["message"]
    assert output.num_reasoning_tokens == 2


def test_reasoning_tokens_are_counted_where_a_piece_holds_more() -> None:
    output = OutputItems(count_tokens=lambda text: len(text.split()))
    output.push(Piece(reasoning="a b", content="c d e", token_ids=[1, 2, 3, 4, 5]))
    assert output.num_reasoning_tokens == 2


def test_logprobs_belong_to_text_only() -> None:
    """Tokens of tags, reasoning and calls have none; those that are held wait for their text."""

    def entry(text: str) -> TokenEntry:
        return TokenEntry(0, text, TokenLogprobs([0], [-1.0], [1]))

    def logprobs(entries: Sequence[TokenEntry]) -> list[dict[str, Any]]:
        return [{"token": item.text} for item in entries]

    pieces = [
        Piece(reasoning="hm", entries=[entry("hm")]),
        Piece(entries=[entry("</think>")]),
        Piece(content="\n", entries=[entry("\n")]),
        Piece(entries=[entry("")]),
        Piece(content="é", entries=[entry("é")]),
        Piece(entries=[entry("<tool")]),
        call(0, "{}", "f"),
        Piece(entries=[entry("</tool")]),
    ]
    items, events = run(*pieces, logprobs=logprobs)
    message = items[1]["content"][0]
    assert [item["token"] for item in message["logprobs"]] == ["\n", "", "é"]
    assert message["text"] == "\né"
    told_of = [e["logprobs"] for name, e in events if name == "response.output_text.delta"]
    assert [item for some in told_of for item in some] == message["logprobs"]


def test_logprobs_of_the_last_token_come_without_text() -> None:
    end = TokenEntry(0, "", TokenLogprobs([0], [-1.0], [1]))
    items, _ = run(Piece(content="a"), Piece(entries=[end]), logprobs=lambda some: [{}] * len(some))
    assert len(items[0]["content"][0]["logprobs"]) == 1


def test_an_item_that_is_open_is_incomplete() -> None:
    output = OutputItems()
    output.push(Piece(content="wel"))
    assert [item["status"] for item in output.items] == ["incomplete"]


words = st.sampled_from(["", " ", "\n", "a", "b c"])
deltas = st.builds(
    ToolCallDelta, st.integers(0, 2), st.sampled_from(["c", None]), st.just("f"), words
)
pieces = st.builds(Piece, words, words, st.lists(deltas, max_size=3))


@given(st.lists(pieces, max_size=8), st.booleans())
def test_any_pieces_make_well_nested_events(pieces: list[Piece], is_cut: bool) -> None:
    items, _ = run(*pieces, is_cut=is_cut)
    assert items
    ends = ["completed"] * (len(items) - 1) + ["incomplete" if is_cut else "completed"]
    assert [item["status"] for item in items] == ends
    said = "".join(text_of(item) for item in items if item["type"] == "message")
    assert "".join(said.split()) == "".join("".join(p.content for p in pieces).split())
