"""Events come out whole, however the bytes were cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot.engines.event_stream import EventStream, EventTooLarge


def feed_all(pieces: list[bytes], max_event_bytes: int = 1000) -> list[bytes]:
    stream = EventStream(max_event_bytes)
    return [event for piece in pieces for event in stream.feed(piece)]


STREAM = b': hello\ndata: {"a": 1}\n\nevent: x\r\ndata: one\r\ndata:two\r\n\r\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b"one\ntwo", b"[DONE]"]


def test_data_lines_of_an_event_are_joined_and_the_rest_is_passed_over() -> None:
    assert feed_all([STREAM]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM))))
def test_cuts_make_no_difference(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in pairwise(edges)]
    assert feed_all(pieces) == EVENTS


def test_an_event_that_has_not_ended_is_not_told() -> None:
    assert feed_all([b"data: half\n"]) == []


def test_what_is_kept_of_an_event_is_bounded() -> None:
    stream = EventStream(100)
    assert stream.feed(b"data: " + b"x" * 80 + b"\n\n") == [b"x" * 80]
    stream.feed(b"data: " + b"x" * 80)
    with pytest.raises(EventTooLarge, match="100 bytes"):
        stream.feed(b"x" * 80)


def test_many_small_lines_without_an_event_are_bounded_too() -> None:
    stream = EventStream(100)
    with pytest.raises(EventTooLarge):
        stream.feed(b"data: 0123\n" * 20)
