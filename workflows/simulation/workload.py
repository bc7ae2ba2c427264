"""Queries of a simulation: RAG, RAG with rerank, web agent, and their mixture; with duplicates."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from math import log
from typing import Literal

WorkloadName = Literal["rag", "rag-rerank", "web", "mixed"]
Kind = Literal["rag", "rag-rerank", "web"]

# Tokens of an answer, by kind: a fact, a weighed answer, an essay.
MEDIAN_OUTPUT: dict[Kind, float] = {"rag": 80.0, "rag-rerank": 130.0, "web": 220.0}

_CHUNK_TOKENS = 110
_TOP_K = 12
_RERANKED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One question, with the lengths that only its run will show. Equal ids mean equal queries."""

    id: str
    kind: Kind
    num_chunks: int
    num_output: int
    num_rewritten: int

    @property
    def num_prompt(self) -> int:
        """Tokens of the final prompt: top-12 chunks, top-8 after a rerank, or search results."""
        if self.kind == "web":
            return 900
        return 100 + _CHUNK_TOKENS * (_RERANKED if self.kind == "rag-rerank" else _TOP_K)


class Queries:
    """A stream of queries.

    duplicates: share of queries that are drawn, by Zipf's law, from `num_hot` hot ones; their first
    occurrences are no duplicates. Lengths are lognormal with a heavy tail, since the paper's claims
    are about long runs among short ones: documents of `median_chunks`, answers by the kind.
    """

    def __init__(
        self,
        name: WorkloadName,
        *,
        duplicates: float,
        seed: int,
        median_chunks: float = 24.0,
        num_hot: int = 20,
        exponent: float = 1.0,
    ) -> None:
        self._name = name
        self._duplicates = duplicates
        self._random = random.Random(seed)
        self._log_chunks = log(median_chunks)
        self._num_made = 0
        self._hot = [self._make(f"hot{rank}") for rank in range(num_hot)]
        weights = [1.0 / rank**exponent for rank in range(1, num_hot + 1)]
        self._cumulative = list(accumulate(weights))

    def next(self) -> Query:
        # A draw for both, so that other shares of duplicates see the same fresh queries.
        is_hot = self._random.random() < self._duplicates
        self._num_made += 1
        fresh = self._make(f"q{self._num_made}")
        (hot,) = self._random.choices(self._hot, cum_weights=self._cumulative)
        return hot if is_hot else fresh

    def _make(self, query_id: str) -> Query:
        rng = self._random
        kind = self._kind(rng)
        return Query(
            id=query_id,
            kind=kind,
            num_chunks=round(min(1000.0, max(4.0, rng.lognormvariate(self._log_chunks, 0.7)))),
            num_output=round(
                min(1024.0, max(8.0, rng.lognormvariate(log(MEDIAN_OUTPUT[kind]), 0.6)))
            ),
            num_rewritten=round(min(64.0, max(4.0, rng.lognormvariate(log(20), 0.4)))),
        )

    def _kind(self, rng: random.Random) -> Kind:
        draw = rng.random()
        if self._name != "mixed":
            return self._name
        if draw < 0.25:
            return "web"
        return "rag" if draw < 0.625 else "rag-rerank"
