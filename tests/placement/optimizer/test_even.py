"""Fleets of equal parts, on clusters as they are rented."""

from __future__ import annotations

import pytest

from placement.catalogue import shipped_catalogue
from placement.cluster import parse_cluster
from placement.corrections import CALIBRATED
from placement.estimator import PAPER, Estimator, Fidelity
from placement.hardware import Offer
from placement.model_catalogue import find_model
from placement.optimizer import solve
from placement.optimizer.cluster import make_cluster
from placement.optimizer.even import even_columns, even_fleet
from placement.plan import Goal, Plan
from placement.workload import WORKLOADS, Workload

SHAPES = (
    "g6.12xlarge",
    "g5.12xlarge",
    "g6e.12xlarge",
    "p4d.24xlarge",
    "g6.48xlarge",
    "g5.48xlarge",
    "g6e.xlarge",
    "g5.2xlarge",
)


def offers(text: str) -> list[Offer]:
    return list(parse_cluster(text, shipped_catalogue(), "calibrated"))


def together() -> list[Offer]:
    return offers("offers: [" + ", ".join(f"{{shape: {one}, count: 25}}" for one in SHAPES) + "]")


def apart() -> list[Offer]:
    """The same machines, each with its own zone and price."""
    each = [
        f"{{shape: {SHAPES[index % 8]}, zone: z{index}, price_usd_per_hour: {1 + index / 100}}}"
        for index in range(200)
    ]
    return offers("offers: [" + ", ".join(each) + "]")


def estimator(
    fidelity: Fidelity = CALIBRATED,
    *,
    model: str = "Qwen/Qwen3-32B",
    workload: Workload | None = None,
) -> Estimator:
    spec = find_model(model)
    assert spec is not None
    return Estimator(model=spec, workload=workload or WORKLOADS["azure-conv"], fidelity=fidelity)


def rented(plan: Plan) -> dict[Offer, int]:
    used: dict[Offer, int] = {}
    for pipeline in plan.pipelines:
        for one in pipeline.offers:
            used[one] = used.get(one, 0) + 1
    return used


def test_machines_offered_one_by_one_make_as_good_a_fleet_at_once() -> None:
    goal = Goal(objective="throughput")
    in_bulk = even_fleet(make_cluster(together(), estimator(), goal))
    plan = solve(apart(), estimator(), goal, time_limit_s=0.0)
    assert in_bulk is not None
    assert plan.value == pytest.approx(in_bulk[1].value)
    assert plan.value == pytest.approx(plan.throughput_rps)
    assert max(rented(plan).values()) == 1
    assert plan.value < plan.bound < 2 * plan.value


@pytest.mark.parametrize(
    "goal",
    [
        Goal(objective="cost-for-load", load_rps=100.0),
        Goal(objective="throughput", max_price_usd_per_hour=20.0),
        Goal(),
        Goal(objective="throughput", max_zone_share=0.1),
        Goal(objective="throughput", slo_ttft_s=2.0),
    ],
    ids=["cost-for-load", "max-price", "throughput-per-dollar", "zones", "ttft"],
)
def test_a_fleet_found_without_time_keeps_every_limit_of_the_goal(goal: Goal) -> None:
    plan = solve(apart(), estimator(PAPER), goal, time_limit_s=0.0)
    assert max(rented(plan).values()) == 1
    assert plan.throughput_rps >= (goal.load_rps or 0.0)
    assert plan.price_usd_per_hour <= (goal.max_price_usd_per_hour or 1e9)
    assert all(goal.latency_factor(pipeline.estimate) == 1 for pipeline in plan.pipelines)
    assert 0 < plan.bound < float("inf")
    assert (plan.bound < plan.value) == (goal.objective == "cost-for-load")


def test_more_machines_make_no_worse_fleet_within_a_latency() -> None:
    one, more = "{shape: g6e.xlarge}", "{shape: g6.48xlarge}, {shape: p4d.24xlarge, count: 2}"
    eight = estimator(
        PAPER, model="Qwen/Qwen3-8B", workload=Workload(input_tokens=800, output_tokens=200)
    )
    goal = Goal(objective="throughput", slo_ttft_s=1.0)
    alone = solve(offers(f"offers: [{one}]"), eight, goal)
    assert alone.gap == 0
    plan = solve(offers(f"offers: [{more}, {one}]"), eight, goal, time_limit_s=0.0)
    assert plan.value > 2 * alone.value


def test_machines_are_taken_cheapest_first_and_none_twice() -> None:
    goal = Goal(objective="throughput", max_price_usd_per_hour=1e6)
    text = "{shape: g5.2xlarge, count: %d, zone: z%d, price_usd_per_hour: %d}"
    three = [text % row for row in [(3, 0, 3), (50, 1, 1), (100_000, 2, 2)]]
    cluster = make_cluster(offers(f"offers: [{', '.join(three)}]"), estimator(), goal)
    columns = {column.nodes: column for column in even_columns(cluster)}
    size = len(next(iter(columns)))
    left = 50 % size
    assert size > 3
    assert left > 0
    assert (1,) * size in columns
    assert (2,) * size in columns
    assert columns[(1,) * left + (2,) * (size - left)].price_usd_per_hour == 2 * size - left
    assert (0,) * size not in columns


@pytest.mark.parametrize("gpus", [8, 64])
def test_a_machine_of_many_gpus_is_assembled_in_time(gpus: int) -> None:
    """All ways to cut 64 GPUs are far too many to be looked at one by one."""
    text = f"offers: [{{gpu: L4, gpus_per_node: {gpus}, price_usd_per_hour: 1}}]"
    plan = solve(offers(text), estimator(model="Qwen/Qwen3-8B"), Goal())
    assert plan.gap == 0
    assert sum(stage.tp for stage in plan.pipelines[0].stages) <= gpus
