"""Texts in pieces that a model can embed, cut where the text itself has an end.

The cutting is `semantic_text_splitter`'s: at paragraphs, else at sentences, words, characters.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar
from tokenizers import Tokenizer

from workflows.errors import NodeFailed

Unit = Literal["tokens", "characters"]
DEFAULT_SIZE_TOKENS = 256

_LONG_TEXT_CHARS = 20_000
# Of a chunk's tokens, so that most chunks hold no more than they may.
_FILL = 0.9
_BATCH = 100

_SLICE_S = 0.005
_MAX_THREADS = 2
_TURNS: RunVar[anyio.CapacityLimiter] = RunVar("turns to cut texts")
# Texts that make sense take some ten characters' work for each of theirs.
_MAX_CHARS_PER_CHAR = 1000
_FREE_CHARS = 1_000_000_000

# Near its end a window may be cut other than the text is: a word or number goes on, say, and some
# tokenizers take a long word for one token.
_MARGIN_CHARS = {"characters": 64, "tokens": 256}
_LETTER = re.compile(r"[^\W\d_]")
# What Rust takes for white space: fewer characters than Python does.
_WHITE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunking:
    """How texts are cut. size: at most, of a chunk. overlap: of a chunk with the one before it, at
    most; below size. Both are in units."""

    unit: Unit
    size: int
    overlap: int


class _Stopped(Exception):
    """Nobody waits for the chunks any more."""


async def split_texts(
    texts: Sequence[str],
    chunking: Chunking,
    tokenizer_file: Path | None,
    *,
    max_pieces: int | None = None,
) -> list[list[str]]:
    """The chunks of each text, none for one without content.

    The cutting is done in threads, a few milliseconds at a time, so that those who cut take turns.
    Cancelled, it stops.

    tokenizer_file: needed where the unit is tokens. Raises NodeFailed for what gives more than
    max_pieces, or takes a work out of proportion to the texts.
    """
    effort = _Effort(_FREE_CHARS + _MAX_CHARS_PER_CHAR * sum(map(len, texts)))
    cut = _cut_texts(texts, chunking, tokenizer_file, effort)
    chunks: list[list[str]] = [[] for _ in texts]
    num_pieces = 0
    try:
        while True:
            async with _turns():
                found = await anyio.to_thread.run_sync(_slice, cut, abandon_on_cancel=True)
            if not found:
                return chunks
            for place, pieces in found:
                chunks[place] += pieces
                num_pieces += len(pieces)
            if max_pieces is not None and num_pieces > max_pieces:
                raise _too_much(f"the texts give more than {max_pieces:,} pieces")
    finally:
        effort.is_stopped = True


def _slice(cut: Iterator[tuple[int, list[str]]]) -> list[tuple[int, list[str]]]:
    """What the next milliseconds give; nothing at the end."""
    found: list[tuple[int, list[str]]] = []
    until_s = time.monotonic() + _SLICE_S
    for some in cut:
        found.append(some)
        if time.monotonic() > until_s:
            break
    return found


def _turns() -> anyio.CapacityLimiter:
    """First come, first served; few at once, as they compete with the event loop for the GIL."""
    try:
        return _TURNS.get()
    except LookupError:
        turns = anyio.CapacityLimiter(_MAX_THREADS)
        _TURNS.set(turns)
        return turns


def _too_much(what: str) -> NodeFailed:
    return NodeFailed(
        f"{what}: raise the size, lower the overlap, or give less text at once",
        code="invalid_params",
        is_retryable=False,
    )


class _Effort:
    """What one cutting may cost, in characters whose size was asked for."""

    def __init__(self, max_chars: int) -> None:
        self.is_stopped = False
        self._left_chars = max_chars

    def spend(self, num_chars: int) -> None:
        """Raises NodeFailed, and _Stopped: the library hands both on."""
        if self.is_stopped:
            raise _Stopped
        self._left_chars -= num_chars
        if self._left_chars < 0:
            raise _too_much("the texts take too long to cut")


def _cut_texts(
    texts: Sequence[str], chunking: Chunking, tokenizer_file: Path | None, effort: _Effort
) -> Iterator[tuple[int, list[str]]]:
    """The place of a text and some of its chunks, in order."""
    if chunking.unit == "characters":
        by_chars = _by_characters(chunking.size, chunking.overlap, effort)
        for place, text in enumerate(texts):
            for chunks in by_chars.cut(text):
                yield place, chunks
        return
    assert tokenizer_file is not None
    splitter = _TokenSplitter(chunking, _tokenizer(tokenizer_file), effort)
    for first in range(0, len(texts), _BATCH):
        batch = texts[first : first + _BATCH]
        for place, (text, count) in enumerate(
            zip(batch, splitter.num_tokens(batch), strict=True), start=first
        ):
            for chunks in splitter.cut(text, count):
                yield place, chunks


class _TokenSplitter:
    """Chunks of so many tokens.

    The library counts the tokens of every candidate anew, which for long texts takes a hundred
    times as long as to count them once. So these are cut by characters first, as many as such
    tokens have in the text, and only what is still too long is cut by tokens.
    """

    def __init__(self, chunking: Chunking, tokenizer: Tokenizer, effort: _Effort) -> None:
        self._chunking = chunking
        self._tokenizer = tokenizer
        self._effort = effort

    def cut(self, text: str, num_tokens: int) -> Iterator[list[str]]:
        if num_tokens <= self._chunking.size:
            yield [text.strip()] if text.strip() else []
        elif len(text) < _LONG_TEXT_CHARS:
            yield from self._exact(text, num_tokens)
        else:
            chars_per_token = _FILL * len(text) / num_tokens
            size = max(1, int(self._chunking.size * chars_per_token))
            overlap = min(size - 1, int(self._chunking.overlap * chars_per_token))
            for pieces in _by_characters(size, overlap, self._effort).cut(text):
                for piece, count in zip(pieces, self.num_tokens(pieces), strict=True):
                    if count <= self._chunking.size:
                        yield [piece]
                    else:
                        yield from self._exact(piece, count)

    def num_tokens(self, texts: Sequence[str]) -> list[int]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [len(encoding) for encoding in encodings]

    def _exact(self, text: str, num_tokens: int) -> Iterator[list[str]]:
        size_chars = 1 + self._chunking.size * len(text) // num_tokens
        return _Windows(self._chunking, self._count, size_chars, self._effort).cut(text)

    def _count(self, text: str) -> int:
        return self.num_tokens([text])[0]


def _by_characters(size: int, overlap: int, effort: _Effort) -> _Windows:
    return _Windows(Chunking(unit="characters", size=size, overlap=overlap), len, size, effort)


class _Windows:
    """Cuts a text as the library would, with work in proportion to its length.

    The library looks at all that is left of a text for each chunk. What it decides does not depend
    on what is more than a chunk away, so it is given a window of the text, and the next one starts
    where one of its chunks does.
    """

    def __init__(
        self, chunking: Chunking, measure: Callable[[str], int], size_chars: int, effort: _Effort
    ) -> None:
        """size_chars: of a chunk, about. measure: the size of a text."""
        # Loaded with the first text: it would take a tenth of a second of each start.
        from semantic_text_splitter import TextSplitter

        self._max_size = chunking.size
        self._measure = measure
        self._margin_chars = _MARGIN_CHARS[chunking.unit]
        self._window_chars = 3 * size_chars + 4 * self._margin_chars
        self._effort = effort
        # It trims in _size rather than by itself, which would not tell where the chunks start.
        self._splitter = TextSplitter.from_callback(
            self._size, chunking.size, overlap=chunking.overlap, trim=False
        )

    def cut(self, text: str) -> Iterator[list[str]]:
        """The chunks, some at a time."""
        start = told_end = 0
        window_chars = self._window_chars
        letters = _Letters(text)
        while start < len(text):
            end = start + window_chars
            window = text[start:end]
            if end >= len(text) and self._size(window) <= self._max_size:
                found, start_next = [(0, window)], len(window)
            else:
                # Where a sentence ends is told by the next letter, however far away.
                found = self._splitter.chunk_indices(window + letters.first_from(end))
                start_next = len(window)
                if end < len(text):
                    num = self._num_certain(window, found)
                    if num == 0:
                        window_chars *= 2
                        continue
                    start_next = found[num][0]
                    found = found[:num]
            chunks = []
            for offset, untrimmed in found:
                trimmed_end = start + offset + len(untrimmed.rstrip(_WHITE))
                if trimmed_end > told_end and untrimmed.strip(_WHITE):
                    told_end = trimmed_end
                    chunks.append(untrimmed.strip(_WHITE))
            yield chunks
            start += start_next
            window_chars = self._window_chars

    def _num_certain(self, window: str, found: Sequence[tuple[int, str]]) -> int:
        """How many of the chunks are those of the whole text, less what the next window redoes."""

        def is_uncertain(chunk: tuple[int, str]) -> bool:
            return self._size(window[chunk[0] : -self._margin_chars]) <= self._max_size

        num = bisect_left(found, True, key=is_uncertain) - 1
        # A window that starts within a row of line breaks would see another, shorter row.
        while num > 0 and {window[found[num][0] - 1], window[found[num][0]]} <= {"\r", "\n"}:
            num -= 1
        return max(num, 0)

    def _size(self, text: str) -> int:
        self._effort.spend(len(text))
        return self._measure(text.strip(_WHITE))


class _Letters:
    """Of a text, from places that only grow."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = -1

    def first_from(self, start: int) -> str:
        """Empty if there is none."""
        if self._place < start < len(self._text):
            found = _LETTER.search(self._text, start)
            self._place = found.start() if found else len(self._text)
        return self._text[self._place : self._place + 1] if start < len(self._text) else ""


def num_special_tokens(tokenizer_file: Path) -> int:
    """The tokens that the model's tokenizer adds to each text."""
    return int(_tokenizer(tokenizer_file).num_special_tokens_to_add(False))


@lru_cache(maxsize=8)
def _tokenizer(file: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()  # it would hide how long a text is
    tokenizer.no_padding()
    return tokenizer
