"""Lists of runs, arrivals, cells and the search stub's latencies."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.workflow_frameworks.cells import (
    DUPLICATE_SHARES,
    Cell,
    all_cells,
    expected_s,
    fitted,
)
from benchmarks.workflow_frameworks.search_stub import MEDIAN_LATENCY_S, Pages, latency_s
from benchmarks.workflow_frameworks.workload import (
    Workload,
    load_pages,
    load_passages,
    load_questions,
    make_runs,
    poisson_arrivals,
    warm_up_runs,
)

QUESTIONS = load_questions()


@pytest.mark.parametrize("workload", ["mixed", "research"])
def test_without_duplicates_all_runs_differ(workload: Workload) -> None:
    runs = make_runs(workload, QUESTIONS, num_runs=150, duplicate_share=0, seed=1)
    assert len(set(runs)) == 150


@pytest.mark.parametrize(("share", "num_duplicates"), [(0.05, 6), (0.15, 18)])
def test_the_share_of_duplicates_is_exact(share: float, num_duplicates: int) -> None:
    runs = make_runs("mixed", QUESTIONS, num_runs=120, duplicate_share=share, seed=1)
    assert len(runs) == 120
    assert len(set(runs)) == 120 - num_duplicates


def test_duplicates_are_of_few_questions_and_most_of_the_first() -> None:
    counts: Counter[int] = Counter()
    for seed in range(60):
        runs = make_runs("mixed", QUESTIONS, num_runs=100, duplicate_share=0.15, seed=seed)
        repeated = [number for number in Counter(runs).values() if number > 1]
        assert len(repeated) <= 5
        counts[max(repeated)] += 1
    assert sum(number * times for number, times in counts.items()) / 60 > 15 / 5 + 1


def test_the_mix_is_half_rerank_a_quarter_rag_and_a_quarter_web() -> None:
    runs = make_runs("mixed", QUESTIONS, num_runs=80, duplicate_share=0, seed=3)
    assert Counter(run.kind for run in runs) == {"rag_rerank": 40, "rag": 20, "web": 20}


def test_fewer_duplicates_are_the_same_runs_and_more() -> None:
    many = make_runs("mixed", QUESTIONS, num_runs=100, duplicate_share=0.15, seed=1)
    few = make_runs("mixed", QUESTIONS, num_runs=100, duplicate_share=0, seed=1)
    assert set(many) < set(few)


def test_a_seed_gives_the_same_list_again_and_another_another() -> None:
    lists = [
        make_runs("research", QUESTIONS, num_runs=40, duplicate_share=0.05, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert lists[0] == lists[1]
    assert lists[0] != lists[2]


def test_more_runs_than_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="not enough questions"):
        make_runs("mixed", QUESTIONS, num_runs=1000, duplicate_share=0, seed=1)


def test_research_runs_share_topics() -> None:
    runs = make_runs("research", QUESTIONS, num_runs=80, duplicate_share=0, seed=1)
    topics = {run.topic for run in runs}
    assert 5 < len(topics) < 40


def test_warm_up_asks_nothing_that_is_measured() -> None:
    for workload in ("mixed", "research"):
        runs = make_runs(workload, QUESTIONS, num_runs=120, duplicate_share=0, seed=1)
        warm_up = warm_up_runs(workload, QUESTIONS, runs)
        assert {run.kind for run in warm_up} == {run.kind for run in runs}
        assert not {run.question for run in warm_up} & {run.question for run in runs}


def test_arrivals_rise_at_the_rate() -> None:
    arrivals = poisson_arrivals(20_000, 4.0, seed=1)
    assert arrivals == sorted(arrivals)
    assert 20_000 / arrivals[-1] == pytest.approx(4.0, rel=0.03)


def test_the_data_is_whole() -> None:
    assert len(load_passages()) == 1255
    assert len(QUESTIONS.documents) == 150
    assert len(QUESTIONS.web) == 817


def test_the_stub_takes_log_normal_times_that_the_query_decides() -> None:
    times = sorted(latency_s(f"query {number}", 1) for number in range(2001))
    assert times[1000] == pytest.approx(MEDIAN_LATENCY_S, rel=0.1)
    assert times[1980] > 3 * times[1000]
    assert latency_s("cats", 1) == latency_s("cats", 1) != latency_s("cats", 2)


def test_the_stub_finds_the_page_of_a_question() -> None:
    pages = Pages(load_pages())
    first = pages.find("Where did fortune cookies originate?", 1)
    assert first[0]["title"] == "Where did fortune cookies originate?"
    second = pages.find("Where did fortune cookies originate?", 2)
    assert len(first) == len(second) == 10
    assert not {one["url"] for one in first} & {one["url"] for one in second}
    assert pages.find("qwxyz", 1) == []


def test_cells_fit_into_their_time_with_enough_runs_each() -> None:
    cells = all_cells(["mixed", "research"], DUPLICATE_SHARES)
    assert len({cell.name for cell in cells}) == len(cells) == 18
    speed: dict[Workload, float] = {"mixed": 4.0, "research": 4.0}
    assert expected_s(cells, speed, 4) > 2400
    fit = fitted(cells, speed, num_systems=4, budget_s=2000)
    assert 1800 < expected_s(fit, speed, 4) <= 2000
    for cell in fit:
        assert cell.num_runs >= cell.min_runs
        assert cell.loop == "open" or cell.num_runs >= cell.level
    assert fitted(cells, speed, num_systems=4, budget_s=1e6) == cells


def test_a_workload_s_closed_loops_come_before_its_open_ones() -> None:
    heaviest = all_cells(["mixed", "research"], [0.0], heaviest_only=True)
    assert [(one.workload, one.loop, one.level) for one in heaviest] == [
        ("mixed", "closed", 100),
        ("mixed", "open", 0.95),
        ("research", "closed", 30),
        ("research", "open", 0.95),
    ]
    cells = all_cells(["mixed"], [0.0])
    assert [cell.loop for cell in cells] == ["closed"] * 3 + ["open"] * 3
    assert Cell("mixed", "open", 0.95, 0.05, 10).name == "mixed, 95% load, 5% duplicates"
