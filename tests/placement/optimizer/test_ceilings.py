"""Bounds without a search, on a cluster as it is rented."""

import itertools

import pytest

from placement.catalogue import shipped_catalogue
from placement.cluster import parse_cluster
from placement.corrections import CALIBRATED
from placement.estimator import PAPER, Estimator, Fidelity
from placement.hardware import Offer
from placement.model_catalogue import find_model
from placement.optimizer import solve
from placement.optimizer.ceilings import ceiling
from placement.optimizer.clock import Clock
from placement.optimizer.cluster import make_cluster
from placement.plan import Goal
from placement.workload import WORKLOADS

CLUSTER = """
offers:
  - {shape: g6.12xlarge, count: 2}
  - {shape: g5.12xlarge, count: 1}
  - {shape: g6e.xlarge, count: 2}
"""
GOALS = [
    Goal(objective="throughput"),
    Goal(objective="throughput-per-dollar"),
    Goal(objective="cost-for-load", load_rps=1.0),
]


def offers() -> list[Offer]:
    return list(parse_cluster(CLUSTER, shipped_catalogue(), "calibrated"))


def estimator(fidelity: Fidelity) -> Estimator:
    model = find_model("Qwen/Qwen3-32B")
    assert model is not None
    return Estimator(model=model, workload=WORKLOADS["azure-conv"], fidelity=fidelity)


@pytest.mark.parametrize("fidelity", [PAPER, CALIBRATED], ids=lambda one: one.name)
@pytest.mark.parametrize("goal", GOALS, ids=lambda one: one.objective)
def test_no_fleet_is_better_than_the_ceiling(goal: Goal, fidelity: Fidelity) -> None:
    plan = solve(offers(), estimator(fidelity), goal)
    assert plan.gap <= 1e-9
    above = ceiling(make_cluster(offers(), estimator(fidelity), goal))
    if goal.objective == "cost-for-load":
        assert plan.value / 10 < above <= plan.value
    else:
        assert plan.value <= above < 4 * plan.value


def test_a_search_that_was_cut_off_says_how_far_off_it_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best = solve(offers(), estimator(PAPER), GOALS[0])
    rounds = itertools.count()
    monkeypatch.setattr(Clock, "is_over", lambda clock: next(rounds) >= 6)
    plan = solve(offers(), estimator(PAPER), GOALS[0])
    assert plan.gap > 0
    assert plan.value <= best.value <= plan.bound
    assert plan.bound <= ceiling(make_cluster(offers(), estimator(PAPER), GOALS[0]))


@pytest.mark.parametrize("limit_s", [0, 2, 5, 12, 40])
def test_a_bound_is_known_whenever_time_is_over(
    limit_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also within a latency that is a sum over stages, for which half of the time goes first."""
    seconds = itertools.count()
    monkeypatch.setattr(Clock, "passed_s", property(lambda clock: float(next(seconds))))
    goal = Goal(objective="throughput", slo_ttft_s=20.0)
    plan = solve(offers(), estimator(PAPER), goal, time_limit_s=limit_s)
    assert plan.value <= plan.bound < 4 * plan.value
