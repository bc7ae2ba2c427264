"""One choice: the same answer however its tokens were cut into deltas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.assembler import ChoiceAssembler, Piece
from server.text.detokenizer import Detokenizer
from server.text.tokenizer import ChatTokenizer
from spot.generation import TokenDelta, TokenLogprobs
from tests.fakes import ThinkParser
from tests.harness import demo_tokenizer

WORDS = st.sampled_from(
    ["END", " EN", "D", "E", "ND ", "a", " word", "\n", "<think>", "</think>", "<", "😀", "한", " "]
)
TEXTS = st.lists(WORDS, max_size=14).map("".join)


@dataclass
class Result:
    """All pieces of a choice together."""

    content: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    entry_texts: list[str] = field(default_factory=list)
    finish: Any = None
    stop_reason: Any = None

    def add(self, piece: Piece) -> None:
        assert self.finish is None, "nothing may follow the finish"
        self.content += piece.content
        self.reasoning += piece.reasoning
        self.token_ids += piece.token_ids
        self.entry_texts += [entry.text for entry in piece.entries or []]
        self.finish, self.stop_reason = piece.finish_reason, piece.stop_reason


def assemble(
    token_ids: list[int],
    sizes: list[int],
    *,
    finish: Any = "stop",
    stop_token_id: int | None = None,
    logprobs: bool = False,
    **options: Any,
) -> Result:
    """Push the tokens in deltas of these sizes, until the choice ends."""
    assembler = ChoiceAssembler(
        Detokenizer(demo_tokenizer(), [1, 2]), **{"parser": None, **options}
    )
    result = Result()
    start = 0
    for size in [*sizes, len(token_ids)]:
        end = min(start + size, len(token_ids))
        last = end == len(token_ids)
        ids = token_ids[start:end]
        delta = TokenDelta(ids, finish if last else None, stop_token_id if last else None)
        if logprobs:
            delta.logprobs = [TokenLogprobs([token_id], [-1.0], 1) for token_id in ids]
        result.add(assembler.push(delta))
        if result.finish is not None:
            break
        start = end
    assert assembler.finish_reason == result.finish
    assert assembler.num_tokens == len(result.token_ids)
    return result


@given(
    TEXTS,
    st.lists(st.integers(1, 5), max_size=20),
    st.sampled_from(["stop", "length"]),
    st.lists(st.sampled_from(["END", "\n", "d E", "😀"]), max_size=2),
    st.booleans(),
    st.booleans(),
    st.integers(0, 6),
    st.booleans(),
)
def test_any_cut_into_deltas_gives_the_same_choice(
    text: str,
    sizes: list[int],
    finish: str,
    stops: list[str],
    include_stop: bool,
    thinks: bool,
    min_tokens: int,
    logprobs: bool,
) -> None:
    token_ids = [*demo_tokenizer().encode(text), 2]

    def result(deltas: list[int], *, with_logprobs: bool) -> Result:
        return assemble(
            token_ids,
            deltas,
            finish=finish,
            stops=stops,
            include_stop=include_stop,
            min_tokens=min_tokens,
            parser=ThinkParser() if thinks else None,
            logprobs=with_logprobs,
        )

    one_by_one = result([1] * len(token_ids), with_logprobs=logprobs)
    assert result(sizes, with_logprobs=logprobs) == one_by_one
    without = result(sizes, with_logprobs=False)
    without.entry_texts = one_by_one.entry_texts
    assert without == one_by_one


@given(TEXTS)
def test_without_stops_the_content_is_the_text(text: str) -> None:
    ids = demo_tokenizer().encode(text)
    result = assemble([*ids, 2], [3] * 40, logprobs=True)
    assert result.content == "".join(result.entry_texts) == text
    assert (result.finish, result.stop_reason) == ("stop", None)


def tokens(text: str) -> list[int]:
    return demo_tokenizer().encode(text)


def test_tokens_behind_a_stop_string_do_not_count(tokenizer: ChatTokenizer) -> None:
    ids = tokens("one END two three")
    result = assemble(ids, [100], stops=["END"], finish="length")
    assert result.content == "one "
    assert (result.finish, result.stop_reason) == ("stop", "END")
    assert tokenizer.decode(result.token_ids) == "one END"


def test_what_is_held_for_a_stop_comes_out_at_the_end() -> None:
    result = assemble(tokens("some EN"), [1] * 9, stops=["END"], finish="length")
    assert result.content == "some EN"
    assert (result.finish, result.stop_reason) == ("length", None)


def test_the_stop_token_is_hidden_unless_included() -> None:
    ids = tokens("one two")
    hidden = assemble(ids, [1] * 9, stop_token_id=ids[-1])
    assert hidden.content == "one"
    assert hidden.token_ids == ids
    assert hidden.stop_reason == ids[-1]
    shown = assemble(ids, [1] * 9, stop_token_id=ids[-1], include_stop=True)
    assert shown.content == "one two"


def test_the_end_of_sequence_token_is_hidden_even_if_special_tokens_are_not() -> None:
    detokenizer = Detokenizer(demo_tokenizer(), None, skip_special_tokens=False)
    piece = ChoiceAssembler(detokenizer).push(TokenDelta([*tokens("hi"), 2], "stop"))
    assert piece.content == "hi"


def test_a_token_at_the_length_limit_is_shown() -> None:
    assert assemble(tokens("one two"), [1] * 9, finish="length").content == "one two"


@pytest.mark.parametrize("sizes", [[1] * 20, [100]])
def test_stop_strings_before_min_tokens_do_not_stop(sizes: list[int]) -> None:
    ids = tokens("END one END two")
    result = assemble(ids, sizes, stops=["END"], min_tokens=2, finish="length")
    assert result.content == "END one "
    assert result.stop_reason == "END"


def test_stop_strings_do_not_look_at_reasoning() -> None:
    ids = tokens("<think>a END b</think>c END d")
    result = assemble(ids, [100], stops=["END"], parser=ThinkParser())
    assert (result.reasoning, result.content) == ("a END b", "c ")


def test_a_delta_without_tokens_may_end_a_choice() -> None:
    assembler = ChoiceAssembler(Detokenizer(demo_tokenizer(), None), stops=["END"])
    assert assembler.push(TokenDelta(tokens("so E"))).content == "so "
    piece = assembler.push(TokenDelta([], "stop"))
    assert (piece.content, piece.finish_reason) == ("E", "stop")
