"""Stop strings: the same result for any split, and never a part of one shown."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.stop_strings import StopStrings

# Few letters, so that stops overlap with each other and with themselves.
TEXTS = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4)


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """All that was shown, and the stop string that ended it."""
    searcher = StopStrings(stops, include=include)
    shown = ""
    for piece in pieces:
        match = searcher.push(piece)
        shown += match.text
        if match.stop is not None:
            return shown, match.stop
    return shown + searcher.flush(), None


def by_definition(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The stop that is complete first ends the text; of several, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def split(text: str, cuts: list[int]) -> list[str]:
    positions = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(positions)]


@given(TEXTS, STOPS, st.lists(st.integers(0, 30), max_size=10), st.booleans())
def test_any_split_gives_what_the_definition_says(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    expected = by_definition(text, stops, include=include)
    assert run(split(text, cuts), stops, include=include) == expected
    assert run(list(text), stops, include=include) == expected


@given(TEXTS, STOPS)
def test_nothing_shown_could_still_become_a_stop(text: str, stops: list[str]) -> None:
    searcher = StopStrings(stops)
    shown = ""
    for position, character in enumerate(text):
        match = searcher.push(character)
        shown += match.text
        if match.stop is not None:
            break
        for stop in stops:
            hidden = text[len(shown) : position + 1]
            begun = max(n for n in range(len(stop)) if text[: position + 1].endswith(stop[:n]))
            assert len(hidden) >= begun
        assert not any(stop in shown for stop in stops)


@given(TEXTS, STOPS)
def test_no_more_is_held_than_need_be(text: str, stops: list[str]) -> None:
    searcher = StopStrings(stops)
    shown = ""
    for position, character in enumerate(text):
        match = searcher.push(character)
        shown += match.text
        if match.stop is not None:
            break
        held = text[len(shown) : position + 1]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "shown", "stop"),
    [
        ("one END two", ["END"], "one ", "END"),
        ("abc", ["c", "bc"], "a", "bc"),
        ("abcd", ["abcd", "bc"], "a", "bc"),
        ("aab", ["ab"], "a", "ab"),
        ("ENDEND", ["END"], "", "END"),
        ("EN", ["END"], "EN", None),
        ("x", [], "x", None),
    ],
)
def test_examples(text: str, stops: list[str], shown: str, stop: str | None) -> None:
    assert run(list(text), stops) == (shown, stop)
    assert run([text], stops) == (shown, stop)
