"""Steps pass the stages in order, one at each stage, as many under way as there are stages."""

from __future__ import annotations

import math

import pytest

from placement.simulator.batching import ContinuousBatcher
from placement.simulator.step_pipeline import StepPipeline
from placement.simulator.step_time import LinearStepTime


def pipeline(*stage_s: float, **options: int) -> StepPipeline:
    limits = {"num_blocks": 100, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 4}
    batcher = ContinuousBatcher(**{**limits, **options})
    return StepPipeline(batcher, [LinearStepTime(base_s=seconds) for seconds in stage_s])


def add(steps: StepPipeline, num: int, num_tokens: int = 4) -> None:
    """Prompts that each fill a step."""
    for index in range(num):
        steps.batcher.add(str(index), [0] * num_tokens)


def test_nothing_is_due_without_work() -> None:
    steps = pipeline(1.0)
    steps.begin(0.0)
    assert steps.due_s == math.inf
    assert steps.take_due(1e9) is None


def test_steps_wait_for_the_one_before_at_the_slow_stage() -> None:
    steps = pipeline(1.0, 3.0, 1.0)
    add(steps, 5)
    steps.begin(0.0)
    assert steps.num_under_way == 3
    due = []
    while steps.due_s < math.inf:
        now = steps.due_s
        assert steps.take_due(now - 1e-9) is None
        step = steps.take_due(now)
        assert step is not None
        for sequence in steps.batcher.complete(step):
            steps.batcher.finish(sequence)
        due.append(now)
        steps.begin(now)
    # The fourth begins when the first is out: it finds the second stage busy until 10 s.
    assert due == [5.0, 8.0, 11.0, 14.0, 17.0]
    assert steps.busy_s == [5.0, 15.0, 5.0]


def test_speed_counts_for_steps_that_begin() -> None:
    steps = pipeline(2.0, 2.0)
    add(steps, 2)
    steps.speed = 2.0
    steps.begin(0.0)
    assert steps.due_s == 2.0


def test_without_stages_there_is_no_pipeline() -> None:
    with pytest.raises(ValueError, match="stages must not be empty"):
        pipeline()
