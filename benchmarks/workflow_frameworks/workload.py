"""What is run: questions as lists of runs with a share of duplicates, and when they arrive."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["rag", "rag_rerank", "web", "research"]
Workload = Literal["mixed", "research"]
WORKLOADS: tuple[Workload, ...] = ("mixed", "research")

DATA = Path(__file__).resolve().parents[1] / "data" / "questions"
_NUM_POPULAR = 5
_ZIPF_EXPONENT = 1.0
# Of every four runs of the mixed workload.
_MIX: tuple[Kind, ...] = ("rag_rerank", "rag", "rag_rerank", "web")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workflow. topic: what a research run looks up beside its question."""

    kind: Kind
    question: str
    topic: str


@dataclass(frozen=True, slots=True)
class Questions:
    """documents: questions that the passages answer. web: questions with their topics."""

    documents: tuple[str, ...]
    web: tuple[tuple[str, str], ...]


def load_questions() -> Questions:
    """MuSiQue's for the passages, TruthfulQA's for the web; its categories are the topics."""
    truthful = _lines(DATA / "truthfulqa_questions.jsonl")
    return Questions(
        documents=tuple(
            dict.fromkeys(one["question"] for one in _lines(DATA / "musique_questions.jsonl"))
        ),
        web=tuple({one["question"]: one["category"] for one in truthful}.items()),
    )


def load_passages() -> list[dict[str, str]]:
    """MuSiQue's passages: `id`, `text`."""
    with gzip.open(DATA / "musique_passages.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def load_pages() -> list[dict[str, str]]:
    """What the web has to say: `id`, `question`, `best_answer`, `category`."""
    return _lines(DATA / "truthfulqa_questions.jsonl")


def make_runs(
    workload: Workload,
    questions: Questions,
    *,
    num_runs: int,
    duplicate_share: float,
    seed: int,
) -> list[Run]:
    """Runs in a random order, of which `duplicate_share` repeat one of the popular ones.

    The others are all different. What is repeated is Zipf-distributed over the first few. With
    fewer duplicates the same seed gives the same distinct runs, and more of them.
    Raises ValueError if there are not enough questions.
    """
    num_duplicates = round(num_runs * duplicate_share)
    distinct = _distinct(workload, questions, num_runs - num_duplicates, random.Random(seed))
    rng = random.Random(f"{seed} {duplicate_share}")
    popular = distinct[:_NUM_POPULAR]
    weights = [1 / rank**_ZIPF_EXPONENT for rank in range(1, len(popular) + 1)]
    runs = distinct + rng.choices(popular, weights, k=num_duplicates)
    rng.shuffle(runs)
    return runs


def _distinct(
    workload: Workload, questions: Questions, count: int, rng: random.Random
) -> list[Run]:
    documents = rng.sample(questions.documents, len(questions.documents))
    web = rng.sample(questions.web, len(questions.web))
    runs = []
    for number in range(count):
        kind: Kind = "research" if workload == "research" else _MIX[number % len(_MIX)]
        source = documents if kind in ("rag", "rag_rerank") else web
        if not source:
            raise ValueError(f"not enough questions for {count} different runs")
        taken: Any = source.pop()
        question, topic = (taken, "") if source is documents else taken
        runs.append(Run(kind, question, topic))
    return runs


def poisson_arrivals(num_runs: int, rate_per_s: float, seed: int) -> list[float]:
    """When each run arrives, in seconds from the start."""
    rng = random.Random(seed)
    arrivals, now_s = [], 0.0
    for _ in range(num_runs):
        now_s += rng.expovariate(rate_per_s)
        arrivals.append(now_s)
    return arrivals


def warm_up_runs(workload: Workload, questions: Questions, taken: Sequence[Run]) -> list[Run]:
    """One run of each kind, of questions that are not in `taken`."""
    used = {run.question for run in taken}
    document = next(one for one in questions.documents if one not in used)
    question, topic = next(pair for pair in questions.web if pair[0] not in used)
    if workload == "research":
        return [Run("research", question, topic)]
    return [
        Run("rag", document, ""),
        Run("rag_rerank", document, ""),
        Run("web", question, topic),
    ]


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return [json.loads(line) for line in file]
