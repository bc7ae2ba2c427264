"""Detokenizer: whole characters, nothing lost, nothing of the prompt, bounded work."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from server.text.detokenizer import MAX_HELD_TOKENS, Detokenizer
from server.text.tokenizer import ChatTokenizer
from tests.harness import byte_tokens, demo_tokenizer

SMILE, HAN = "😀".encode(), "한".encode()

# Any token, with bytes that are parts of characters far more often than a model has them.
PARTS = st.sampled_from([*SMILE, *HAN, 0x80, 0xC3, 0xE3, 0xF0]).map(
    lambda byte: byte_tokens(demo_tokenizer(), bytes([byte]))[0]
)
TOKENS = st.integers(0, demo_tokenizer().vocab_size - 1) | PARTS
# The demo model's vocabulary lacks some bytes; a text that needs one is no text to it.
CHARACTERS = st.characters(codec="utf-8") | st.sampled_from("😀👩\u200d👧한é \n")
TEXTS = st.text(CHARACTERS, max_size=60).filter(
    lambda text: demo_tokenizer().decode(demo_tokenizer().encode(text)) == text
)
WHOLE_TEXTS = TEXTS.filter(lambda text: "\ufffd" not in text)


def pieces(token_ids: list[int], prompt: list[int] | None = None, **options: bool) -> list[str]:
    detokenizer = Detokenizer(demo_tokenizer(), prompt, **options)
    return [detokenizer.push(token_id) for token_id in token_ids]


@given(WHOLE_TEXTS)
def test_the_pieces_of_a_text_joined_are_the_text(text: str) -> None:
    given_out = pieces(demo_tokenizer().encode(text))
    assert "".join(given_out) == text
    assert not any("\ufffd" in piece for piece in given_out)


@given(st.lists(TOKENS, max_size=40))
def test_any_tokens_give_the_text_of_a_whole_decode(token_ids: list[int]) -> None:
    whole = demo_tokenizer().decode(token_ids, skip_special_tokens=True)
    joined = "".join(pieces(token_ids))
    assert whole.startswith(joined)
    assert joined == whole or whole.endswith("\ufffd")


@given(st.lists(TOKENS, max_size=30), st.lists(st.integers(1, 6), max_size=30))
def test_any_split_into_deltas_gives_the_same_text(token_ids: list[int], sizes: list[int]) -> None:
    detokenizer = Detokenizer(demo_tokenizer(), [1, 2])
    joined, rest = "", list(token_ids)
    for size in [*sizes, len(rest)]:
        joined += detokenizer.push_many(rest[:size])
        rest = rest[size:]
    assert joined == "".join(pieces(token_ids, [1, 2]))


@given(st.lists(TOKENS, max_size=12), TEXTS)
@example([459], "0")  # a space and the beginning of a character in one token
def test_nothing_of_the_prompt_comes_out_again(prompt: list[int], text: str) -> None:
    joined = "".join(pieces(demo_tokenizer().encode(text), prompt))
    fresh = "".join(pieces(demo_tokenizer().encode(text)))
    assert joined.lstrip("\ufffd") == fresh.lstrip("\ufffd")


def test_a_character_begun_by_the_prompt_is_completed(tokenizer: ChatTokenizer) -> None:
    prompt = byte_tokens(tokenizer, b"x" + SMILE[:2])
    assert "".join(pieces(byte_tokens(tokenizer, SMILE[2:] + b"ok"), prompt)) == "😀ok"


def test_a_prompt_that_ends_with_a_replacement_character_stays_out(
    tokenizer: ChatTokenizer,
) -> None:
    assert "".join(pieces(tokenizer.encode("ok"), tokenizer.encode("secret \ufffd"))) == "ok"


def test_special_tokens_are_skipped_or_shown(tokenizer: ChatTokenizer) -> None:
    ids = [1, *tokenizer.encode("hi"), 2, 2]
    assert "".join(pieces(ids)) == "hi"
    shown = "".join(pieces(ids, skip_special_tokens=False))
    assert shown == "<|im_start|>hi<|im_end|><|im_end|>"
    glued = pieces(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert "".join(glued) == shown


def test_a_special_token_inside_a_character_changes_nothing(tokenizer: ChatTokenizer) -> None:
    smile = byte_tokens(tokenizer, SMILE)
    assert "".join(pieces([*smile[:2], 2, *smile[2:]])) == "😀"


@pytest.mark.parametrize("raw", [b"\x80", SMILE[:3], b"\xe3"])
def test_broken_bytes_are_held_for_a_while_only(tokenizer: ChatTokenizer, raw: bytes) -> None:
    num_repeats = 10 * MAX_HELD_TOKENS
    given = pieces([*byte_tokens(tokenizer, raw * num_repeats), *tokenizer.encode("end")])
    assert "".join(given).endswith("\ufffdend")
    longest_silence = max(len(run) for run in "".join(".#"[bool(p)] for p in given).split("#"))
    assert longest_silence <= MAX_HELD_TOKENS


def test_an_impossible_token_id_is_nothing(tokenizer: ChatTokenizer) -> None:
    first, last = tokenizer.encode("ab ")[0], tokenizer.encode("cd")[0]
    for impossible in (-1, 2**31, 2**40, tokenizer.vocab_size):
        joined = "".join(pieces([first, impossible, last]))
        assert joined == tokenizer.decode([first, last])


@pytest.fixture(scope="module")
def byte_fallback() -> ChatTokenizer:
    """A tokenizer as Llama and Gemma have it: words, and one token per byte."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + i for i, word in enumerate(["\u2581a", "b", "한", "<unk>"])}
    rust = RustTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    rust.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=rust))


@given(data=st.data())
def test_byte_fallback_survives_any_bytes(
    byte_fallback: ChatTokenizer, data: st.DataObject
) -> None:
    token = st.sampled_from([*SMILE, *HAN, 0x80, 0xFF, 0xC3, 256, 257, 258])
    prompt = data.draw(st.lists(token, max_size=9))
    token_ids = data.draw(st.lists(token, max_size=40))
    detokenizer = Detokenizer(byte_fallback, prompt)
    joined = detokenizer.push_many(token_ids) + detokenizer.push_many([257, 257])
    assert joined.endswith("bb")


def test_a_prompt_whose_text_changes_in_hindsight_is_left_out(
    byte_fallback: ChatTokenizer,
) -> None:
    detokenizer = Detokenizer(byte_fallback, [237, 159, 159, 240, 256, 240])
    assert detokenizer.push_many([257, 257]) == "bb"


def test_byte_fallback_gives_whole_characters(byte_fallback: ChatTokenizer) -> None:
    detokenizer = Detokenizer(byte_fallback, [256])
    pieces = [detokenizer.push(token_id) for token_id in [*SMILE, 257, 256, *HAN]]
    assert pieces == ["", "", "", "😀", "b", " a", "", "", "한"]
