"""What the solver says where there is nothing to find, or no time."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from placement.catalogue import shipped_catalogue
from placement.corrections import CALIBRATED
from placement.errors import Infeasible, InvalidInput, OutOfTime, Unmet
from placement.estimator import PAPER, Estimator, Fidelity
from placement.hardware import Gpu, Link, Offer, Shape
from placement.model_catalogue import find_model
from placement.optimizer import search, solve, solve_paper
from placement.optimizer.arrangements import Arranger
from placement.optimizer.boxes import whole
from placement.optimizer.capacity import stage_layers
from placement.optimizer.clock import Clock
from placement.optimizer.cluster import make_cluster
from placement.optimizer.pricing import best_ratio
from placement.optimizer.solver import Listing
from placement.plan import Goal, Objective, Plan
from placement.workload import Workload
from tests.placement.models import LLAMA_70B
from tests.placement.optimizer.instances import random_instance

LINK = Link(latency_s=1e-5, bandwidth=1e10)
SMALL = Gpu(name="small", memory_bytes=24e9, flops=55e12, bandwidth=240e9)
LARGE = Gpu(name="large", memory_bytes=48e9, flops=200e12, bandwidth=700e9)
ESTIMATOR = Estimator(model=LLAMA_70B, workload=Workload(input_tokens=763, output_tokens=232))


def offer(gpu: Gpu, num_gpus: int, count: int, price: float = 1.0) -> Offer:
    shape = Shape(name=f"{gpu.name}-{num_gpus}", gpu=gpu, num_gpus=num_gpus, intra=LINK, inter=LINK)
    return Offer(shape=shape, count=count, price_usd_per_hour=price)


def test_a_model_that_does_not_fit_says_by_how_much_and_what_would_do() -> None:
    with pytest.raises(Infeasible) as caught:
        solve([offer(SMALL, 1, 2, 4.6), offer(LARGE, 1, 1, 1.9)], ESTIMATOR, Goal())
    message = caught.value.message
    found = re.search(r"\((\d+) bytes\) are missing", message)
    assert found is not None
    assert int(found.group(1)) > 0
    added = re.search(r"(\d+) more large-1", message)
    assert added is not None
    more = int(added.group(1))
    enough = [offer(SMALL, 1, 2, 4.6), offer(LARGE, 1, 1 + more, 1.9)]
    assert solve(enough, ESTIMATOR, Goal()).pipelines
    with pytest.raises(Infeasible):
        solve([enough[0], replace(enough[1], count=more)], ESTIMATOR, Goal())


def test_machines_too_small_for_a_layer_ask_for_larger_ones() -> None:
    tiny = replace(SMALL, name="tiny", memory_bytes=1e9)
    with pytest.raises(Infeasible, match="take larger GPUs"):
        solve([offer(tiny, 1, 100)], ESTIMATOR, Goal())


@pytest.mark.parametrize(
    "goal",
    [
        Goal(objective="cost-for-load", load_rps=1e6),
        Goal(max_price_usd_per_hour=0.5),
        Goal(slo_ttft_s=1e-6),
        Goal(slo_latency_s=1e-6, objective="throughput"),
    ],
)
def test_a_goal_that_no_fleet_meets_is_infeasible(goal: Goal) -> None:
    with pytest.raises(Infeasible, match="no fleet"):
        solve([offer(LARGE, 1, 6), offer(SMALL, 4, 2)], ESTIMATOR, goal)


def test_a_load_that_is_neither_reached_nor_ruled_out_is_told_so() -> None:
    """So many sets of machines that a gap is left."""
    many = [offer(LARGE, 1, 61, 1.0), offer(SMALL, 4, 61, 2.0), offer(SMALL, 1, 61, 0.5)]
    most = solve(many, ESTIMATOR, Goal(objective="throughput"))
    assert most.bound > most.value * (1 + 1e-6)

    def refused(load_rps: float) -> Unmet:
        with pytest.raises(Unmet) as caught:
            solve(many, ESTIMATOR, Goal(objective="cost-for-load", load_rps=load_rps))
        return caught.value

    between = refused((most.value + most.bound) / 2)
    assert not between.is_proven
    assert "was found" in between.message
    assert refused(2 * most.bound).is_proven


def test_offers_that_only_prices_tell_apart_are_one_where_no_dollars_count() -> None:
    apart = [offer(LARGE, 1, 1, 1.0 + index / 100) for index in range(60)]
    goal = Goal(objective="throughput")
    cluster = make_cluster(apart, ESTIMATOR, goal)
    assert [one.count for one in cluster.classes] == [60]
    assert (
        len(make_cluster(apart, ESTIMATOR, replace(goal, max_price_usd_per_hour=9)).classes) == 60
    )
    plan = solve(apart, ESTIMATOR, goal)
    rented = [one for pipeline in plan.pipelines for one in pipeline.offers]
    assert len(set(rented)) == len(rented)
    assert plan.price_usd_per_hour == pytest.approx(
        sum(1.0 + index / 100 for index in range(len(rented)))
    )
    assert plan.value == solve([offer(LARGE, 1, 60)], ESTIMATOR, goal).value


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (replace(offer(SMALL, 1, 1), price_usd_per_hour=0.0), "offers.1.price_usd_per_hour"),
        (replace(offer(SMALL, 1, 1), price_usd_per_hour=-1.0), "offers.1.price_usd_per_hour"),
        (replace(offer(SMALL, 1, 1), count=-1), "offers.1.count"),
        (replace(offer(SMALL, 1, 1), market="Spot"), "offers.1.market"),
    ],
)
def test_offers_that_mean_nothing_are_named(bad: Offer, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        solve([offer(LARGE, 1, 6), bad], ESTIMATOR, Goal())
    assert caught.value.field == field


def unpriced(one: Offer) -> Offer:
    return replace(one, price_usd_per_hour=0.0)


def test_a_model_that_is_small_for_machines_without_a_price_divides_by_nothing() -> None:
    """Warnings are errors here."""
    tiny = find_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert tiny is not None
    shape = shipped_catalogue().bare_shape("cpu", 1, "calibrated")
    workload = Workload(input_tokens=200, output_tokens=50)
    estimator = Estimator(model=tiny, workload=workload, fidelity=CALIBRATED)
    offers = [Offer(shape=shape, count=2, price_usd_per_hour=0.0)]
    plan = solve(offers, estimator, Goal(objective="throughput"))
    assert len(plan.pipelines) == 2
    assert plan.gap == 0


@pytest.mark.parametrize("counts", [(2, 6), (6, 8)], ids=["listed", "generated"])
def test_throughput_needs_no_prices(counts: tuple[int, int]) -> None:
    priced = [offer(SMALL, 4, counts[0], 4.6), offer(LARGE, 1, counts[1], 1.9)]
    goal = Goal(objective="throughput")
    best = solve(priced, ESTIMATOR, goal)
    for offers in ([unpriced(one) for one in priced], [priced[0], unpriced(priced[1])]):
        plan = solve(offers, ESTIMATOR, goal)
        assert plan.gap < 1e-3
        assert plan.value == pytest.approx(best.value, rel=1e-3)
        rented = {one for pipeline in plan.pipelines for one in pipeline.offers}
        assert rented <= set(offers)
        assert plan.known_price_usd_per_hour is None


def test_the_papers_search_without_prices_counts_gpus() -> None:
    plan = solve_paper(
        [unpriced(offer(SMALL, 4, 2)), unpriced(offer(LARGE, 1, 4))],
        ESTIMATOR,
        Goal(objective="throughput"),
        beam=1,
    )
    assert plan.value == plan.throughput_rps > 0
    dollar_a_gpu = solve_paper(
        [offer(SMALL, 4, 2, 4.0), offer(LARGE, 1, 4, 1.0)],
        ESTIMATOR,
        Goal(objective="throughput"),
        beam=1,
    )
    assert plan.value == dollar_a_gpu.value


@pytest.mark.parametrize("solver", [solve, solve_paper])
@pytest.mark.parametrize(
    "goal",
    [
        Goal(),
        Goal(objective="cost-for-load", load_rps=1.0),
        Goal(objective="throughput", max_price_usd_per_hour=9.0),
    ],
)
def test_goals_that_count_dollars_need_prices(goal: Goal, solver: Callable[..., Plan]) -> None:
    with pytest.raises(InvalidInput, match="must be above 0 for a goal that counts dollars"):
        solver([unpriced(offer(LARGE, 1, 6))], ESTIMATOR, goal)


@pytest.mark.parametrize("num_rounds", [2, 4, 6, 8])
@pytest.mark.parametrize("objective", ["throughput-per-dollar", "throughput"])
def test_when_time_is_over_the_best_found_comes_with_a_bound(
    num_rounds: int, objective: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = [offer(SMALL, 4, 3, 4.6), offer(LARGE, 1, 4, 1.9)]
    goal = Goal(objective=objective)
    best = solve(offers, ESTIMATOR, goal)
    assert best.gap <= 1e-9
    rounds = itertools.count()
    monkeypatch.setattr(Clock, "is_over", lambda clock: next(rounds) >= num_rounds)
    try:
        rushed = solve(offers, ESTIMATOR, goal)
    except Infeasible:
        return
    assert rushed.value <= best.value * (1 + 1e-9)
    assert rushed.bound >= best.value * (1 - 1e-9)


def tick(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A second passes with each look at the clock."""
    seconds = itertools.count()
    monkeypatch.setattr(Clock, "passed_s", property(lambda clock: float(next(seconds))))
    return seconds


