"""Texts in pieces that a model can embed, cut where the text itself has an end.

The cutting is `semantic_text_splitter`'s: at paragraphs, else at sentences, words, characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from semantic_text_splitter import TextSplitter
from tokenizers import Tokenizer

Unit = Literal["tokens", "characters"]
DEFAULT_SIZE_TOKENS = 256


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
        splitter = TextSplitter(chunking.size, overlap=chunking.overlap)
    else:
        assert tokenizer_file is not None
        splitter = TextSplitter.from_huggingface_tokenizer(
            _tokenizer(tokenizer_file), chunking.size, overlap=chunking.overlap
        )
    return [splitter.chunks(text) for text in texts]


def num_special_tokens(tokenizer_file: Path) -> int:
    """The tokens that the model's tokenizer adds to each text."""
    return int(_tokenizer(tokenizer_file).num_special_tokens_to_add(False))


@lru_cache(maxsize=8)
def _tokenizer(file: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()  # it would hide how long a text is
    tokenizer.no_padding()
    return tokenizer
