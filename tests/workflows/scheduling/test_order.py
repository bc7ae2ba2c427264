"""Properties of the order: free of units, and no wait without bound."""

from __future__ import annotations

import random
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.workflows.scheduling.world import World, node
from workflows.scheduling.costs import Cost, FixedCosts
from workflows.scheduling.messages import DispatchProgressed, PlannedNode, Size
from workflows.scheduling.parameters import PolicyName, SchedulerParameters

KINDS = ("llm", "embed")


def order(
    seed: int,
    *,
    time_unit: float = 1.0,
    size_unit: float = 1.0,
    policy: PolicyName = "hera",
    num_runs: int = 40,
) -> list[str]:
    """What starts in which order, where times are told in another unit, or sizes."""
    rng = random.Random(seed)
    costs = FixedCosts(
        {
            "llm": Cost(
                overhead_s=0.1 * time_unit,
                per_output_s=0.02 * time_unit / size_unit,
                per_input_s=0.001 * time_unit / size_unit,
            ),
            "embed": Cost(overhead_s=0.05 * time_unit, per_output_s=0.01 * time_unit / size_unit),
        }
    )
    world = World(SchedulerParameters(policy=policy), costs)
    for kind in KINDS:
        world.capacity(kind, 2, max_batch=4 if kind == "embed" else 1)
    for index in range(num_runs):
        world.now_s += rng.expovariate(2.0) * time_unit
        run = f"r{index}"
        sizes = [rng.lognormvariate(4.0, 1.0) * size_unit for _ in range(3)]
        nodes = tuple(
            PlannedNode(
                id=f"n{i}",
                profile=KINDS[i % 2],
                size=Size(size, 10 * size),
                resource=KINDS[i % 2],
                children=("n2",) if i < 2 else (),
            )
            for i, size in enumerate(sizes)
        )
        deadline_s = world.now_s + rng.uniform(1, 500) * time_unit
        world.run(run, *nodes, tenant=rng.choice("ab"), deadline_s=deadline_s)
        for one in nodes:
            world.ready(
                run, one.id, one.size.outputs, resource=one.resource, priority=rng.choice((0, 1))
            )
        for _ in range(rng.randrange(4)):
            dispatch = world.running[rng.choice(sorted(world.running))]
            if rng.random() < 0.3:
                event = DispatchProgressed(
                    dispatch_id=dispatch.id, service_s=rng.random() * time_unit, done=rng.random()
                )
                world.handle(event)
            else:
                world.finish(dispatch, rng.uniform(0.5, 4.0) * time_unit)
            if not world.running:
                break
    return world.log


@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(
    seed=st.integers(0, 10_000),
    time_power=st.integers(-20, 20),
    size_power=st.integers(-20, 20),
)
def test_the_order_does_not_depend_on_units(seed: int, time_power: int, size_power: int) -> None:
    # Powers of two: the same numbers but for the exponent, so that no rounding breaks a tie.
    changed = order(seed, time_unit=2.0**time_power, size_unit=2.0**size_power)
    assert changed == order(seed)


@pytest.mark.parametrize("unit", [1000.0, 1e-3, 60.0])
def test_the_order_is_the_same_in_milliseconds_and_characters(unit: float) -> None:
    assert order(7, time_unit=unit, size_unit=4.0) == order(7)


def passed_over(parameters: SchedulerParameters, *, num_arrivals: int, work_s: float) -> float:
    """How far behind a victim's arrival the latest run arrived that went before it, in seconds.

    The adversary sends the best runs there are, each as soon as a slot comes free: tiny, wanted by
    many, urgent by declaration and by deadline. The victim is a long run of the worst kind.
    """
    world = World(parameters)
    world.capacity("llm", 1)
    for index in range(20):
        world.single(f"usual{index}", 1.0)
    while world.running:
        world.now_s += 1.0
        world.finish(world.running[min(world.running)], 1.0)
        for name in [name for name in world.scheduler._book.runs if name.startswith("usual")]:
            if not world.scheduler._book.runs[name].tickets:
                world.end(name)
    world.single("holder", 1.0)
    arrived_s = world.now_s
    children = tuple(f"c{i}" for i in range(30))
    world.run("victim", node("n", 50.0), node("rest", 1000.0))
    world.ready("victim", "n", 50.0, priority=10)
    latest_s = arrived_s
    for index in range(num_arrivals):
        name = f"evil{index}"
        world.run(
            name,
            node("n", 0.001, children=children),
            *(node(child, 0.02) for child in children),
            deadline_s=world.now_s + 0.5,
        )
        world.ready(name, "n", 0.001, priority=-10)
        if not world.running:
            break
        arrivals_s = world.scheduler._book.runs[name].arrived_s
        world.now_s += work_s
        world.finish(world.running[min(world.running)], work_s)
        started = world.log[-1] if world.log else ""
        if started == "victim.n":
            return latest_s - arrived_s
        latest_s = max(latest_s, arrivals_s)
    return float("inf")


@pytest.mark.parametrize("ageing", [0.0, 0.5, 2.0])
def test_waiting_is_bounded_whatever_arrives(ageing: float) -> None:
    parameters = replace(
        SchedulerParameters(), ageing=ageing, reserved_share=0.0, min_long_sample=10_000
    )
    horizon_s = ageing * parameters.max_score * 1.0  # the median run takes a second
    late_s = passed_over(parameters, num_arrivals=800, work_s=0.1)
    # The slot that comes free may be given just before the bound: one arrival more.
    assert late_s <= 2 * horizon_s + 0.2


def test_srtf_alone_starves_the_long_run() -> None:
    parameters = SchedulerParameters(policy="srtf")
    assert passed_over(parameters, num_arrivals=500, work_s=0.1) == float("inf")


def test_the_reservation_shortens_the_wait_of_long_runs() -> None:
    parameters = SchedulerParameters(ageing=1000.0, min_long_sample=2)
    assert passed_over(parameters, num_arrivals=500, work_s=0.1) < 10.0


def test_first_come_first_served_without_ageing_horizon() -> None:
    world = World(SchedulerParameters(ageing=0.0, reserved_share=0.0))
    world.capacity("llm", 1)
    rng = random.Random(3)
    for index in range(50):
        world.now_s += 1.0
        world.single(f"r{index}", rng.uniform(0.1, 100.0))
    world.drain()
    assert [name.partition(".")[0] for name in world.log] == [f"r{index}" for index in range(50)]
