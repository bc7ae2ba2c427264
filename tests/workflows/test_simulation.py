"""The simulation: repeatable, conserving, and with the effects that it is for."""

from __future__ import annotations

import json

import pytest

from server.cli import main
from workflows.simulation.graph import GraphBuilder
from workflows.simulation.llm_pipeline import LlmPipeline, StepCosts
from workflows.simulation.summary import Case, Summary, simulate
from workflows.simulation.system import SYSTEMS
from workflows.simulation.timeline import Timeline
from workflows.simulation.workload import Queries, Query


def run(system: str, **changes: object) -> Summary:
    values: dict[str, object] = {"num_queries": 160, "concurrency": 20, **changes}
    return simulate(Case(system=system, **values))  # type: ignore[arg-type]


@pytest.mark.parametrize("system", list(SYSTEMS))
def test_every_system_answers_every_query(system: str) -> None:
    summary = run(system, num_queries=60, concurrency=10)
    assert summary.p50_s <= summary.p95_s <= summary.p99_s
    assert summary.runs_per_s > 0


def test_a_seed_repeats_itself() -> None:
    assert run("hera") == run("hera")
    assert run("hera") != run("hera", seed=2)


def test_without_duplicates_fusion_changes_nothing() -> None:
    assert run("hera", duplicates=0.0) == run("no-fusion", duplicates=0.0)


def test_duplicates_are_executed_once() -> None:
    shared, apart = run("hera", duplicates=0.3), run("no-fusion", duplicates=0.3)
    assert shared.shared > 0.1
    assert apart.shared == 0.0
    assert shared.nodes_per_run < apart.nodes_per_run
    assert shared.runs_per_s > apart.runs_per_s


def test_the_shortest_first_alone_has_the_lower_median_and_the_longer_tail() -> None:
    full = run("hera", concurrency=60, num_queries=240)
    srtf = run("srtf", concurrency=60, num_queries=240)
    assert srtf.p50_s < full.p50_s
    assert srtf.p99_s > full.p99_s


def test_costs_that_are_learnt_are_as_good_as_known_ones() -> None:
    learnt, known = run("hera-learning"), run("hera")
    assert learnt.mean_s == pytest.approx(known.mean_s, rel=0.1)
    assert learnt.p99_s == pytest.approx(known.p99_s, rel=0.25)


def test_splits_follow_the_load_of_the_resource() -> None:
    place = {"preset": "documents", "workload": "rag-rerank", "duplicates": 0.0}
    idle = run("hera", concurrency=2, num_queries=60, **place)
    busy = run("hera", concurrency=60, num_queries=150, **place)
    never = run("no-split", concurrency=2, num_queries=60, **place)
    assert idle.nodes_per_run > busy.nodes_per_run
    assert idle.mean_s < never.mean_s


def test_an_open_loop_keeps_its_rate() -> None:
    summary = run("hera", rate_per_s=2.0, num_queries=400)
    assert summary.runs_per_s == pytest.approx(2.0, rel=0.2)


def test_queries_repeat_as_often_as_asked() -> None:
    queries = Queries("mixed", duplicates=0.2, seed=1)
    names = [queries.next().id for _ in range(5000)]
    hot = [name for name in names if name.startswith("hot")]
    assert len(hot) == pytest.approx(1000, rel=0.1)
    # Zipf: the first of twenty has 1/H(20) of all.
    assert hot.count("hot0") == pytest.approx(len(hot) / 3.6, rel=0.15)


def test_the_same_fresh_queries_come_at_every_share_of_duplicates() -> None:
    some, none = (Queries("mixed", duplicates=share, seed=3) for share in (0.5, 0.0))
    pairs = [(some.next(), none.next()) for _ in range(200)]
    fresh = [(a, b) for a, b in pairs if not a.id.startswith("hot")]
    assert all(a == b for a, b in fresh)


QUERY = Query(id="q", kind="rag-rerank", num_chunks=11, num_output=100, num_rewritten=20)


def test_a_static_split_keeps_items_and_joins_its_pipelines() -> None:
    nodes = GraphBuilder(QUERY, num_pipelines=2, max_split=1).build()
    assert [nodes[name].num_items for name in ("embed0", "embed1")] == [6, 5]
    assert nodes["ingest1"].parents == ["embed1"]
    assert set(nodes["search"].parents) == {"embed-query", "ingest0", "ingest1"}
    assert set(nodes["llm"].parents) == {"rerank0", "rerank1"}
    assert nodes["llm"].level > nodes["rerank0"].level > nodes["search"].level


def finished(*requests: tuple[float, float], subnode_tokens: int = 1000) -> list[float]:
    """When each of these generations (prompt, output), all begun at 0, ends."""
    timeline = Timeline()
    costs = StepCosts(base_s=0.01, per_sequence_s=0.0, per_prompt_token_s=0.001, chunk_tokens=100)
    pipeline = LlmPipeline(timeline, costs, subnode_tokens=subnode_tokens)
    ends: dict[int, float] = {}
    for index, (prompt, output) in enumerate(requests):
        pipeline.add(
            prompt,
            output,
            priority=0,
            on_subnode=lambda made: None,
            on_end=lambda index=index: ends.setdefault(index, timeline.now_s),  # type: ignore[misc]
        )
    while timeline.step():
        pass
    assert len(pipeline) == 0
    return [ends[index] for index in range(len(requests))]


def test_a_pipeline_reads_then_decodes() -> None:
    assert finished((200, 50)) == pytest.approx([0.2 + 0.5])


def test_prompts_are_read_one_after_the_other_and_slow_down_decoding() -> None:
    first, second = finished((200, 50), (200, 50))
    # The second prompt is read in two steps of 0.11 s, in which the first makes two tokens.
    assert first == pytest.approx(0.2 + 0.22 + 48 * 0.01, rel=1e-3)
    assert second == pytest.approx(0.2 + 0.22 + 50 * 0.01, rel=1e-3)


def test_reports_between_do_not_change_the_time() -> None:
    assert finished((10, 500), (300, 40), subnode_tokens=7) == pytest.approx(
        finished((10, 500), (300, 40)), rel=1e-4
    )


def test_the_command_prints_lines_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["simulate", "workflows", "--policy", "hera", "fcfs", "--concurrency", "5"]
    line += ["--duplicates", "0", "--queries", "40"]
    assert main(line) == 0
    assert [row.split()[0] for row in capsys.readouterr().out.splitlines()] == [
        "system",
        "hera",
        "fcfs",
    ]
    assert main([*line, "--json"]) == 0
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [row["system"] for row in rows] == ["hera", "fcfs"]
    assert rows[0]["p99_s"] > 0


@pytest.mark.parametrize(
    "wrong",
    [["--policy", "best"], ["--duplicates", "101"], ["--concurrency", "0"], ["--rate", "0"]],
)
def test_a_wrong_option_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "workflows", *wrong])