@pytest.mark.parametrize("limit_s", [10, 30, 100, 300])
@pytest.mark.parametrize("seed", [0, 2, 4, 6])
def test_a_round_that_is_cut_off_proves_nothing_wrong(
    seed: int, limit_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = random_instance(seed)
    asked = instance.offers, instance.estimator
    try:
        free = solve(*asked, Goal()).pipelines[0].estimate
        goal = Goal(slo_ttft_s=0.9 * free.ttft_s)
        best = solve(*asked, goal)
        tick(monkeypatch)
        rushed = solve(*asked, goal, time_limit_s=limit_s)
    except Infeasible:
        return
    assert rushed.value <= best.value * (1 + 1e-9)
    assert rushed.bound >= best.value * (1 - 1e-9)


def test_an_arrangement_ends_when_time_is_over() -> None:
    cluster = make_cluster([offer(LARGE, 1, 6)], ESTIMATOR, Goal(slo_ttft_s=1e3))
    rates, limits = cluster.rates, cluster.latency
    assert limits is not None
    boxes = whole(rates, np.zeros(1, dtype=np.int64))
    stages = stage_layers(rates, replace(boxes, high=boxes.low).ranges, boxes.most)
    shares = limits.part_shares(stages.times, boxes.low)[0]
    looks = itertools.count()
    arranger = Arranger(rates, stages, shares, limits.max_share, lambda: next(looks) >= 50)
    with pytest.raises(TimeoutError):
        arranger.best(cluster.counts, cluster.shape_of)
    assert next(looks) == 51
    free = Arranger(rates, stages, shares, limits.max_share)
    assert free.best(cluster.counts, cluster.shape_of) is not None


def test_a_round_that_takes_long_is_cut_off_within_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many classes of machines, costs are taken a few boxes at a time."""
    apart = [offer(LARGE, 1, 2, 1.0 + index / 100) for index in range(40)]
    whole_plan = solve(apart, ESTIMATOR, Goal())
    monkeypatch.setattr(search, "_COSTS_AT_ONCE", 40)
    cluster = make_cluster(apart, ESTIMATOR, Goal())
    asked = itertools.count()
    cut = best_ratio(cluster, cluster.counts, cluster.prices, is_over=lambda: next(asked) > 200)
    assert next(asked) < 230
    assert cut.bound >= whole_plan.value * (1 - 1e-9)
    done = best_ratio(cluster, cluster.counts, cluster.prices)
    assert done.columns[-1].ratio == pytest.approx(whole_plan.value)


def test_the_whole_time_is_used_while_no_limit_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = [offer(SMALL, 4, 3, 4.6), offer(LARGE, 1, 4, 1.9)]
    free = Goal(objective="cost-for-load", load_rps=0.2)
    best = solve(offers, ESTIMATOR, free)
    seconds = tick(monkeypatch)
    solve(offers, ESTIMATOR, free, time_limit_s=1e9)
    needed_s = next(seconds)
    tick(monkeypatch)
    plan = solve(offers, ESTIMATOR, replace(free, slo_ttft_s=1e3), time_limit_s=1.5 * needed_s)
    assert plan.value == pytest.approx(best.value)
    assert plan.gap == 0


def test_a_search_that_was_cut_off_goes_on() -> None:
    offers = [offer(SMALL, 4, 2, 4.6), offer(LARGE, 1, 4, 1.9)]
    cluster = make_cluster(offers, ESTIMATOR, Goal(objective="cost-for-load", load_rps=0.2))
    _, best = Listing(cluster, Clock(time_limit_s=1e9)).run()
    looks = itertools.count()

    class Cut(Clock):
        def is_over(self) -> bool:
            return 4 <= next(looks) < 8

    listing = Listing(cluster, Cut(time_limit_s=1e9))
    listing.columns()
    assert 4 < next(looks) < 8
    while next(looks) < 8:
        pass
    assert listing.run()[1] == best


LARGE_CLUSTER = [offer(SMALL, 4, 9, 4.6), offer(LARGE, 1, 30, 1.9), offer(LARGE, 4, 3, 7.9)]


def test_the_largest_load_of_many_machines_is_met() -> None:
    most = solve(LARGE_CLUSTER, ESTIMATOR, Goal(objective="throughput"))
    goal = Goal(objective="cost-for-load", load_rps=0.9999 * most.value)
    plan = solve(LARGE_CLUSTER, ESTIMATOR, goal)
    assert plan.throughput_rps >= 0.9999 * most.value
    assert plan.bound <= plan.value


def test_a_budget_for_few_of_many_machines_leaves_no_gap() -> None:
    goal = Goal(objective="throughput", max_price_usd_per_hour=12.0)
    plan = solve(LARGE_CLUSTER, ESTIMATOR, goal)
    assert plan.price_usd_per_hour <= 12.0
    assert plan.gap <= 1e-9
    # The same within the machines that so many dollars can rent.
    few = [
        replace(one, count=min(one.count, int(12 / one.price_usd_per_hour)))
        for one in LARGE_CLUSTER
    ]
    assert plan.value == pytest.approx(solve(few, ESTIMATOR, goal).value)


def test_when_time_is_over_and_nothing_was_found_it_says_so() -> None:
    """The model takes machines of two shapes, which only a search puts together."""
    offers = [offer(SMALL, 4, 1), offer(LARGE, 1, 3)]
    assert solve(offers, ESTIMATOR, Goal()).pipelines
    with pytest.raises(OutOfTime, match=r"was found in 0 s; give it a longer time limit"):
        solve(offers, ESTIMATOR, Goal(), time_limit_s=0.0)


def test_equal_ratios_are_taken_as_often_as_machines_allow() -> None:
    plan = solve([offer(LARGE, 1, 60, 1.9)], ESTIMATOR, Goal())
    used = len(plan.pipelines[0].offers)
    assert len(plan.pipelines) == 60 // used >= 2
    assert math.isclose(plan.value, plan.throughput_rps / plan.price_usd_per_hour, rel_tol=1e-9)


def test_a_cap_on_the_price_holds() -> None:
    offers = [offer(SMALL, 4, 3, 4.6), offer(LARGE, 1, 4, 1.9)]
    goal = Goal(objective="throughput", max_price_usd_per_hour=10.0)
    plan = solve(offers, ESTIMATOR, goal)
    assert plan.price_usd_per_hour <= 10.0
    assert plan.bound >= plan.value


@pytest.mark.parametrize("fidelity", [PAPER, CALIBRATED], ids=lambda one: one.name)
def test_a_limit_that_binds_nothing_changes_nothing(fidelity: Fidelity) -> None:
    offers = [offer(SMALL, 4, 3, 4.6), offer(LARGE, 1, 4, 1.9)]
    estimator = replace(ESTIMATOR, fidelity=fidelity)
    free = solve(offers, estimator, Goal())
    goal = Goal(slo_ttft_s=2 * free.pipelines[0].estimate.ttft_s)
    bound = solve(offers, estimator, goal)
    assert (bound.value, bound.gap) == (free.value, 0)
    assert bound.pipelines == free.pipelines
