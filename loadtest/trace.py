"""Request sizes from a production trace, and prompts of about those sizes.

The trace is an excerpt of the Azure LLM inference trace 2023 (conversation); origin and licence are
in `loadtest/data/`. Only the sizes are used: it holds no texts.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_TRACE = Path(__file__).parent / "data" / "azure_llm_2023_conv_2000.csv"

# Short common words, nearly all of them one token (with the blank before it) in the vocabularies
# of current models; so the number of words is the number of tokens, within a few per cent.
_TEXT = """
    the of and to in is that for it as was with be by on not he his but at are this have from or
    had an they which one you were all her she there would their we him been has when who will no
    more if out so up said what its about than into them can only other time new some could these
    two may first then do any like my now over such our man me even most made after also did many
    before must through years where much your way well down should because each just those people
    how too little state good very make world still see own work men day get here old life both
    between being under three never know same last another while us off might great go come since
"""
_WORDS = _TEXT.split()

# What a chat template puts around one user message: role marks and a default system prompt.
CHAT_OVERHEAD_TOKENS = 35


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Tokens in and tokens out of one request."""

    num_prompt_tokens: int
    num_output_tokens: int

    def scaled(self, *, prompt_scale: float, output_scale: float, limit: int) -> RequestSize:
        """Scaled, at least one token each, and together at most `limit` (the prompt gives way)."""
        output = min(max(1, round(self.num_output_tokens * output_scale)), max(1, limit // 2))
        prompt = max(1, round(self.num_prompt_tokens * prompt_scale))
        return RequestSize(min(prompt, max(1, limit - output)), output)


def read_trace(path: Path = DEFAULT_TRACE) -> list[RequestSize]:
    """All rows of a trace in Azure's format. Raises ValueError for a file that is none."""
    with path.open(newline="", encoding="utf-8") as file:
        try:
            sizes = [
                RequestSize(int(row["ContextTokens"]), int(row["GeneratedTokens"]))
                for row in csv.DictReader(file)
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no trace in Azure's format: {error!r}") from None
    if not sizes:
        raise ValueError(f"{path} has no rows")
    return sizes


def sample(sizes: Sequence[RequestSize], rng: random.Random) -> Iterator[RequestSize]:
    """Sizes drawn from the trace for ever, each row as likely as another."""
    while True:
        yield rng.choice(sizes)


def prompt_of(num_tokens: int, rng: random.Random) -> str:
    """English-looking words, about so many tokens in any current vocabulary.

    No two are alike (but by chance), so that a prefix cache has nothing to find in them.
    """
    return " ".join(rng.choices(_WORDS, k=max(1, num_tokens)))
