"""What pipelines are seen to do, and what follows: limits of silence, sub-nodes, weights."""

from __future__ import annotations

import pytest

from spot.failover_policy import FailoverPolicy
from spot.fleet_records import Live, Pipeline
from spot.generation import Generation, SamplingParams
from spot.pace import ThroughputWatch, boundary_after, observe_tokens, stall_limit_s, why_stalled

POLICY = FailoverPolicy()
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)


def seated(pipeline: Pipeline, num_prompt_tokens: int, now_s: float = 0.0) -> Live:
    live = Live(Generation(f"g{len(pipeline.legs)}", [1] * num_prompt_tokens, GREEDY), 1)
    pipeline.seat(live, now_s)
    return live


def test_long_prompts_may_take_their_time() -> None:
    pipeline = Pipeline("p")
    before_s = stall_limit_s(pipeline, POLICY)
    seated(pipeline, 4000)
    assert stall_limit_s(pipeline, POLICY) > before_s + 30


def test_a_pipeline_that_reads_prompts_fast_is_given_less_time() -> None:
    pipeline = Pipeline("p")
    live = seated(pipeline, 4000)
    before_s = stall_limit_s(pipeline, POLICY)
    observe_tokens(live, pipeline, 1, 0.5)
    assert pipeline.prefill_tokens_per_s == 8000
    assert stall_limit_s(pipeline, POLICY) < before_s / 2


def test_slow_steps_allow_for_longer_silence() -> None:
    pipeline = Pipeline("p")
    live = seated(pipeline, 10)
    observe_tokens(live, pipeline, 1, 0.5)
    live.num_leg_tokens, live.progress_s = 1, 0.5
    before_s = stall_limit_s(pipeline, POLICY)
    observe_tokens(live, pipeline, 2, 1.5)
    assert pipeline.step_s == 0.5
    assert stall_limit_s(pipeline, POLICY) == before_s + 0.5 * POLICY.stall_steps


def test_only_a_pipeline_that_owes_tokens_stalls() -> None:
    pipeline = Pipeline("p")
    assert why_stalled(pipeline, POLICY, 1e6) is None
    seated(pipeline, 10, now_s=1e6)
    limit_s = stall_limit_s(pipeline, POLICY)
    assert why_stalled(pipeline, POLICY, 1e6 + limit_s - 0.1) is None
    reason = why_stalled(pipeline, POLICY, 1e6 + limit_s + 0.1)
    assert reason is not None
    assert f"limit {limit_s:.1f} s" in reason


@pytest.mark.parametrize(
    ("subnode_tokens", "num_prompt", "num_output", "boundary"),
    [
        (16, 10, 1, 6),  # the block that ends at 16 tokens
        (16, 16, 1, 16),
        (3, 10, 1, 4),  # shorter than a block: not aligned
        (None, 0, 1, 16),  # half a second at the assumed 20 ms a step, on a block's end
    ],
)
def test_a_subnode_ends_on_a_block_where_it_can(
    subnode_tokens: int | None, num_prompt: int, num_output: int, boundary: int
) -> None:
    live = Live(Generation("g", [1] * num_prompt, GREEDY), 1, output=[7] * num_output)
    policy = FailoverPolicy(subnode_tokens=subnode_tokens)
    assert boundary_after(live, Pipeline("p", block_size=16), policy) == boundary


def test_weights_follow_what_full_pipelines_do() -> None:
    pipelines = [Pipeline(name, num_seats=1) for name in ("fast", "slow", "idle")]
    fast, slow, idle = pipelines
    seated(fast, 1)
    seated(slow, 1)
    watch = ThroughputWatch()
    for second in range(30):
        fast.num_tokens += 20
        slow.num_tokens += 10
        watch.count(pipelines, float(second))
    assert fast.correction / slow.correction == pytest.approx(2.0, rel=0.1)
    assert idle.correction == 1.0
    assert fast.tokens_per_s == pytest.approx(20, rel=0.1)


def test_counting_more_often_than_once_a_second_changes_nothing() -> None:
    pipeline, watch = Pipeline("p"), ThroughputWatch()
    watch.count([pipeline], 0.0)
    pipeline.num_tokens = 100
    watch.count([pipeline], 0.9)
    assert pipeline.tokens_per_s == 0.0
