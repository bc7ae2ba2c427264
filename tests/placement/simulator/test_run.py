"""Requests through a simulated pipeline take the time that their steps take."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.simulator.run import SimulatedRequest, simulate
from placement.simulator.simulated_pipeline import SimulatedPipeline
from placement.simulator.step_time import LinearStepTime

STEP = LinearStepTime(base_s=1.0, per_prefill_token_s=0.1)


def pipeline(*stages: LinearStepTime, **options: int) -> SimulatedPipeline:
    limits = {"num_kv_blocks": 1000, "max_num_seqs": 8}
    return SimulatedPipeline(stages=stages or (STEP,), **{**limits, **options})


def test_one_request_takes_its_prompt_and_its_tokens() -> None:
    found = simulate(pipeline(), [SimulatedRequest(5.0, 10, 4)])
    (times,) = found.requests
    assert times.ttft_s == pytest.approx(2.0)
    assert times.tpot_s == pytest.approx(1.0)
    assert times.latency_s == pytest.approx(5.0)
    assert found.makespan_s == pytest.approx(5.0)
    assert found.busy_shares == pytest.approx([1.0])
    assert found.num_steps == 4


def test_one_token_has_no_time_between() -> None:
    (times,) = simulate(pipeline(), [SimulatedRequest(0.0, 10, 1)]).requests
    assert times.tpot_s is None
    assert times.first_token_s == times.end_s


def test_who_finds_no_seat_waits() -> None:
    found = simulate(pipeline(max_num_seqs=1), [SimulatedRequest(0.0, 10, 4)] * 3)
    assert [times.end_s for times in found.requests] == pytest.approx([5.0, 10.0, 15.0])
    assert found.throughput_rps == pytest.approx(3 / 15)
    # The last one got its seat when the second had ended.
    assert found.backlog_s == pytest.approx(9.0, abs=1.0)
    assert found.mean_running == pytest.approx(1.0)


def test_an_idle_pipeline_waits_for_arrivals_in_any_order() -> None:
    requests = [SimulatedRequest(at, 10, 2) for at in (100.0, 0.0, 50.0)]
    found = simulate(pipeline(), requests)
    assert [times.request.arrival_s for times in found.requests] == [0.0, 50.0, 100.0]
    assert [times.latency_s for times in found.requests] == pytest.approx([3.0] * 3)


def test_two_stages_serve_two_groups_at_once() -> None:
    step = LinearStepTime(base_s=1.0)
    requests = [SimulatedRequest(0.0, 2048, 50)] * 2
    found = simulate(pipeline(step, step), requests)
    assert found.makespan_s == pytest.approx(2 * 50 + 1)
    assert min(found.busy_shares) > 0.98


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        simulate(pipeline(num_kv_blocks=2), [SimulatedRequest(0.0, 30, 3)])
    with pytest.raises(ValueError, match="needs tokens"):
        simulate(pipeline(), [SimulatedRequest(0.0, 0, 3)])


def test_without_requests_nothing_happens() -> None:
    found = simulate(pipeline(), [])
    assert found.requests == ()
    assert math.isnan(found.saturated_rps())


@given(
    st.lists(
        st.builds(
            SimulatedRequest,
            st.floats(0, 100),
            st.integers(1, 60),
            st.integers(1, 40),
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 4),
    st.integers(7, 30),
)
def test_everyone_gets_all_tokens_in_time(
    requests: list[SimulatedRequest], num_stages: int, num_blocks: int
) -> None:
    stages = [STEP] * num_stages
    found = simulate(
        pipeline(*stages, num_kv_blocks=num_blocks, max_num_batched_tokens=16), requests
    )
    assert len(found.requests) == len(requests)
    for times in found.requests:
        fastest_s = num_stages * STEP.base_s
        assert times.ttft_s >= fastest_s - 1e-9
        assert times.latency_s >= times.request.output_tokens * fastest_s - 1e-6
    assert max(found.busy_shares) <= 1 + 1e-9
