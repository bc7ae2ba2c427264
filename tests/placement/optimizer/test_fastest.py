"""The shortest latencies, against all pipelines of small clusters."""

from __future__ import annotations

import itertools
import math

import pytest

from placement.estimator import PipelineEstimate
from placement.optimizer.fastest import LATENCIES, shortest_s
from tests.placement.optimizer.brute_force import placements
from tests.placement.optimizer.instances import Instance, random_instance


def all_alone(instance: Instance) -> list[PipelineEstimate]:
    """Every pipeline with one request."""
    estimator = instance.estimator
    return [
        estimator.evaluate(stages, 1)
        for counts in itertools.product(*(range(one.count + 1) for one in instance.offers))
        for machines in [[i for i, count in enumerate(counts) for _ in range(count)]]
        if 0 < len(machines) <= estimator.model.num_layers
        for order in set(itertools.permutations(machines))
        for stages in placements([instance.offers[i].shape for i in order], estimator)
        if estimator.max_batch(stages) >= 1
    ]


@pytest.mark.parametrize("shard", range(4))
def test_no_pipeline_has_shorter_ones(shard: int) -> None:
    num = 0
    for seed in range(40 * shard, 40 * (shard + 1)):
        instance = random_instance(seed)
        estimates = all_alone(instance)
        for latency in LATENCIES:
            least = min((getattr(one, latency[4:]) for one in estimates), default=math.inf)
            found = shortest_s(instance.offers, instance.estimator, latency)
            assert found == pytest.approx(least, rel=1e-9), f"seed {seed}: {latency}"
        num += len(estimates) > 1
    assert num > 20
