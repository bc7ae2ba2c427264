"""The bound, the report, the load generator, and that all systems are given the same prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import anyio
import anyio.lowlevel
import pytest

from benchmarks.workflow_frameworks import tasks
from benchmarks.workflow_frameworks.bound import Work, best, bound, remaining_work
from benchmarks.workflow_frameworks.capacity import chat_bodies
from benchmarks.workflow_frameworks.cells import Cell
from benchmarks.workflow_frameworks.load import Load, LoadOutcome, LoadSpec
from benchmarks.workflow_frameworks.report import (
    equal_answers,
    latencies_s,
    pooled,
    report,
    saturation,
    throughput,
)
from benchmarks.workflow_frameworks.systems.base import Addresses
from benchmarks.workflow_frameworks.systems.shuntyard import document
from benchmarks.workflow_frameworks.testbed import counters_of
from benchmarks.workflow_frameworks.workload import Kind, Run
from workflows.templates import compile_template

ADDRESSES = Addresses(
    base_url="http://x",
    search_url="http://y",
    database="",
    table="t",
    collection="c",
    model="m",
    embedding_model="e",
    cache_salt="salt",
)
RAG = Run("rag", "Who?", "")
RANKED = Run("rag_rerank", "Who?", "")
WEB = Run("web", "Where?", "Places")
RESEARCH = Run("research", "Why?", "Reasons")


def test_equal_runs_are_work_once() -> None:
    assert remaining_work([RAG, RAG, RAG]) == remaining_work([RAG]) == Work(1, 1, 0)


def test_work_counts_calls_queries_and_pairs() -> None:
    # One question, embedded once for both; two calls of a web run, none of them embedded.
    assert remaining_work([RAG, RANKED, WEB]) == Work(chats=4, embeddings=1, pairs=8)
    other = replace(RESEARCH, question="When?")
    assert remaining_work([RESEARCH, other]) == Work(chats=2, embeddings=3, pairs=56)


def test_the_bound_is_the_slowest_resource_s_and_of_one_machine_the_sum_s() -> None:
    capacity = Work(chats=2, embeddings=1000, pairs=32)
    found = bound(remaining_work([RANKED, RANKED]), 2, capacity)
    assert found.resource == "language model"
    assert found.slowest == pytest.approx(2 / 0.5)
    assert found.machine == pytest.approx(2 / (0.5 + 0.001 + 0.25))
    slow = bound(Work(chats=1, embeddings=1, pairs=32), 1, capacity)
    assert slow.resource == "embedding model"
    assert slow.slowest == pytest.approx(1 / 1.001)


def test_a_bound_rests_on_the_best_that_was_seen() -> None:
    assert best([Work(1, 5, 2), Work(3, 4, 1)]) == Work(3, 5, 2)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_the_document_sends_what_the_frameworks_send(kind: Kind) -> None:
    run = Run(kind, "Who is {Ada}?", "People")
    texts = ["first " * 50, "a {brace} and\na line"]
    names = {
        *("find", "best", "rewrite", "documents", "topic_documents", "web", "topic_web"),
        *("best_documents", "best_topic_documents", "best_web", "best_topic_web"),
    }
    nodes: dict[str, Any] = {name: {"output": {"texts": texts, "text": "x"}} for name in names}
    if kind == "research":
        nodes = {name: {"output": {"texts": texts[:1]}} for name in names}
    flow = document(kind, ADDRESSES)
    calls = [node["params"] for node in flow["nodes"] if node["op"] == "llm"]
    scope = {"nodes": nodes, "inputs": {"question": run.question, "topic": run.topic}}
    rendered = [
        [
            {"role": one["role"], "content": compile_template(one["content"]).render(scope)}
            for one in call["messages"]
        ]
        for call in calls
    ]
    expected = list(chat_bodies(run, nodes, "m"))
    assert rendered == [body["messages"] for body in expected]
    for call, body in zip(calls, expected, strict=True):
        assert [call.get(name) for name in ("max_tokens", "temperature", "stop")] == [
            body.get(name) for name in ("max_tokens", "temperature", "stop")
        ]


def test_every_node_is_kept_from_other_measurements() -> None:
    for kind in get_args(Kind):
        for node in document(kind, ADDRESSES)["nodes"]:
            assert node["share"] == {"salt": "salt"}
            assert node["params"].get("cache_salt") == ("salt" if node["op"] == "llm" else None)


def test_excerpts_are_the_beginnings_of_the_best() -> None:
    assert tasks.excerpts([["a" * 500, "b"], [], ["c"]]) == ["a" * 160, "c"]


def spec(**options: Any) -> LoadSpec:
    runs = [Run("rag", f"Question {number}?", "") for number in range(6)]
    fields = {"system": "shuntyard", "addresses": ADDRESSES, "warm_up": [RAG], "limit_s": 60.0}
    return LoadSpec(**fields | {"runs": runs} | options)


class Answering:
    """Answers after a moment, and fails at one question."""

    def __init__(self) -> None:
        self.num_now = 0
        self.max_now = 0

    async def answer(self, run: Run) -> str:
        self.num_now += 1
        self.max_now = max(self.max_now, self.num_now)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        self.num_now -= 1
        if run.question == "Question 3?":
            raise RuntimeError("broken")
        return run.question


async def test_a_closed_loop_has_as_many_runs_at_once_as_clients() -> None:
    answering = Answering()
    outcome = await Load(spec(concurrency=2), answering).run()
    assert answering.max_now == 2
    assert [one.number for one in outcome.runs] == list(range(6))


async def test_a_failed_run_is_counted_and_told() -> None:
    outcome = await Load(spec(concurrency=6), Answering()).run()
    assert [one.number for one in outcome.runs if not one.digest] == [3]
    assert outcome.errors == ["RuntimeError: broken"]


async def test_an_open_loop_counts_from_when_a_run_was_due() -> None:
    arrivals = [0.0, 0.001, 0.002, 0.003, 0.004, 0.005]
    outcome = await Load(spec(arrivals_s=arrivals), Answering()).run()
    assert [one.start_s for one in outcome.runs] == arrivals


async def test_no_run_begins_after_the_limit() -> None:
    late = await Load(spec(concurrency=1, limit_s=-1.0), Answering()).run()
    assert late.runs == []
    open_loop = spec(arrivals_s=[0.0, 0.0, 9.0, 9.0, 9.0, 9.0], limit_s=1.0)
    cut = await Load(open_loop, Answering()).run()
    assert len(cut.runs) == 2


async def test_specs_and_outcomes_survive_the_way_between_processes() -> None:
    for one in (spec(concurrency=2), spec(arrivals_s=[0.5])):
        assert LoadSpec.from_json(one.to_json()) == one
    outcome = await Load(spec(concurrency=2), Answering()).run()
    assert LoadOutcome.from_json(outcome.to_json()) == outcome


def row(system: str, seconds: float, **fields: Any) -> dict[str, Any]:
    """Ten runs one after the other."""
    cell = Cell("mixed", "closed", 6.0, 0.0, 10)
    runs = [[n, n * seconds, (n + 1) * seconds, f"answer {n}"] for n in range(10)]
    names = ("chats", "prompt_tokens", "completion_tokens", "pooling_inputs")
    return {
        "cell": cell.name,
        "workload": "mixed",
        "loop": "closed",
        "duplicate_share": 0.0,
        "system": system,
        "repeat": 0,
        "elapsed_s": 10 * seconds,
        "client_cpu_s": 1.0,
        "server_cpu_s": 2.0,
        "counters": dict.fromkeys(names, 1.0),
        "num_runs": 10,
        "work": {"chats": 10.0, "embeddings": 10.0, "pairs": 0.0},
        "runs": runs,
        **fields,
    }


def test_the_ratios_are_against_the_best_framework() -> None:
    rows = [row("shuntyard", 0.5), row("langgraph", 1.0), row("haystack", 2.0)]
    capacities = {"mixed": [{"chats": 4.0, "embeddings": 4.0, "pairs": 3.0}]}
    last = report({"capacities": capacities, "rows": rows}).splitlines()[-1]
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells == [
        *("mixed, 6 clients, 0% duplicates", "2.00", "1.00", "2.00"),
        *("0.50", "1.00", "2.00"),
        *("4.00 (language model)", "0.50", "2.00", "1.00"),
    ]


def test_what_was_measured_repeatedly_counts_together() -> None:
    rows = [row("haystack", 1.0), row("langgraph", 1.0), row("haystack", 3.0, repeat=1)]
    rows[2]["runs"][0][3] = "something else"
    whole, other = pooled(rows)
    assert (whole["system"], other["system"]) == ("haystack", "langgraph")
    assert throughput(whole) == pytest.approx(20 / 40)
    assert whole["rates"] == pytest.approx([1.0, 1 / 3])
    assert whole["counters"]["chats"] == 2
    assert sorted(latencies_s(whole)) == pytest.approx([1.0] * 10 + [3.0] * 10)
    again = pooled([row("shuntyard", 1.0), row("shuntyard", 1.0, repeat=1)])[0]
    assert equal_answers(whole, again) == pytest.approx(19 / 20)


def test_failed_runs_are_no_throughput() -> None:
    failed = row("haystack", 1.0)
    failed["runs"][4][3] = ""
    assert throughput(failed) == pytest.approx(0.9)


def test_saturation_is_the_best_framework_s_with_the_same_duplicates() -> None:
    rows = [
        row("shuntyard", 0.1),
        row("langgraph", 1.0),
        row("haystack", 0.5),
        row("haystack", 0.2, duplicate_share=0.15),
        row("haystack", 0.2, loop="open"),
        row("haystack", 0.2, workload="research"),
    ]
    assert saturation(rows, Cell("mixed", "open", 0.95, 0.0, 10)) == pytest.approx(2.0)
    assert saturation(rows, Cell("research", "open", 0.95, 0.15, 10)) == 0.0


def test_answers_are_compared_run_by_run() -> None:
    other = row("haystack", 1.0)
    other["runs"][0][3] = "something else"
    other["runs"][1][3] = ""
    assert equal_answers(other, row("shuntyard", 1.0)) == pytest.approx(8 / 9)


def test_counters_are_summed_over_their_labels() -> None:
    text = """
# TYPE vllm:request_success counter
vllm:request_success_total{finished_reason="stop"} 3.0
vllm:request_success_total{finished_reason="length"} 4.0
# TYPE shuntyard_requests counter
shuntyard_requests_total{endpoint="/v1/rerank",outcome="completed"} 5.0
shuntyard_requests_total{endpoint="/v1/embeddings",outcome="completed"} 6.0
"""
    found = counters_of(text)
    assert found["chats"] == 7
    assert (found["rerank_requests"], found["embedding_requests"]) == (5, 6)
    assert found["prompt_tokens"] == 0
