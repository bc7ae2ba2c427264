"""Bounds of times for ranges of batches and depths are never above the times."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.placement_clusters import MODELS, cluster_24
from placement.corrections import CALIBRATED
from placement.estimator import PAPER, Estimator, Fidelity
from placement.model import ModelSpec
from placement.model_catalogue import find_model
from placement.optimizer.bounded import Bounded, bound_rates
from placement.optimizer.rates import Ranges, layer_limits, point_times
from placement.workload import Workload, find_workload

SHAPES = [offer.shape for offer in cluster_24()]
MAX_DEPTH = 24
CONTINUOUS = replace(PAPER, name="continuous", reading="continuous")
WORKLOADS = [find_workload("azure-conv"), Workload(input_tokens=3000, output_tokens=20)]


def bounded(model: ModelSpec, fidelity: Fidelity, workload: Workload) -> Bounded:
    estimator = Estimator(model=model, workload=workload, fidelity=fidelity)
    return bound_rates(estimator, SHAPES, layer_limits(estimator, SHAPES), MAX_DEPTH)


def random_ranges(dice: random.Random, max_batch: int, num: int) -> Ranges:
    """Of all widths, single batches and depths among them."""
    ends = [
        [sorted((dice.randint(1, most), dice.randint(1, most))) for _ in range(num)]
        for most in (max_batch, MAX_DEPTH)
    ]
    (low, high), (shallow, deep) = (np.array(one).T for one in ends)
    width, few = (np.array([dice.choice([0, 1, 5, 2000]) for _ in range(num)]) for _ in range(2))
    return Ranges(
        low=low,
        high=np.minimum(high, low + width),
        shallow=shallow,
        deep=np.minimum(deep, shallow + few),
    )


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one.name)
@pytest.mark.parametrize("fidelity", [CALIBRATED, CONTINUOUS], ids=lambda one: one.name)
@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-32B",
        "google/gemma-3-27b-it",
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        "deepseek-ai/DeepSeek-V2-Lite-Chat",
    ],
)
def test_no_time_of_a_range_is_below_its_bound(
    name: str, fidelity: Fidelity, workload: Workload
) -> None:
    model = find_model(name)
    assert model is not None
    rates = bounded(model, fidelity, workload)
    dice = random.Random(1)
    ranges = random_ranges(dice, rates.max_batch, 200)
    bounds, most = rates.least_times(ranges), rates.most_times()
    for _ in range(20):
        batch, depth = (
            np.array([dice.randint(*ends) for ends in zip(low, high, strict=True)])
            for low, high in (
                (ranges.low.tolist(), ranges.high.tolist()),
                (ranges.shallow.tolist(), ranges.deep.tolist()),
            )
        )
        times = point_times(rates.estimator, rates.shapes, rates.tps, batch, depth)
        assert (bounds <= times).all()
        finite = np.where(np.isfinite(times), times, 0.0)
        assert (model.num_layers * finite[:, 0, 0] <= most[0]).all()


def test_bounds_of_one_batch_and_depth_are_close() -> None:
    rates = bounded(MODELS["Qwen3-32B"], CALIBRATED, WORKLOADS[0])
    batch, depth = (axis.ravel() for axis in np.meshgrid([1, 7, 60, 300, 900], [1, 2, 5, 16]))
    known = Ranges(low=batch, high=batch, shallow=depth, deep=depth)
    times = point_times(rates.estimator, rates.shapes, rates.tps, batch, depth)
    is_kind = np.isfinite(times)
    share = rates.least_times(known)[is_kind] / np.maximum(times[is_kind], 1e-300)
    assert np.median(share) > 0.95


def test_what_was_loaded_is_exact_and_the_rest_is_not() -> None:
    rates = bounded(MODELS["Qwen3-32B"], CALIBRATED, WORKLOADS[0])
    ranges = Ranges(
        low=np.array([5, 512, 64]),
        high=np.array([5, 527, 65]),
        shallow=np.array([3, 4, 9]),
        deep=np.array([3, 4, 10]),
    )
    assert not rates.is_exact(ranges).any()
    assert rates.can_load(ranges).tolist() == [True, True, False]
    rates.load(ranges.take(np.array([0, 1])))
    assert rates.is_exact(ranges).tolist() == [True, True, False]
    batches = np.arange(512, 528)
    times = point_times(rates.estimator, rates.shapes, rates.tps, batches, np.full_like(batches, 4))
    assert (rates.least_times(ranges)[1] == times.min(axis=0)).all()
