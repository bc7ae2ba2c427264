"""What is said to be met can be met, and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from placement.corrections import CALIBRATED
from placement.errors import Unmet
from placement.hardware import Offer
from placement.optimizer import solve
from placement.optimizer.fastest import Latency, shortest_s
from placement.optimizer.nearest import unmet
from placement.plan import Goal, Plan
from tests import plans

ESTIMATES = plans.estimator("meta-llama/Llama-3.2-1B-Instruct")


def offers() -> list[Offer]:
    """Each holds the model; three dollars and six an hour."""
    return [
        plans.offer("g6e.xlarge", 2, price_usd_per_hour=3.0),
        plans.offer("g6.12xlarge", 1, price_usd_per_hour=6.0),
    ]


def solved(goal: Goal, time_limit_s: float = 60.0) -> Plan:
    return solve(offers(), ESTIMATES, goal, time_limit_s=time_limit_s)


def asked(goal: Goal, *, time_limit_s: float = 60.0) -> Unmet:
    with pytest.raises(Unmet):
        solved(goal)
    return unmet(goal, offers(), ESTIMATES, solved, time_limit_s=time_limit_s)


def most_rps(**limits: float) -> float:
    return solved(Goal(objective="throughput", **limits)).value


def test_the_largest_load() -> None:
    goal = Goal(objective="cost-for-load", load_rps=1000.0)
    [(name, load)] = asked(goal).nearest.items()
    assert name == "load_rps"
    assert most_rps() * 0.999 < load <= most_rps()
    assert solved(replace(goal, load_rps=load)).throughput_rps >= load
    with pytest.raises(Unmet):
        solved(replace(goal, load_rps=1.002 * load))


def test_the_largest_load_within_a_price_or_the_price_of_the_load() -> None:
    load = 1.01 * most_rps(max_price_usd_per_hour=6.0)
    goal = Goal(objective="cost-for-load", load_rps=load, max_price_usd_per_hour=6.0)
    error = asked(goal)
    assert error.nearest["load_rps"] == pytest.approx(load / 1.01, rel=1e-3)
    assert error.nearest["max_price_usd_per_hour"] in (9.0, 12.0)
    for name, value in error.nearest.items():
        assert solved(replace(goal, **{name: value})).pipelines
    assert " or max_price_usd_per_hour" in error.message


def test_the_cheapest_price_of_any_fleet() -> None:
    goal = Goal(max_price_usd_per_hour=2.0)
    error = asked(goal)
    assert error.nearest == {"max_price_usd_per_hour": 3.0}
    assert solved(replace(goal, max_price_usd_per_hour=3.0)).price_usd_per_hour == 3.0
    assert error.message == (
        "no fleet of these offers meets the goal; what can be met: max_price_usd_per_hour 3"
    )


def test_a_price_below_every_fleet_is_told_with_that_of_the_load() -> None:
    load = 0.99 * most_rps()
    error = asked(Goal(objective="cost-for-load", load_rps=load, max_price_usd_per_hour=2.0))
    assert error.nearest == {"max_price_usd_per_hour": 12.0}


def test_a_load_above_every_fleet_is_told_within_the_price() -> None:
    error = asked(Goal(objective="cost-for-load", load_rps=1e4, max_price_usd_per_hour=6.0))
    most = most_rps(max_price_usd_per_hour=6.0)
    assert error.nearest == {"load_rps": pytest.approx(most, rel=1e-3)}


@pytest.mark.parametrize("name", ["slo_ttft_s", "slo_tpot_s", "slo_latency_s"])
def test_the_shortest_times(name: str) -> None:
    goal = Goal(objective="throughput-per-dollar", **{name: 1e-4})
    error = asked(goal)
    [value] = error.nearest.values()
    for pipeline in solved(replace(goal, **{name: value})).pipelines:
        assert value * 0.999 <= getattr(pipeline.estimate, name[4:]) <= value
    assert error.message.endswith(f"what can be met: {name} {value:g}")


def test_what_can_be_met_is_told_beside_a_latency_that_cannot() -> None:
    goal = Goal(objective="cost-for-load", load_rps=1000.0, slo_ttft_s=1e-4, slo_latency_s=1e4)
    error = asked(goal)
    assert set(error.nearest) == {"slo_ttft_s", "load_rps"}
    assert error.nearest["load_rps"] == pytest.approx(most_rps(), rel=1e-3)


def test_latencies_that_cannot_be_met_together_are_told_next_to_each_other() -> None:
    """One machine has more FLOPS, the other more bandwidth."""
    machines = [
        plans.offer("g6e.xlarge", 1, price_usd_per_hour=3.0),
        plans.offer("p3.2xlarge", 1, price_usd_per_hour=3.0),
    ]

    def find(goal: Goal, time_limit_s: float = 60.0) -> Plan:
        return solve(machines, ESTIMATES, goal, time_limit_s=time_limit_s)

    names: tuple[Latency, ...] = ("slo_ttft_s", "slo_tpot_s")
    shortest: dict[str, Any] = {
        name: 1.001 * shortest_s(machines, ESTIMATES, name) for name in names
    }
    for name, value in shortest.items():
        assert find(Goal(**{name: value})).pipelines
    goal = Goal(**shortest)
    with pytest.raises(Unmet):
        find(goal)
    error = unmet(goal, machines, ESTIMATES, find, time_limit_s=60)
    assert set(error.nearest) == set(shortest)
    for name, value in error.nearest.items():
        met: dict[str, Any] = {name: value}
        assert find(replace(goal, **met)).pipelines
        missed: dict[str, Any] = {name: value / 1.03}
        with pytest.raises(Unmet):
            find(replace(goal, **missed))
    assert " or slo_tpot_s" in error.message


def test_what_is_not_proven_is_not_said() -> None:
    goal = Goal(objective="cost-for-load", load_rps=1000.0)
    error = unmet(goal, offers(), ESTIMATES, solved, time_limit_s=60, is_proven=False)
    assert error.message.startswith("no fleet of these offers was found that meets the goal")
    assert set(error.nearest) == {"load_rps"}


def test_when_time_is_up_only_what_needs_no_search_is_told() -> None:
    goal = Goal(objective="cost-for-load", load_rps=1000.0, slo_ttft_s=1e-4)
    assert set(asked(goal, time_limit_s=0).nearest) == {"slo_ttft_s"}
    error = asked(replace(goal, slo_ttft_s=None), time_limit_s=0)
    assert error.message == "no fleet of these offers meets the goal"


def test_shares_that_exclude_each_other_are_told_next_to_each_other() -> None:
    """Two of the three machines are in one zone and spot, and the third one can do less."""
    machines = [
        plans.offer("g6e.xlarge", 2, market="spot", zone="a", price_usd_per_hour=1.0),
        plans.offer("g6.xlarge", 1, market="on_demand", zone="b", price_usd_per_hour=3.0),
    ]

    def find(goal: Goal, time_limit_s: float = 60.0) -> Plan:
        return solve(machines, ESTIMATES, goal, time_limit_s=time_limit_s)

    goal = Goal(objective="throughput", on_demand_share=0.7, max_zone_share=0.8)
    with pytest.raises(Unmet):
        find(goal)
    error = unmet(goal, machines, ESTIMATES, find, time_limit_s=60)
    assert set(error.nearest) == {"on_demand_share", "max_zone_share"}
    assert error.nearest["on_demand_share"] < 0.7
    assert error.nearest["max_zone_share"] > 0.8
    for name, value in error.nearest.items():
        met: dict[str, Any] = {name: value}
        assert find(replace(goal, **met)).pipelines


def test_a_load_and_a_price_that_both_cannot_be_met_are_told_together() -> None:
    goal = Goal(objective="cost-for-load", load_rps=1000.0, max_price_usd_per_hour=1.0)
    error = asked(goal)
    assert error.nearest["load_rps"] == pytest.approx(most_rps(), rel=1e-3)
    assert error.nearest["max_price_usd_per_hour"] == 12.0
    assert " and max_price_usd_per_hour" in error.message
    met: dict[str, Any] = dict(error.nearest)
    assert solved(replace(goal, **met)).pipelines


def test_a_latency_is_told_that_carries_the_load() -> None:
    """The shortest one is that of a single request."""
    estimates = replace(ESTIMATES, fidelity=CALIBRATED)

    def find(goal: Goal, time_limit_s: float = 60.0) -> Plan:
        return solve(offers(), estimates, goal, time_limit_s=time_limit_s)

    alone = shortest_s(offers(), estimates, "slo_latency_s")
    load = 0.5 * find(Goal(objective="throughput")).value
    goal = Goal(objective="cost-for-load", load_rps=load, slo_latency_s=alone / 2)
    error = unmet(goal, offers(), estimates, find, time_limit_s=60)
    assert set(error.nearest) == {"slo_latency_s"}
    value = error.nearest["slo_latency_s"]
    assert value > 1.05 * alone
    assert find(replace(goal, slo_latency_s=value)).throughput_rps >= load
    with pytest.raises(Unmet):
        find(replace(goal, slo_latency_s=value / 1.05))


def test_a_price_below_every_machine_is_ruled_out_at_once() -> None:
    goal = Goal(objective="throughput", max_price_usd_per_hour=2.0)
    with pytest.raises(Unmet):
        solved(goal, time_limit_s=0.0)
