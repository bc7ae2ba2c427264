"""The most that perfect sharing and batching allow: remaining work over capacity.

Work is what is left of a list of runs when everything equal is done once: a run's model calls and
rerankings per distinct (kind, question), embeddings of queries per distinct text. Capacity is what
the server does of each alone, with everything at hand at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.workflow_frameworks import tasks
from benchmarks.workflow_frameworks.workload import Run

_CHATS = {"rag": 1, "rag_rerank": 1, "web": 2, "research": 1}
_PAIRS = {
    "rag": 0,
    "rag_rerank": tasks.CANDIDATES,
    "web": 0,
    "research": 2 * tasks.CANDIDATES + 2 * tasks.RESEARCH_WEB_RESULTS,
}


@dataclass(frozen=True, slots=True)
class Work:
    """chats: calls of the language model. embeddings: query texts. pairs: to score."""

    chats: float
    embeddings: float
    pairs: float


@dataclass(frozen=True, slots=True)
class Bound:
    """Runs per second at most.

    slowest: by the slowest resource, as if each had a machine of its own. machine: where all of
    them compute on the same cores, so that their times add up. resource: which one is the slowest.
    """

    slowest: float
    machine: float
    resource: str


def remaining_work(runs: Sequence[Run]) -> Work:
    """What is left of these runs with everything equal done once."""
    distinct = set(runs)
    queries = {run.question for run in distinct if run.kind != "web"}
    queries |= {run.topic for run in distinct if run.kind == "research"}
    return Work(
        chats=sum(_CHATS[run.kind] for run in distinct),
        embeddings=len(queries),
        pairs=sum(_PAIRS[run.kind] for run in distinct),
    )


def bound(work: Work, num_runs: int, capacity: Work) -> Bound:
    """work: what remains of the runs. capacity: calls, texts and pairs per second."""
    times_s = {
        "language model": work.chats / capacity.chats,
        "embedding model": work.embeddings / capacity.embeddings + work.pairs / capacity.pairs,
    }
    resource = max(times_s, key=lambda name: times_s[name])
    return Bound(
        slowest=num_runs / times_s[resource],
        machine=num_runs / sum(times_s.values()),
        resource=resource,
    )


def best(capacities: Sequence[Work]) -> Work:
    """What was reached of each kind of work at any time: a bound must not rest on a slow moment."""
    return Work(
        chats=max(one.chats for one in capacities),
        embeddings=max(one.embeddings for one in capacities),
        pairs=max(one.pairs for one in capacities),
    )
