"""Event ids: what they say is read back, and nothing else passes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.endpoints.event_ids import (
    NumberedWriter,
    Position,
    Reached,
    position_of,
    with_event_ids,
)
from server.endpoints.streaming import ChunkWriter
from server.generation_run import GenerationRun
from server.text.assembler import Piece
from spot.errors import InvalidRequest

# Per piece of a choice: its tokens and its events.
pieces = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=6)


class Plain(ChunkWriter):
    """Events that say where they come from."""

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices

    def opening(self) -> bytes:
        return b"".join(b"data: o%d\n\n" % index for index in range(self._num_choices))

    def piece(self, index: int, piece: Piece, run: GenerationRun) -> bytes:
        return b"".join(
            b"data: %d-%b-%d\n\n" % (index, piece.content.encode(), position)
            for position in range(len(piece.reasoning))
        )

    def closing(self) -> bytes:
        return b"data: usage\n\ndata: [DONE]\n\n"


def stream(
    choices: list[list[tuple[int, int]]], order: list[int], had: Position | None
) -> list[tuple[str, str]]:
    """Ids and data of a stream whose choices come in this order."""
    writer = NumberedWriter(Plain(len(choices)), num_choices=len(choices), had=had)
    run: GenerationRun = None  # type: ignore[assignment]
    raw = writer.opening()
    seen = [0] * len(choices)
    for index in order:
        position = seen[index]
        seen[index] += 1
        num_tokens, num_events = choices[index][position]
        is_last = seen[index] == len(choices[index])
        piece = Piece(
            content=f"p{position}",
            reasoning="e" * (num_events or int(is_last)),
            token_ids=[0] * num_tokens,
            finish_reason="stop" if is_last else None,
        )
        raw += writer.piece(index, piece, run)
    raw += writer.closing()
    blocks = [block.split("\n") for block in raw.decode().split("\n\n")[:-1]]
    return [(i.removeprefix("id: "), d.removeprefix("data: ")) for i, d in blocks]


@given(st.lists(pieces, min_size=1, max_size=3), st.randoms(), st.randoms())
def test_any_event_is_a_place_to_go_on_from_in_any_order(
    choices: list[list[tuple[int, int]]], first: object, second: object
) -> None:
    order = [index for index, made in enumerate(choices) for _ in made]
    first.shuffle(order)  # type: ignore[attr-defined]
    whole = stream(choices, order, None)
    assert len({event_id for event_id, _ in whole}) == len(whole)
    for cut, (event_id, _) in enumerate(whole[:-1]):
        had = position_of(event_id, num_choices=len(choices))
        other = list(order)
        second.shuffle(other)  # type: ignore[attr-defined]
        rest = stream(choices, other, had)
        # Choices may come in another order; each has all of its events, once and in order.
        together = [data for _, data in [*whole[: cut + 1], *rest]]
        assert sorted(together) == sorted(data for _, data in whole)
        for index in range(len(choices)):
            name = f"{index}-"
            assert [d for d in together if d.startswith(name)] == [
                d for _, d in whole if d.startswith(name)
            ]
        # And may be cut off once more.
        for again, (later_id, _) in enumerate(rest[:-1]):
            later = position_of(later_id, num_choices=len(choices))
            last = [data for _, data in stream(choices, order, later)]
            assert sorted([*together[: cut + 2 + again], *last]) == sorted(together)


def test_who_has_everything_gets_the_end_again() -> None:
    whole = stream([[(1, 1)]], [0], None)
    had = position_of(whole[-1][0], num_choices=1)
    assert [data for _, data in stream([[(1, 1)]], [0], had)] == ["[DONE]"]


def test_ids_are_read() -> None:
    assert position_of("7", num_choices=1) == Position([Reached(7)])
    assert position_of("7+1.5f", num_choices=2) == Position(
        [Reached(7, False, 1), Reached(5, True)]
    )
    assert position_of("+1", num_choices=2) == Position([Reached(), Reached()], 1)
    assert position_of("8f;1", num_choices=1) == Position([Reached(8, True)], None, 1)
    assert position_of("8f;end", num_choices=1) == Position([Reached(8, True)], None, 0, True)


@pytest.mark.parametrize(
    "event_id",
    [
        "",
        "x",
        "1.2",
        "-1",
        "1;1",
        "1f;",
        "1f;x",
        "1 ",
        "1f+",
        "+",
        "1" * 10,
        "+1.1",
        "+0",
        "1+0",
        "1f;0",
        "01",
        "1_0",
        "\u00b2",
        "\u0663",
        "1+\u0663",
    ],
)
def test_what_is_no_id_is_refused(event_id: str) -> None:
    with pytest.raises(InvalidRequest, match="Last-Event-ID"):
        position_of(event_id, num_choices=1)


@pytest.mark.parametrize("event_id", ["+2", "+9999", "1f.1f;2", "1f.1f;9999"])
def test_an_event_beyond_the_opening_or_closing_is_refused(event_id: str) -> None:
    journaling = SimpleNamespace(last_event_id=event_id)
    with pytest.raises(InvalidRequest, match="Last-Event-ID"):
        with_event_ids(Plain(2), journaling, num_choices=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("event_id", ["+1", "1f.1f;1"])
def test_an_event_within_the_opening_or_closing_is_known(event_id: str) -> None:
    journaling = SimpleNamespace(last_event_id=event_id, check_has=lambda *_, **__: None)
    writer = with_event_ids(Plain(2), journaling, num_choices=2)  # type: ignore[arg-type]
    assert isinstance(writer, NumberedWriter)


def test_more_events_than_a_piece_has_are_refused() -> None:
    for num_events, is_known in ((1, True), (2, False), (9999, False)):
        had = position_of(f"0+{num_events}", num_choices=1)
        if is_known:
            assert stream([[(1, 2)]], [0], had)
        else:
            with pytest.raises(InvalidRequest, match="Last-Event-ID"):
                stream([[(1, 2)]], [0], had)
