"""A running fleet is moved only where that pays within the horizon."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from placement.errors import Infeasible, InvalidInput
from placement.estimator import Estimator, PipelineEstimate, Stage
from placement.hardware import Gpu, Link, Offer, Shape
from placement.optimizer import Replan, replan, replanning, solve
from placement.plan import Goal, PlannedPipeline
from placement.workload import Workload
from tests.placement.models import LLAMA_8B
from tests.placement.optimizer.brute_force import Best, best_pipelines, fleet_value, fleets
from tests.placement.optimizer.instances import Instance, random_instance

THROUGHPUT = Goal(objective="throughput")
LINK = Link(latency_s=1e-5, bandwidth=1e10)
ESTIMATOR = Estimator(model=LLAMA_8B, workload=Workload(input_tokens=763, output_tokens=232))
BOX = Shape(
    name="box",
    gpu=Gpu(name="gpu", memory_bytes=48e9, flops=200e12, bandwidth=700e9),
    num_gpus=1,
    intra=LINK,
    inter=LINK,
)


def boxes(count: int, price: float = 1.0, zone: str = "a") -> Offer:
    return Offer(shape=BOX, count=count, price_usd_per_hour=price, market="spot", zone=zone)


@functools.cache
def best() -> PlannedPipeline:
    """What runs best on a box: less than twice as fast as two on two."""
    [pipeline] = solve([boxes(1)], ESTIMATOR, THROUGHPUT).pipelines
    return pipeline


def on_box(offer: Offer) -> PlannedPipeline:
    return replace(best(), offers=(replace(offer, count=1),))


def moved(running: list[PlannedPipeline | None], *offers: Offer, goal: Goal = THROUGHPUT) -> Replan:
    """The answer where a start takes a tenth of the horizon."""
    return replan(running, offers, ESTIMATOR, goal, start_up_s=360, horizon_s=3600)


def test_a_lost_pipeline_starts_anew_and_counts_for_nine_tenths() -> None:
    rps = best().estimate.throughput_rps
    found = moved([on_box(boxes(3)), None, on_box(boxes(3))], boxes(3))
    assert (found.kept, len(found.started)) == ((0, 2), 1)
    assert found.plan.value == pytest.approx(2.9 * rps)
    assert found.effective_rps == pytest.approx(2.9 * rps)
    assert found.stay_value == pytest.approx(2 * rps)
    assert found.gain == pytest.approx(0.45)
    assert found.missed_requests == pytest.approx(360 * rps)
    assert found.start_up_usd == pytest.approx(0.1)
    assert found.plan.gap == 0


def test_a_fleet_that_nothing_happened_to_goes_on() -> None:
    found = moved([on_box(boxes(2)), on_box(boxes(2))], boxes(2))
    assert (found.kept, found.started, found.gain) == ((0, 1), (), 0)
    assert found.missed_requests == found.start_up_usd == 0


def test_no_more_go_on_than_machines_are_left() -> None:
    found = moved([on_box(boxes(3))] * 3, boxes(2))
    assert (len(found.kept), found.started) == (2, ())


def test_machines_of_one_zone_do_not_stand_in_for_those_of_another() -> None:
    found = moved([on_box(boxes(2))] * 2, boxes(1), boxes(1, zone="b"))
    assert len(found.kept) == 1
    assert [one.offers[0].zone for one in found.plan.pipelines] == ["a", "b"]


def test_offers_that_are_written_twice_add_up() -> None:
    found = moved([on_box(boxes(1))] * 2, boxes(1), boxes(1), boxes(1))
    assert (len(found.kept), len(found.started)) == (2, 1)


def test_machines_go_on_at_the_price_that_they_had_where_it_is_still_offered() -> None:
    found = moved([on_box(boxes(1, price=2.0))], boxes(1, price=3.0), boxes(1, price=2.0))
    assert found.plan.pipelines[0].offers[0].price_usd_per_hour == 2.0


@pytest.mark.parametrize(("price", "moves"), [(1.1, False), (1.12, True)])
def test_a_fleet_moves_to_cheaper_machines_where_that_makes_up_for_the_start(
    price: float, moves: bool
) -> None:
    """0.9 / 1 against 1 / price: from 1.111 on."""
    goal = Goal(objective="throughput-per-dollar")
    found = moved([on_box(boxes(1))], boxes(1, price=price), boxes(1, zone="b"), goal=goal)
    assert found.kept == (() if moves else (0,))
    rps = best().estimate.throughput_rps
    assert found.plan.value == pytest.approx(0.9 * rps if moves else rps / price)
    assert found.stay_value == pytest.approx(rps / price)
    assert found.plan.gap == 0


@pytest.mark.parametrize(("load", "moves"), [(0.89, True), (0.91, False)])
def test_a_load_is_served_while_pipelines_start(load: float, moves: bool) -> None:
    """A start serves 0.9 over the horizon; a running one its whole, at twice the price."""
    goal = Goal(objective="cost-for-load", load_rps=load * best().estimate.throughput_rps)
    found = moved([on_box(boxes(1))], boxes(1, price=1.9), boxes(1, zone="b"), goal=goal)
    assert found.kept == (() if moves else (0,))
    assert found.plan.value == pytest.approx(1.0 if moves else 1.9)
    assert found.gain == pytest.approx(0.9 / 1.9 if moves else 0)


def test_staying_that_does_not_meet_the_goal_has_no_value() -> None:
    goal = Goal(objective="cost-for-load", load_rps=1.5 * best().estimate.throughput_rps)
    found = moved([on_box(boxes(2)), None], boxes(2), goal=goal)
    assert (found.stay_value, found.gain, found.kept) == (None, None, (0,))


def test_a_batch_that_does_not_fit_any_more_counts_as_what_fits() -> None:
    longer = replace(ESTIMATOR, workload=Workload(input_tokens=2763, output_tokens=232))
    found = replan([on_box(boxes(1))], [boxes(1)], longer, THROUGHPUT)
    estimate = found.plan.pipelines[0].estimate
    assert found.kept == (0,)
    assert estimate == longer.evaluate(best().stages)


def test_machines_that_cannot_hold_the_model_are_told() -> None:
    tiny = replace(BOX, name="tiny", gpu=replace(BOX.gpu, memory_bytes=8e9))
    with pytest.raises(Infeasible, match="bytes\\) are missing"):
        moved([on_box(boxes(1))], replace(boxes(1), shape=tiny))


def test_a_start_longer_than_the_horizon_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="start_up_s"):
        replan([], [boxes(1)], ESTIMATOR, THROUGHPUT, start_up_s=5000, horizon_s=3600)


GOALS = (
    THROUGHPUT,
    Goal(objective="throughput-per-dollar"),
    Goal(objective="throughput", on_demand_share=0.4),
)


@pytest.mark.parametrize("shard", range(3))
def test_every_move_is_as_good_as_the_best_of_all(shard: int) -> None:
    """All subsets of what can go on, each with all fleets of the machines left."""
    num = 0
    for seed in range(100 * shard, 100 * shard + 24):
        instance, dice = random_instance(seed), random.Random(seed)
        goal, share = dice.choice(GOALS), dice.choice([0.5, 0.97])
        try:
            running = list(solve(instance.offers, instance.estimator, THROUGHPUT).pipelines)
        except Infeasible:
            continue
        if len({one.kind for one in instance.offers}) < len(instance.offers):
            continue
        today = [changed(dice, one) for one in instance.offers]
        expected = best_move(running, replace_offers(instance, today), goal, share)
        try:
            found = replan(
                running,
                today,
                instance.estimator,
                goal,
                start_up_s=3600 * (1 - share),
                horizon_s=3600,
            )
        except (Infeasible, InvalidInput):
            assert expected is None
            continue
        assert found.plan.value == pytest.approx(expected, rel=1e-9), f"seed {seed}: {goal}"
        assert found.plan.gap <= 1e-9
        num += len(found.kept) > 0
    assert num > 5


def changed(dice: random.Random, offer: Offer) -> Offer:
    count = max(0, offer.count + dice.choice([-1, 0, 0, 0, 1]))
    return replace(offer, count=count, price_usd_per_hour=dice.choice([0.6, 1.0, 1.5]))


def replace_offers(instance: Instance, offers: list[Offer]) -> Instance:
    return Instance(offers=offers, estimator=instance.estimator)


def best_move(
    running: list[PlannedPipeline], today: Instance, goal: Goal, share: float
) -> float | None:
    places = {one.kind: at for at, one in enumerate(today.offers)}
    values = []
    pipelines = best_pipelines(today.offers, today.estimator, goal)
    new = {counts: replace(one, rps=share * one.rps) for counts, one in pipelines.items()}
    for size in range(len(running) + 1):
        for kept in itertools.combinations(running, size):
            counts = [0] * len(today.offers)
            going = []
            for pipeline in kept:
                at = [places[one.kind] for one in pipeline.offers]
                for place in at:
                    counts[place] += 1
                offers = [today.offers[place] for place in at]
                going.append(
                    Best(
                        rps=goal.effective_rps(pipeline.estimate, offers),
                        price=sum(one.price_usd_per_hour for one in offers),
                        has_spot=any(one.market == "spot" for one in offers),
                        zones=frozenset(one.zone for one in offers),
                    )
                )
            left = tuple(one.count - used for one, used in zip(today.offers, counts, strict=True))
            if min(left) < 0:
                continue
            for fleet in fleets(left, list(new)):
                together = [*going, *(new[one] for one in fleet)]
                value = fleet_value(together, goal) if together else None
                if value is not None:
                    values.append(value)
    return max(values, default=None)


@pytest.mark.parametrize("goal", GOALS[:2], ids=lambda one: one.objective)
def test_where_sets_are_too_many_to_list_the_bound_holds(
    goal: Goal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the answer over all sets: no better, hardly worse, and under a valid bound."""
    num = 0
    for seed in range(12):
        instance = random_instance(seed)
        try:
            running: list[PlannedPipeline | None] = [
                *solve(instance.offers, instance.estimator, THROUGHPUT).pipelines
            ]
            running[0] = None
            exact = replan(running, instance.offers, instance.estimator, goal)
        except Infeasible:
            continue
        with monkeypatch.context() as patch:
            patch.setattr(replanning, "MAX_CLOSED", 0)
            found = replan(running, instance.offers, instance.estimator, goal)
        assert 0.9 * exact.plan.value <= found.plan.value <= exact.plan.value * (1 + 1e-9)
        assert found.plan.bound >= exact.plan.value * (1 - 1e-9)
        num += 1
    assert num > 5


def test_thousands_of_equal_pipelines_are_one_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the lowest index go on, as far as there are machines."""
    estimated = []
    evaluate = Estimator.evaluate

    def counted(self: Estimator, stages: Sequence[Stage], batch: int | None) -> PipelineEstimate:
        estimated.append(batch)
        return evaluate(self, stages, batch)

    running: list[PlannedPipeline | None] = [None, *[on_box(boxes(1))] * 20_000]
    monkeypatch.setattr(Estimator, "evaluate", counted)
    found = moved(running, boxes(3))
    assert found.kept == (1, 2, 3)
    assert found.plan.value == pytest.approx(3 * best().estimate.throughput_rps)
    assert len(estimated) < 100
