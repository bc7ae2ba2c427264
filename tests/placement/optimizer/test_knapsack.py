"""The cheapest machines are those that trying all sets of them finds."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from placement.estimator import PAPER, Estimator
from placement.hardware import Gpu, Link, Shape
from placement.model import ModelSpec
from placement.optimizer.boxes import whole
from placement.optimizer.capacity import stage_layers
from placement.optimizer.fixed import FixedMachines
from placement.optimizer.knapsack import CheapestMachines
from placement.optimizer.rates import ANY_DEPTH, Ranges, layer_limits, tabulate
from placement.workload import Workload

MODEL = ModelSpec(
    name="tiny",
    num_layers=14,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    vocab_size=500,
)
NUM_BOXES = 60


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("depth", [ANY_DEPTH, 3, 6])
def test_cheapest_machines_are_the_cheapest_of_all_sets(seed: int, depth: int) -> None:
    dice = random.Random(seed)
    reading = "batch" if depth == ANY_DEPTH else "continuous"
    estimator = Estimator(
        model=MODEL,
        workload=Workload(input_tokens=20, output_tokens=4),
        fidelity=replace(PAPER, reading=reading, max_tokens_per_pass=1, max_batch=4),
    )
    shapes = [random_shape(dice, index) for index in range(2)]
    rates = tabulate(estimator, shapes, layer_limits(estimator, shapes), [depth])
    assert rates.max_batch >= 1
    counts = np.array([dice.randint(0, 6), dice.randint(1, 5), dice.randint(0, 2)])
    prices = np.array([dice.choice([1.0, 1.5, 2.0]) for _ in counts])
    classes = np.array([0, 1, 0])
    sets = np.stack(np.meshgrid(*(np.arange(one + 1) for one in counts)), axis=-1).reshape(-1, 3)
    boxes = whole(rates, np.zeros(NUM_BOXES, dtype=np.int64))
    share = np.array([dice.uniform(0.01, 0.6) for _ in range(NUM_BOXES)])[:, None]
    most = boxes.least + share * (boxes.most - boxes.least)
    batch = np.array([dice.randint(1, rates.max_batch) for _ in range(NUM_BOXES)])
    depths = np.full(NUM_BOXES, depth)
    stages = stage_layers(rates, Ranges(low=batch, high=batch, shallow=depths, deep=depths), most)
    free, exact = np.full(NUM_BOXES, np.inf), np.ones(NUM_BOXES)

    cheapest = CheapestMachines(counts=counts, prices=prices, shapes=classes, num_layers=14)
    found = cheapest.cost(np.zeros(NUM_BOXES, dtype=np.int64), rates, stages, free, exact)
    fixed = FixedMachines(counts=sets, shapes=classes, num_layers=14)
    best = np.full(NUM_BOXES, np.inf)
    for group in range(len(sets)):
        groups = np.full(NUM_BOXES, group)
        holds = fixed.cost(groups, rates, stages, free, exact)
        best = np.minimum(best, holds * float(sets[group] @ prices) if sets[group].any() else best)

    assert found == pytest.approx(best)
    for certainty in (0.0, 0.9):
        rough = cheapest.cost(
            np.zeros(NUM_BOXES, dtype=np.int64), rates, stages, free, np.full(NUM_BOXES, certainty)
        )
        assert (rough <= best * (1 + 1e-9)).all()
    for box in np.flatnonzero(np.isfinite(found)):
        machines = cheapest.machines(0, rates, stages.take(np.array([box])))
        assert sum(prices[one.column] for one in machines) == pytest.approx(found[box])


def random_shape(dice: random.Random, index: int) -> Shape:
    layer = MODEL.layer_weight_bytes()
    gpu = Gpu(
        name=f"gpu{index}",
        memory_bytes=dice.uniform(2, 9) * layer + dice.choice([0, 1]) * MODEL.vocabulary_bytes(),
        flops=dice.choice([1e9, 4e9]),
        bandwidth=dice.choice([1e8, 1e9]),
    )
    near, far = (Link(latency_s=dice.choice([0, 1e-5]), bandwidth=1e9) for _ in range(2))
    return Shape(
        name=f"shape{index}", gpu=gpu, num_gpus=dice.choice([1, 2, 3]), intra=near, inter=far
    )
