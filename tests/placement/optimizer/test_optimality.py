"""Against exhaustive enumeration: 520 random small clusters, both readings of the batch."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from placement.errors import Infeasible
from placement.optimizer import solve, solve_paper
from placement.optimizer.clock import Clock
from placement.optimizer.cluster import make_cluster
from placement.optimizer.columns import search_sets
from placement.optimizer.large import Generation
from placement.plan import Goal, Plan
from tests.placement.optimizer.brute_force import best_value
from tests.placement.optimizer.instances import Instance, random_goal, random_instance

SHARDS = 20
PER_SHARD = 26
FREE = Goal(objective="throughput")


def solved(instance: Instance, goal: Goal) -> Plan | None:
    try:
        return solve(instance.offers, instance.estimator, goal)
    except Infeasible:
        return None


def goal_for(seed: int, instance: Instance, free: Plan) -> Goal:
    """A random goal that suits the cluster. free: its best fleet without one."""
    dice = random.Random(1000 + seed)
    return random_goal(dice, instance.offers, dice.choice(free.pipelines).estimate)


def check_runnable(plan: Plan, instance: Instance) -> None:
    """Layers add up, GPUs suffice, each machine is used once, estimates are the estimator's."""
    rented = [offer for pipeline in plan.pipelines for offer in pipeline.offers]
    for offer in instance.offers:
        assert rented.count(offer) <= offer.count
    assert set(rented) <= set(instance.offers)
    for pipeline in plan.pipelines:
        nodes = [stage.node for stage in pipeline.stages]
        assert nodes == sorted(nodes)
        assert set(nodes) == set(range(len(pipeline.offers)))
        for node, offer in enumerate(pipeline.offers):
            on_node = [stage for stage in pipeline.stages if stage.node == node]
            assert all(stage.shape == offer.shape for stage in on_node)
            assert sum(stage.tp for stage in on_node) <= offer.shape.num_gpus
        batch = pipeline.estimate.batch
        assert instance.estimator.evaluate(pipeline.stages, batch) == pipeline.estimate


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_fleet_is_as_good_as_the_best_of_all(shard: int) -> None:
    for seed in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
        instance = random_instance(seed)
        free = compare(seed, instance, FREE)
        if free is not None:
            compare(seed, instance, goal_for(seed, instance, free))


def compare(seed: int, instance: Instance, goal: Goal) -> Plan | None:
    best = best_value(instance.offers, instance.estimator, goal)
    plan = solved(instance, goal)
    if best is None or plan is None:
        assert best is None, f"seed {seed}: nothing found, yet {best} is possible"
        assert plan is None, f"seed {seed}: found what is not possible"
        return None
    assert plan.value == pytest.approx(best, rel=1e-9), f"seed {seed}: {goal}"
    assert plan.gap <= 1e-9, f"seed {seed}: {goal}"
    check_runnable(plan, instance)
    return plan


@pytest.mark.parametrize("shard", range(6))
def test_column_generation_finds_no_more_and_bounds_no_less_than_the_best(shard: int) -> None:
    for seed in range(5000 + shard * 10, 5005 + shard * 10):
        instance = random_instance(seed)
        free = solved(instance, FREE)
        for goal in [FREE, goal_for(seed, instance, free)] if free is not None else []:
            best = best_value(instance.offers, instance.estimator, goal)
            cluster = make_cluster(instance.offers, instance.estimator, goal)
            try:
                _, fleet = Generation(cluster, Clock(time_limit_s=60)).run()
            except Infeasible:
                continue
            assert best is not None, f"seed {seed}"
            sign = -1 if goal.objective == "cost-for-load" else 1
            slack = 1e-8 * best
            assert sign * fleet.value <= sign * best + slack, f"seed {seed}: {goal}"
            assert sign * fleet.bound >= sign * best - slack, f"seed {seed}: {goal}"
            if goal == FREE:
                assert fleet.value == pytest.approx(best, rel=1e-8), f"seed {seed}"


@pytest.mark.parametrize("beam", [1, 3, 32])
@pytest.mark.parametrize("splits", [False, True])
def test_the_papers_beam_is_never_better(beam: int, splits: bool) -> None:
    num_compared = 0
    for seed in range(9000, 9016):
        instance = random_instance(seed)
        for objective in ("throughput-per-dollar", "throughput"):
            goal = Goal(objective=objective)
            plan = solved(instance, goal)
            try:
                paper = solve_paper(
                    instance.offers, instance.estimator, goal, beam=beam, splits=splits
                )
            except Infeasible:
                continue
            check_runnable(paper, instance)
            assert plan is not None
            assert paper.value <= plan.value * (1 + 1e-9), f"seed {seed}"
            assert paper.gap == math.inf
            num_compared += 1
    assert num_compared > 10


def test_what_the_search_counts_is_what_the_estimator_says() -> None:
    for seed in range(20):
        instance = random_instance(seed)
        cluster = make_cluster(instance.offers, instance.estimator, Goal())
        sets = cluster.sets()
        search = search_sets(cluster, sets)
        search.gain = np.ones(len(sets))
        search.run(cluster.rates)
        for group in np.flatnonzero(search.best):
            stages, _, batch = search.stages(int(group))
            estimate = instance.estimator.evaluate(stages, batch)
            assert estimate.throughput_rps == pytest.approx(search.best[group], rel=1e-12)


def test_offers_may_come_in_any_order_and_in_parts() -> None:
    for seed in (2, 3, 16, 21):
        instance = random_instance(seed)
        whole = solved(instance, Goal(objective="throughput"))
        parts = [replace(offer, count=1) for offer in instance.offers for _ in range(offer.count)]
        again = solved(replace(instance, offers=parts[::-1]), Goal(objective="throughput"))
        assert (whole is None) == (again is None)
        if whole is not None and again is not None:
            assert whole.value == pytest.approx(again.value, rel=1e-9)
