"""What an explanation asks of the optimizer, and what it makes of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from placement import optimizer
from placement.errors import Infeasible, OutOfTime
from placement.estimator import Estimator
from placement.explanation import Explanation, binding, explain, num_used
from placement.hardware import Offer
from placement.plan import Goal, Plan
from tests import plans

ESTIMATOR = plans.estimator()
L4 = plans.offer("g6.12xlarge", 2)
L40S = plans.offer("g6e.12xlarge", 1)


def by_price(
    offers: Sequence[Offer], /, *, time_limit_s: float = 60.0, goal: Goal | None = None
) -> Plan:
    """As many pipelines of whole machines as there are, of the offer with the best ratio."""
    assert time_limit_s > 0
    whole = [(one, plans.pipeline(ESTIMATOR, (one, 4, 64, 0))) for one in offers]
    if not whole:
        raise Infeasible("nothing")
    best, pipeline = max(
        whole, key=lambda each: each[1].estimate.throughput_rps / each[0].price_usd_per_hour
    )
    return plans.plan(*[pipeline] * best.count, goal=goal)


def test_machines_are_counted_by_what_they_are_rented_as() -> None:
    plan = by_price([replace(L4, price_usd_per_hour=0.1), L40S])
    assert num_used(plan, replace(L4, price_usd_per_hour=0.1, count=9)) == 2
    assert num_used(plan, L4) == 0


def test_more_and_less_of_each_offer_and_the_price_of_entry() -> None:
    offers = [L4, L40S]
    plan = by_price(offers)
    used, unused = (L4, L40S) if num_used(plan, L4) else (L40S, L4)
    found = explain(plan, offers, ESTIMATOR, by_price)
    assert found.is_whole
    assert {change.offer for change in found.one_more} == {L4, L40S}
    assert [change.offer for change in found.one_less] == [used]
    [entry] = found.entry_prices
    assert entry.offer == unused
    assert entry.price_usd_per_hour is not None
    ratio = {
        one: plans.pipeline(ESTIMATOR, (one, 4, 64, 0)).estimate.throughput_rps for one in offers
    }
    exact = ratio[unused] / ratio[used] * used.price_usd_per_hour
    assert entry.price_usd_per_hour == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(
    "goal",
    [
        Goal(),
        Goal(objective="cost-for-load", load_rps=1.0),
        Goal(max_price_usd_per_hour=5.0),
    ],
)
def test_an_unused_offer_is_rented_just_below_its_price_of_entry_and_not_above(goal: Goal) -> None:
    offers = [
        plans.offer("g6.12xlarge", 1),
        plans.offer("g5.12xlarge", 2, price_usd_per_hour=20.0),
    ]

    def solve(those: Sequence[Offer], /, *, time_limit_s: float = 60.0) -> Plan:
        return optimizer.solve(those, ESTIMATOR, goal, time_limit_s=time_limit_s)

    plan = solve(offers)
    [entry] = explain(plan, offers, ESTIMATOR, solve).entry_prices
    assert entry.price_usd_per_hour is not None

    def is_rented_at(share: float) -> bool:
        price = entry.price_usd_per_hour
        assert price is not None
        offer = replace(entry.offer, price_usd_per_hour=price * share)
        return num_used(solve([*(one for one in offers if one != entry.offer), offer]), offer) > 0

    assert is_rented_at(0.999)
    assert not is_rented_at(1.001)


def test_gains_count_for_the_better() -> None:
    goal = Goal(objective="cost-for-load", load_rps=1.0)

    def cheapest(offers: Sequence[Offer], /, *, time_limit_s: float = 60.0) -> Plan:
        del time_limit_s
        one = min(offers, key=lambda offer: offer.price_usd_per_hour)
        return plans.plan(plans.pipeline(ESTIMATOR, (one, 4, 64, 0)), goal=goal)

    only = replace(L4, count=1)
    found = explain(cheapest([only, L40S]), [only, L40S], ESTIMATOR, cheapest)
    [change] = found.one_less
    assert change.offer == only
    assert change.gain == pytest.approx(1 - L40S.price_usd_per_hour / L4.price_usd_per_hour)


def test_without_the_only_machine_nothing_fits() -> None:
    only = [replace(L4, count=1)]
    found = explain(by_price(only), only, ESTIMATOR, by_price)
    assert [change.plan for change in found.one_less] == [None]
    assert found.entry_prices == ()


def test_throughput_alone_has_no_price_of_entry() -> None:
    goal = Goal(objective="throughput")

    def solve(offers: Sequence[Offer], /, *, time_limit_s: float = 60.0) -> Plan:
        return by_price(offers, time_limit_s=time_limit_s, goal=goal)

    assert explain(solve([L4, L40S]), [L4, L40S], ESTIMATOR, solve).entry_prices == ()


class Searching:
    """A clock, and a search that takes its time of it."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now_s = seconds, 0.0
        self.limits: list[float] = []

    def solve(self, offers: Sequence[Offer], /, *, time_limit_s: float) -> Plan:
        self.limits.append(time_limit_s)
        self.now_s += min(self.seconds, time_limit_s + 1)
        if self.seconds > time_limit_s:
            raise OutOfTime("it takes longer")
        return by_price(offers)


def explained(searching: Searching, time_limit_s: float) -> Explanation:
    return explain(
        by_price([L4, L40S]),
        [L4, L40S],
        ESTIMATOR,
        searching.solve,
        time_limit_s=time_limit_s,
        now_s=lambda: searching.now_s,
    )


def test_each_kind_of_question_has_its_share_of_the_time() -> None:
    """Five questions of a second: one less, two more, two for a price."""
    whole = explained(Searching(1.0), 30.0)
    assert whole.is_whole
    found = explained(searching := Searching(1.0), 12.0)
    assert searching.limits[:3] == [4.0, 7.0, 6.0]
    assert found.is_whole
    # 1.5 s each: what was left for the price is told to be too little.
    found = explained(Searching(1.0), 4.5)
    assert (len(found.one_less), len(found.one_more), found.entry_prices) == (1, 2, ())
    assert found.left_out == {
        "one_less": (),
        "one_more": (),
        "entry_prices": (whole.entry_prices[0].offer,),
    }


def test_answers_that_take_too_long_are_none_and_do_not_count_as_nothing_fits() -> None:
    found = explained(searching := Searching(5.0), 6.0)
    assert (found.one_less, found.one_more, found.entry_prices) == ((), (), ())
    assert {name: len(those) for name, those in found.left_out.items()} == {
        "one_less": 1,
        "one_more": 2,
        "entry_prices": 1,
    }
    assert searching.now_s < 9.0


def test_what_binds_a_pipeline() -> None:
    l40s = plans.offer("g6e.xlarge", 2)
    uneven = plans.pipeline(ESTIMATOR, (l40s, 1, 35, 0), (l40s, 1, 29, 1))
    found = binding(uneven, ESTIMATOR, Goal())
    assert (found.batch_limit, found.memory_stage, found.prefill_stage) == ("memory", 0, 0)
    small = plans.pipeline(ESTIMATOR, (L4, 4, 64, 0), batch=3)
    assert binding(small, ESTIMATOR, Goal(slo_ttft_s=1.0)).batch_limit == "slo"
    capped = Estimator(
        model=ESTIMATOR.model,
        workload=ESTIMATOR.workload,
        fidelity=replace(ESTIMATOR.fidelity, max_batch=5),
    )
    assert binding(plans.pipeline(capped, (L4, 4, 64, 0)), capped, Goal()).batch_limit == "engine"
