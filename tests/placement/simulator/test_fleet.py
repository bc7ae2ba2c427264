"""A fleet shares out requests by weight, and is the sum of its pipelines."""

from __future__ import annotations

import pytest

from placement.errors import Infeasible
from placement.estimator import Estimator, Fidelity, Stage
from placement.hardware import Gpu, Link, Offer, Shape
from placement.plan import PlannedPipeline
from placement.roofline import EngineTraits
from placement.simulator.fleet import share_out, simulate_fleet
from placement.simulator.run import SimulatedRequest, simulate
from placement.simulator.simulated_pipeline import num_kv_tokens, simulated_pipeline
from placement.workload import Workload
from tests.placement.simulator.test_stage_time import MODEL

GPU = Gpu(name="gpu", memory_bytes=2e9, flops=50e12, bandwidth=250e9)
LINK = Link(latency_s=1e-5, bandwidth=1e10)
BOX = Shape(name="box", gpu=GPU, num_gpus=4, intra=LINK, inter=LINK)
JUDGE = Estimator(
    model=MODEL,
    workload=Workload(input_tokens=100, output_tokens=50),
    fidelity=Fidelity(
        name="t",
        reading="continuous",
        traits=EngineTraits(),
        max_tokens_per_pass=2048,
        max_batch=64,
    ),
)
REQUESTS = [SimulatedRequest(0.0, 60 + index % 80, 20 + index % 60) for index in range(600)]


def planned(*stages: Stage) -> PlannedPipeline:
    offer = Offer(shape=BOX, count=1, price_usd_per_hour=1.0)
    return PlannedPipeline(stages=stages, offers=(offer,), estimate=JUDGE.evaluate(stages))


ONE = planned(Stage(shape=BOX, tp=4, num_layers=8, node=0))
TWO = planned(
    Stage(shape=BOX, tp=1, num_layers=4, node=0), Stage(shape=BOX, tp=1, num_layers=4, node=0)
)


def test_shares_follow_the_weights() -> None:
    queues = share_out(REQUESTS, [3.0, 1.0, 2.0])
    assert [len(queue) for queue in queues] == [300, 100, 200]
    # At any time, not only in the end.
    assert len([one for one in REQUESTS[:6] if one in queues[0]]) >= 3
    with pytest.raises(ValueError, match="positive"):
        share_out(REQUESTS, [1.0, 0.0])


def test_a_fleet_is_the_sum_of_its_pipelines() -> None:
    found = simulate_fleet(JUDGE, [ONE, TWO], REQUESTS)
    assert len(found.requests) == len(REQUESTS)
    assert found.saturated_rps() == sum(one.saturated_rps() for one in found.pipelines)
    assert found.makespan_s == max(one.makespan_s for one in found.pipelines)
    assert found.throughput_rps == len(REQUESTS) / found.makespan_s


def test_seats_are_those_of_the_estimate() -> None:
    assert simulated_pipeline(JUDGE, ONE.stages).max_num_seqs == ONE.estimate.batch == 64
    found = simulate_fleet(JUDGE, [ONE], REQUESTS)
    assert found.pipelines[0].mean_running <= 64


def test_the_estimate_is_near_the_simulation() -> None:
    for one in (ONE, TWO):
        found = simulate(simulated_pipeline(JUDGE, one.stages), REQUESTS)
        assert one.estimate.throughput_rps == pytest.approx(found.saturated_rps(), rel=0.2)


def test_kv_space_is_that_of_the_fullest_stage() -> None:
    tight = [
        Stage(shape=BOX, tp=1, num_layers=7, node=0),
        Stage(shape=BOX, tp=1, num_layers=1, node=0),
    ]
    free = JUDGE.stage_memory(tight[0].kind).available - JUDGE.weight_bytes(
        tight[0].kind, 7, is_first=True, is_last=False
    )
    assert num_kv_tokens(JUDGE, tight) == pytest.approx(free / (7 * 2 * 4 * 64 * 2))


def test_a_pipeline_without_room_is_infeasible() -> None:
    small = Shape(
        name="small",
        gpu=Gpu(name="g", memory_bytes=1e8, flops=1e12, bandwidth=1e11),
        num_gpus=1,
        intra=LINK,
        inter=LINK,
    )
    with pytest.raises(Infeasible, match="no room"):
        simulated_pipeline(JUDGE, [Stage(shape=small, tp=1, num_layers=8, node=0)])


def test_more_of_them_waiting_take_longer() -> None:
    few = simulate_fleet(JUDGE, [TWO], REQUESTS[:50])
    many = simulate_fleet(JUDGE, [TWO], REQUESTS)
    assert many.makespan_s > few.makespan_s
