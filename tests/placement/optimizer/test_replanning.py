"""A running fleet is moved only where that pays within the horizon."""

from __future__ import annotations

from dataclasses import replace

import pytest

from placement.errors import Infeasible, InvalidInput
from placement.optimizer import replan, solve
from placement.plan import Goal, Plan
from tests.placement.optimizer.instances import Instance, random_instance

GOAL = Goal(objective="throughput")


def running() -> tuple[Instance, Plan]:
    """A fleet of some pipelines."""
    for seed in range(200):
        instance = random_instance(seed)
        try:
            plan = solve(instance.offers, instance.estimator, GOAL)
        except Infeasible:
            continue
        if len(plan.pipelines) > 1:
            return instance, plan
    raise AssertionError("there is a fleet of two pipelines")


def test_a_fleet_that_nothing_happened_to_goes_on() -> None:
    instance, plan = running()
    again = replan(plan, instance.offers, instance.estimator, GOAL)
    assert again.kept == tuple(range(len(plan.pipelines)))
    assert again.plan.pipelines == plan.pipelines
    assert again.plan.value == pytest.approx(plan.value)


def test_a_broken_pipeline_is_started_anew_and_loses_its_start() -> None:
    instance, plan = running()
    again = replan(
        plan, instance.offers, instance.estimator, GOAL, broken=[0], start_up_s=360, horizon_s=3600
    )
    lost = plan.pipelines[0].estimate.throughput_rps
    assert 0 not in again.kept
    assert again.plan.value >= plan.value - 0.1 * lost - 1e-9 * plan.value
    assert again.plan.value < again.plan.bound


def test_better_machines_do_not_move_a_fleet_whose_horizon_is_short() -> None:
    instance, plan = running()
    worse = replace(plan, pipelines=plan.pipelines[:1])
    left = [replace(offer, count=0) for offer in instance.offers]
    for offer in worse.pipelines[0].offers:
        index = instance.offers.index(offer)
        left[index] = replace(left[index], count=left[index].count + 1)
    short = replan(worse, left, instance.estimator, GOAL, start_up_s=3599, horizon_s=3600)
    assert short.kept == (0,)


def test_machines_that_are_gone_take_their_pipelines_along() -> None:
    instance, plan = running()
    gone = plan.pipelines[0].offers[0]
    left = [offer for offer in instance.offers if offer != gone]
    assert any(offer.count for offer in left)
    try:
        again = replan(plan, left, instance.estimator, GOAL)
    except Infeasible:
        return
    for index in again.kept:
        assert gone not in plan.pipelines[index].offers


def test_a_start_longer_than_the_horizon_is_an_error() -> None:
    instance, plan = running()
    with pytest.raises(InvalidInput, match="start_up_s"):
        replan(plan, instance.offers, instance.estimator, GOAL, start_up_s=5000, horizon_s=3600)
