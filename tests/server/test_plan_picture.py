"""What people see of a plan."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from placement.explanation import explain
from placement.plan import Goal, Plan
from server.plan_json import explanation_answer
from server.plan_picture import (
    amount,
    explanation_view,
    machines,
    plan_view,
    printer,
    summary,
    usd_per_million_tokens,
)
from tests import plans


def shown(plan: Plan, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    console = printer(stream)
    console.print(plan_view(plan, plans.estimator().model, plans.AZURE, console))
    stream.flush()
    return raw.getvalue().decode(encoding)


def test_what_there_was_no_time_to_explain_is_named() -> None:
    plan = plans.papers_plan()
    unused = plans.offer("g5.12xlarge")
    explanation = explain(
        plan,
        [unused],
        plans.estimator(),
        lambda offers, /, *, time_limit_s: plan,
        time_limit_s=0.0,
    )
    stream = io.StringIO()
    printer(stream).print(explanation_view(explanation, plan))
    text = stream.getvalue()
    assert "note: --time-limit left no time for\n" in text
    assert "  a machine more of g5.12xlarge (on_demand)\n" in text
    assert "  the price below which to rent g5.12xlarge (on_demand)\n" in text
    assert "a machine less of" not in text
    assert explanation_answer(explanation)["left_out"] == {
        "one_more": [unused.label],
        "runner_ups": [],
        "entry_prices": [unused.label],
    }


def test_equal_pipelines_are_shown_once() -> None:
    first, second = plans.papers_plan().pipelines
    text = shown(plans.plan(first, first, first, second))
    assert "pipelines 1 to 3: each 117 requests in flight" in text
    assert "pipeline 4: " in text
    assert text.count("g6.12xlarge") == 1


def test_an_output_without_unicode_gets_bars_all_the_same() -> None:
    text = shown(plans.papers_plan(), encoding="ascii")
    assert "####" in text
    assert "<" in text


def test_the_slowest_stage_of_each_phase_is_marked() -> None:
    plan = plans.papers_plan()
    lines = shown(plan).splitlines()
    stages = plan.pipelines[1].estimate.stages
    slowest = max(range(2), key=lambda index: stages[index].decode_s)
    [marked] = [line for line in lines if line.rstrip().endswith("◀")]
    assert marked.strip().startswith(f"{slowest + 1} 1x L40S")


def test_the_price_of_tokens_counts_prompts_and_output() -> None:
    plan = plans.papers_plan()
    an_hour = plan.throughput_rps * 3600 * (763 + 232) / 1e6
    assert usd_per_million_tokens(plan, plans.AZURE) == pytest.approx(
        plan.price_usd_per_hour / an_hour
    )


@pytest.mark.parametrize(
    ("gap", "goal", "part"),
    [
        (0.0, Goal(), "proven optimal"),
        (0.05, Goal(), "no fleet is above"),
        (-0.05, Goal(objective="cost-for-load", load_rps=1.0), "no fleet is below"),
        (float("inf"), Goal(), "no bound is known"),
    ],
)
def test_the_bound_is_put_into_words(gap: float, goal: Goal, part: str) -> None:
    plan = plans.plan(*plans.papers_plan().pipelines, goal=goal, gap=gap)
    assert part in "\n".join(line.plain for line in summary(plan, plans.AZURE))


def test_what_interruptions_take_is_told() -> None:
    first = plans.papers_plan().pipelines[0]
    risky = replace(first, offers=(replace(first.offers[0], interruptions_per_hour=1.0),))
    plan = plans.plan(risky, goal=Goal(recovery_s=360.0))
    text = "\n".join(line.plain for line in summary(plan, plans.AZURE))
    assert f"of which {0.9 * plan.throughput_rps:.3f} requests/s count" in text


def test_amounts_have_their_units() -> None:
    assert amount(0.5, "throughput-per-dollar") == "1,800.0 requests per dollar"
    assert amount(0.5, "throughput") == "0.500 requests per second"
    assert amount(12.5, "cost-for-load") == "12.500 dollars per hour"


def test_a_fleets_machines_in_a_line() -> None:
    first, second = plans.papers_plan().pipelines
    assert machines(plans.plan(first, second, second)) == "g6.12xlarge, 2x (2 g6e.xlarge)"
