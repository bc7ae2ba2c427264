"""Texts in pieces that a model can embed, cut where the text itself has an end.

The cutting is `semantic_text_splitter`'s: at paragraphs, else at sentences, words, characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from semantic_text_splitter import TextSplitter

Unit = Literal["tokens", "characters"]
DEFAULT_SIZE_TOKENS = 256

_LONG_TEXT_CHARS = 20_000
# Of a chunk's tokens, so that most chunks hold no more than they may.
_FILL = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunking:
    """How texts are cut. size: at most, of a chunk. overlap: of a chunk with the one before it, at
    most; below size. Both are in units."""

    unit: Unit
    size: int
    overlap: int


def split_texts(
    texts: Sequence[str], chunking: Chunking, tokenizer_file: Path | None
) -> list[list[str]]:
    """The chunks of each text, none for one without content. Takes its time: call it in a thread.

    tokenizer_file: needed where the unit is tokens.
    """
    if chunking.unit == "characters":
        splitter = _splitter(chunking.size, chunking.overlap)
        return [splitter.chunks(text) for text in texts]
    assert tokenizer_file is not None
    return _TokenSplitter(chunking, _tokenizer(tokenizer_file)).split(texts)


class _TokenSplitter:
    """Chunks of so many tokens.

    The library counts the tokens of every candidate anew, which for long texts takes a hundred
    times as long as to count them once. So these are cut by characters first, as many as such
    tokens have in the text, and only what is still too long is cut by tokens.
    """

    def __init__(self, chunking: Chunking, tokenizer: Tokenizer) -> None:
        self._chunking = chunking
        self._tokenizer = tokenizer
        self._exact = _splitter(chunking.size, chunking.overlap, tokenizer)

    def split(self, texts: Sequence[str]) -> list[list[str]]:
        counts = self._num_tokens(texts)
        return [self._chunks(text, count) for text, count in zip(texts, counts, strict=True)]

    def _chunks(self, text: str, num_tokens: int) -> list[str]:
        if num_tokens <= self._chunking.size:
            return [text.strip()] if text.strip() else []
        if len(text) < _LONG_TEXT_CHARS:
            return self._exact.chunks(text)
        chars_per_token = _FILL * len(text) / num_tokens
        size = max(1, int(self._chunking.size * chars_per_token))
        overlap = min(size - 1, int(self._chunking.overlap * chars_per_token))
        pieces = _splitter(size, overlap).chunks(text)
        chunks: list[str] = []
        for piece, count in zip(pieces, self._num_tokens(pieces), strict=True):
            chunks += [piece] if count <= self._chunking.size else self._exact.chunks(piece)
        return chunks

    def _num_tokens(self, texts: Sequence[str]) -> list[int]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [len(encoding) for encoding in encodings]


def _splitter(size: int, overlap: int, tokenizer: Tokenizer | None = None) -> TextSplitter:
    """By tokens, or without a tokenizer by characters."""
    # Loaded with the first text: it would take a tenth of a second of each start.
    from semantic_text_splitter import TextSplitter

    if tokenizer is None:
        return TextSplitter(size, overlap=overlap)
    return TextSplitter.from_huggingface_tokenizer(tokenizer, size, overlap=overlap)


def num_special_tokens(tokenizer_file: Path) -> int:
    """The tokens that the model's tokenizer adds to each text."""
    return int(_tokenizer(tokenizer_file).num_special_tokens_to_add(False))


@lru_cache(maxsize=8)
def _tokenizer(file: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()  # it would hide how long a text is
    tokenizer.no_padding()
    return tokenizer
