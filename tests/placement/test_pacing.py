"""The pace of a pipeline, against the recursion that it stands for."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from placement.pacing import pace
from placement.workload import Workload

WORKLOAD = Workload(input_tokens=763, output_tokens=232)


ROOM = 2.7  # prompts in a step, as 2,048 tokens are


def times_counted(prompts_per_step: float, depth: int, *, num_steps: int = 20_000) -> float:
    """How often a prompt counts in the recursion, if prompts come at random.

    Their lengths vary as in the Azure trace (standard deviation 0.58 of the mean).
    """
    rng = np.random.default_rng(1)
    free_at = [0.0] * depth
    ends: deque[float] = deque([0.0] * depth, maxlen=depth)
    waiting = total = 0.0
    for num in rng.poisson(prompts_per_step, num_steps):
        waiting += rng.gamma(3.0, 1 / 3, num).sum()
        step = min(waiting, ROOM)
        waiting -= step
        total += step
        at = ends[0]
        for stage in range(depth):
            at = max(at, free_at[stage]) + step
            free_at[stage] = at
        ends.append(at)
    return ends[-1] / total


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("prompts_per_step", [0.05, 0.2, 0.6, 1.2])
def test_prompts_count_as_in_the_recursion(prompts_per_step: float, depth: int) -> None:
    group = prompts_per_step * WORKLOAD.output_tokens
    budget = round(group + ROOM * WORKLOAD.input_tokens)
    found = pace(np.array([depth * group]), depth, WORKLOAD, budget)
    counted = float((found.num_mixed * found.num_prompts)[0]) / prompts_per_step
    assert counted == pytest.approx(times_counted(prompts_per_step, depth), rel=0.05)


def test_no_prompt_is_lost_without_a_pipeline() -> None:
    batch = np.array([1.0, 50.0, 1000.0])
    for budget in (512, 2048, 100_000):
        found = pace(batch, 1, WORKLOAD, budget)
        assert found.num_mixed * found.num_prompts * 232 == pytest.approx(batch)


def test_steps_hold_no_more_than_their_budget() -> None:
    found = pace(np.array([900.0]), 2, WORKLOAD, 1024)
    assert found.num_prompts[0] * 763 == pytest.approx(1024 - 450)
    # 1.94 prompts a step, of which 0.75 fit: more than each step is mixed, and none waits for more.
    assert found.share_mixed[0] == pytest.approx(found.num_mixed[0])
    assert found.share_mixed[0] > 1


def test_a_prompt_never_counts_less_than_once_or_more_than_at_each_stage() -> None:
    rng = random.Random(1)
    for _ in range(200):
        depth = rng.randint(1, 16)
        batch = np.array([rng.uniform(1, 2000)])
        found = pace(batch, depth, WORKLOAD, rng.randint(1, 8192))
        times = found.num_mixed / found.share_mixed
        assert 1 - 1e-12 <= times[0] <= depth + 1e-12
