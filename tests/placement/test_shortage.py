"""What is missing where a model does not fit, against the estimator's own word."""

from __future__ import annotations

import itertools

import pytest

from placement.estimator import PAPER, Estimator, Stage
from placement.hardware import Gpu, Link, Offer, Shape
from placement.model import ModelSpec
from placement.shortage import room, shortage
from placement.workload import Workload
from tests import plans

LINK = Link(latency_s=1e-6, bandwidth=1e9)


def small(*, layers: int = 6, tied: bool = False) -> Estimator:
    model = ModelSpec(
        name="small",
        num_layers=layers,
        hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        ffn_size=256,
        vocab_size=1024,
        tie_word_embeddings=tied,
    )
    return Estimator(model=model, workload=Workload(input_tokens=64, output_tokens=64))


def box(estimator: Estimator, num_layers: float, num_gpus: int = 1) -> Shape:
    """A machine whose GPUs have room for so many layers each, by memory, besides activations."""
    gpu = Gpu(name="g", memory_bytes=1e9, flops=1e12, bandwidth=1e11)
    shape = Shape(
        name=f"box{num_layers}x{num_gpus}", gpu=gpu, num_gpus=num_gpus, intra=LINK, inter=LINK
    )
    memory = estimator.stage_memory(Stage(shape=shape, tp=1, num_layers=1, node=0).kind)
    layer = memory.layer_weights + memory.layer_kv_per_request
    exact = 1e9 - memory.available + num_layers * layer + memory.vocabulary
    return Shape(
        name=shape.name,
        gpu=Gpu(name="g", memory_bytes=exact, flops=1e12, bandwidth=1e11),
        num_gpus=num_gpus,
        intra=LINK,
        inter=LINK,
    )


def fits(estimator: Estimator, shapes: list[Shape]) -> bool:
    """By brute force: any order of machines, any TP of each, any layers."""
    num = estimator.model.num_layers
    for order in itertools.permutations(shapes):
        for tps in itertools.product(
            *([1, 2, 4][: shape.num_gpus.bit_length()] for shape in order)
        ):
            kinds = [
                (node, shape, tp)
                for node, (shape, tp) in enumerate(zip(order, tps, strict=True))
                for _ in range(shape.num_gpus // tp)
            ]
            for layers in itertools.product(range(1, num + 1), repeat=len(kinds)):
                if sum(layers) == num:
                    stages = [
                        Stage(shape=shape, tp=tp, num_layers=count, node=node)
                        for (node, shape, tp), count in zip(kinds, layers, strict=True)
                    ]
                    if estimator.max_batch(stages) >= 1:
                        return True
    return False


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [(1.5,), (2.5, 1.2), (3.1, 0.4), (0.2, 0.2), (4.0, 3.5)])
def test_it_fits_where_brute_force_finds_a_way(sizes: tuple[float, ...], tied: bool) -> None:
    estimator = small(layers=5, tied=tied)
    shapes = [box(estimator, size) for size in sizes]
    offers = [Offer(shape=shape, count=1, price_usd_per_hour=1.0) for shape in shapes]
    assert (shortage(offers, estimator) is None) == fits(estimator, shapes)


def test_the_room_of_a_machine_is_that_of_its_best_cut() -> None:
    estimator = small(layers=4)
    shape = box(estimator, 1.4, num_gpus=2)
    found = room(estimator, shape)
    assert found.both == max(
        layers for layers in range(12) if fits(small(layers=layers or 1), [shape]) or not layers
    )
    assert found.middle >= found.end >= found.both


def test_the_smallest_addition_is_named_and_is_enough() -> None:
    estimator = plans.estimator("meta-llama/Llama-3.1-70B-Instruct")
    offers = [plans.offer("g6.12xlarge"), plans.offer("g5.2xlarge")]
    found = shortage(offers, estimator)
    assert found is not None
    assert found.num_layers > 0
    first = found.additions[0]
    assert shortage([*offers, first], estimator) is None
    assert "GB are missing; " in found.message
    assert f"{first.count} more {first.label} would do" in found.message


def test_where_no_layer_fits_no_number_of_machines_helps() -> None:
    estimator = Estimator(
        model=small().model,
        workload=Workload(input_tokens=10**8, output_tokens=10**8),
        fidelity=PAPER,
    )
    offers = [Offer(shape=box(small(), 2.0), count=1, price_usd_per_hour=1.0)]
    found = shortage(offers, estimator)
    assert found is not None
    assert found.additions == ()
    assert "no number of these machines" in found.message


def test_what_fits_has_no_shortage() -> None:
    assert shortage([plans.offer("g6.12xlarge", 1)], plans.estimator()) is None
