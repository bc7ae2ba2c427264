"""Parts of a model by hand."""

from __future__ import annotations

from typing import Any

import pytest

from placement.errors import Infeasible, InvalidInput
from placement.estimator import PAPER, Estimator, Stage, StageKind
from placement.hardware import Gpu, Link, Shape
from placement.model import ModelSpec
from placement.part_estimate import Part, estimate_part, max_part_batch
from placement.workload import Workload

# Round figures: 1 TFLOPS, 1 GB/s, and a link of 1 ms and 1 MB/s.
GPU = Gpu(name="round", memory_bytes=100e6, flops=1e12, bandwidth=1e9)
LINK = Link(latency_s=1e-3, bandwidth=1e6)
SHAPE = Shape(name="round", gpu=GPU, num_gpus=2, intra=LINK, inter=LINK)
MODEL = ModelSpec(
    name="small",
    num_layers=4,
    hidden_size=100,
    num_heads=4,
    num_kv_heads=2,
    head_dim=20,
    ffn_size=300,
    vocab_size=640,
)
ESTIMATOR = Estimator(model=MODEL, workload=Workload(input_tokens=8, output_tokens=4))


def part(*, tp: int = 1, layers: int = 2, **fields: Any) -> Part:
    return Part(kind=StageKind(shape=SHAPE, tp=tp), num_layers=layers, **fields)


def test_bare_layers_by_hand() -> None:
    found = estimate_part(ESTIMATOR, part(is_bare=True), batch=2)
    # All memory-bound. Prefill of 16 tokens: (rows + matrix) · 2 bytes / 1 GB/s, two layers.
    qkv = (16 * 100 + 100 * (80 + 2 * 40)) * 2 / 1e9
    attention = (16 * 80 + 2 * 16 * 40) * 2 / 1e9
    output = (16 * 80 + 80 * 100) * 2 / 1e9
    up_gate = (16 * 100 + 100 * 600) * 2 / 1e9
    down = (16 * 300 + 300 * 100) * 2 / 1e9
    expected = {
        "qkv": qkv,
        "attention": attention,
        "output": output,
        "up_gate": up_gate,
        "down": down,
    }
    assert {name: one.prefill_s for name, one in found.by_operation.items()} == pytest.approx(
        {name: 2 * seconds for name, seconds in expected.items()}
    )
    assert found.prefill_s == pytest.approx(2 * sum(expected.values()))
    # A step of 2 tokens at the mean context 8 + 2.5.
    attention = (2 * 80 + 2 * 2 * 10.5 * 40) * 2 / 1e9
    assert found.by_operation["attention"].decode_step_s == pytest.approx(2 * attention)
    assert found.decode_s == pytest.approx(4 * found.decode_step_s)
    assert found.throughput_rps == pytest.approx(2 / (found.prefill_s + found.decode_s))


def test_the_ends_and_links_are_in_unless_bare() -> None:
    whole = estimate_part(ESTIMATOR, part(tp=2), batch=2)
    bare = estimate_part(ESTIMATOR, part(tp=2, is_bare=True), batch=2)
    assert set(whole.by_operation) - set(bare.by_operation) == {"all_reduce", "logits"}
    # Equation 3 for 2 layers: 4 · (α + message / (2 · β)) each; 2 tokens of 100 elements.
    assert whole.by_operation["all_reduce"].decode_step_s == pytest.approx(
        2 * 4 * (1e-3 + 2 * 100 * 2 / (2 * 1e6))
    )
    # Table 2 counts logits for all 16 prompt tokens.
    assert whole.by_operation["logits"].prefill_s == pytest.approx((16 * 100 + 100 * 320) * 2 / 1e9)
    long = Estimator(model=MODEL, workload=Workload(input_tokens=2000, output_tokens=500))
    assert max_part_batch(long, part(tp=2)) < max_part_batch(long, part(tp=2, is_bare=True))


def test_tokens_and_context_stand_in_for_the_workload() -> None:
    flat = estimate_part(ESTIMATOR, part(is_bare=True, num_prefill_tokens=16), batch=7)
    assert flat.prefill_s == pytest.approx(
        estimate_part(ESTIMATOR, part(is_bare=True), batch=2).prefill_s
    )
    near = estimate_part(ESTIMATOR, part(is_bare=True, context=100), batch=2)
    attention = (2 * 80 + 2 * 2 * 100 * 40) * 2 / 1e9
    assert near.by_operation["attention"].decode_step_s == pytest.approx(2 * attention)


def test_all_layers_are_what_a_pipeline_of_one_stage_takes() -> None:
    stage = Stage(shape=SHAPE, tp=2, num_layers=4, node=0)
    whole = ESTIMATOR.evaluate([stage])
    found = estimate_part(ESTIMATOR, part(tp=2, layers=4))
    assert found.batch == found.max_batch == whole.batch == ESTIMATOR.max_batch([stage])
    assert found.throughput_rps == pytest.approx(whole.throughput_rps)


def test_a_batch_that_does_not_fit_is_estimated_and_told() -> None:
    found = estimate_part(ESTIMATOR, part(), batch=10**6)
    assert found.max_batch < found.batch == 10**6


def test_what_does_not_fit_says_by_how_much() -> None:
    big = Estimator(
        model=MODEL, workload=Workload(input_tokens=60_000, output_tokens=40_000), fidelity=PAPER
    )
    assert max_part_batch(big, part(layers=4)) == 1
    bigger = Estimator(
        model=MODEL, workload=Workload(input_tokens=600_000, output_tokens=40_000), fidelity=PAPER
    )
    with pytest.raises(Infeasible, match=r"4 layers .* do not fit 1 × round: 0\.\d\d GB"):
        estimate_part(bigger, part(layers=4))


def test_an_impossible_split_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"tp: 3 cannot split small .*; 1, 2 and 4 can"):
        estimate_part(ESTIMATOR, part(tp=3), batch=1)
