"""Log probabilities: the tokens joined are the text, in every shape."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.assembler import TokenEntry
from server.text.detokenizer import Detokenizer
from server.text.logprobs import FLOOR, LogprobFormatter, floored
from server.text.tokenizer import ChatTokenizer
from spot.generation import TokenLogprobs
from tests.harness import demo_tokenizer

TEXTS = st.text(alphabet="ab 😀한é\n👩\u200d", max_size=30)


def entries_of(token_ids: list[int], *, top: tuple[int, ...] = ()) -> list[TokenEntry]:
    detokenizer = Detokenizer(demo_tokenizer(), None)
    return [
        TokenEntry(
            token_id,
            detokenizer.push(token_id),
            TokenLogprobs([token_id, *top], [-1.0, *(-0.1 * n for n in range(len(top)))], 9),
        )
        for token_id in token_ids
    ]


@given(TEXTS)
def test_tokens_joined_are_the_text(text: str) -> None:
    entries = entries_of(demo_tokenizer().encode(text))
    formatter = LogprobFormatter(demo_tokenizer(), num_top=0)
    content = formatter.chat(entries)["content"]
    assert "".join(item["token"] for item in content) == text
    assert bytes(byte for item in content for byte in item["bytes"]).decode() == text
    block, end = formatter.completion(entries, offset=7)
    assert "".join(block["tokens"]) == text
    assert end == 7 + len(text)
    for token, offset in zip(block["tokens"], block["text_offset"], strict=True):
        assert text[offset - 7 :].startswith(token)


@given(TEXTS, st.integers(0, 10))
def test_offsets_go_on_over_pieces(text: str, cut: int) -> None:
    entries = entries_of(demo_tokenizer().encode(text))
    formatter = LogprobFormatter(demo_tokenizer(), num_top=0)
    whole, end = formatter.completion(entries, offset=0)
    first, middle = formatter.completion(entries[:cut], offset=0)
    second, last = formatter.completion(entries[cut:], offset=middle)
    assert last == end
    assert {key: first[key] + second[key] for key in whole} == whole


def test_a_special_token_is_shown_but_takes_no_room(tokenizer: ChatTokenizer) -> None:
    entries = entries_of([*tokenizer.encode("hi"), 2])
    formatter = LogprobFormatter(tokenizer, num_top=0)
    block, end = formatter.completion(entries, offset=0)
    assert block["tokens"] == ["hi", "<|im_end|>"]
    assert (block["text_offset"], end) == ([0, 2], 2)
    assert formatter.chat(entries)["content"][1]["bytes"] == list(b"<|im_end|>")


def test_chat_has_as_many_alternatives_as_asked_for(tokenizer: ChatTokenizer) -> None:
    (a, b, c) = (tokenizer.encode(letter)[0] for letter in "abc")
    entries = entries_of([a], top=(b, c, a))
    for num_top, expected in (
        (0, []),
        (2, ["b", "c"]),
        (5, ["b", "c", "a"]),
        (-1, ["b", "c", "a"]),
    ):
        (item,) = LogprobFormatter(tokenizer, num_top=num_top).chat(entries)["content"]
        assert [other["token"] for other in item["top_logprobs"]] == list(expected)
        assert item["logprob"] == -1.0


def test_completions_always_hold_the_actual_token(tokenizer: ChatTokenizer) -> None:
    (a, b, c) = (tokenizer.encode(letter)[0] for letter in "abc")
    formatter = LogprobFormatter(tokenizer, num_top=1)
    (outside,) = formatter.completion(entries_of([a], top=(b, c)), offset=0)[0]["top_logprobs"]
    assert list(outside.items()) == [("a", -1.0), ("b", -0.0)], "the actual token comes first"
    (inside,) = formatter.completion(entries_of([b], top=(b, c)), offset=0)[0]["top_logprobs"]
    assert set(inside) == {"b"}


def test_the_first_echoed_token_has_no_figure(tokenizer: ChatTokenizer) -> None:
    (a, b) = (tokenizer.encode(letter)[0] for letter in "ab")
    formatter = LogprobFormatter(tokenizer, num_top=1)
    block, end = formatter.completion([(a, "a"), *entries_of([b], top=(a,))], offset=0)
    assert block["tokens"] == ["a", "b"]
    assert block["token_logprobs"] == [None, -1.0]
    assert block["top_logprobs"][0] is None
    assert (block["text_offset"], end) == ([0, 1], 2)


def test_tokens_can_be_written_as_ids(tokenizer: ChatTokenizer) -> None:
    (a, b) = (tokenizer.encode(letter)[0] for letter in "ab")
    formatter = LogprobFormatter(tokenizer, num_top=1, as_ids=True)
    block, _ = formatter.completion([(a, "a"), *entries_of([b, 2], top=(a,))], offset=0)
    assert block["tokens"] == [f"token_id:{a}", f"token_id:{b}", "token_id:2"]
    assert set(block["top_logprobs"][1]) == {f"token_id:{a}", f"token_id:{b}"}
    (item, _) = formatter.chat(entries_of([b, 2], top=(a,)))["content"]
    assert item["token"] == f"token_id:{b}"
    assert item["top_logprobs"][0]["token"] == f"token_id:{a}"


@pytest.mark.parametrize("value", [-math.inf, -1e30, -9999.5])
def test_impossible_is_a_number(value: float) -> None:
    assert floored(value) == FLOOR
    assert floored(-1.5) == -1.5


def test_prompt_logprobs_are_maps_by_id(tokenizer: ChatTokenizer) -> None:
    (a, b) = (tokenizer.encode(letter)[0] for letter in "ab")
    formatter = LogprobFormatter(tokenizer, num_top=1)
    entry = TokenLogprobs([a, b], [-math.inf, -0.5], 77)
    first, second = formatter.prompt([None, entry])
    assert first is None
    assert second == {
        str(a): {"logprob": FLOOR, "rank": 77, "decoded_token": "a"},
        str(b): {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
    }
    assert list(second) == [str(a), str(b)], "the token of the prompt comes first"
