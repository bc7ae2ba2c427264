"""Step times are the estimator's, whatever table they come from."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from placement.estimator import Estimator, Fidelity, Stage
from placement.hardware import Gpu, Link, Shape
from placement.model import ModelSpec
from placement.roofline import (
    EngineTraits,
    Operation,
    Pass,
    Quantity,
    decode_pass,
    hop_s,
    prefill_pass,
)
from placement.simulator.stage_time import StageTime, stage_times
from placement.simulator.step_time import StepWork
from placement.workload import Workload

MODEL = ModelSpec(
    name="small",
    num_layers=8,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    ffn_size=4096,
    vocab_size=32_000,
)
GPU = Gpu(name="gpu", memory_bytes=24e9, flops=50e12, bandwidth=250e9)
NEAR, FAR = Link(latency_s=1e-5, bandwidth=1e10), Link(latency_s=5e-5, bandwidth=2e9)
BOX = Shape(name="box", gpu=GPU, num_gpus=4, intra=NEAR, inter=FAR)


def judge(model: ModelSpec = MODEL, **traits: bool) -> Estimator:
    fidelity = Fidelity(
        name="t", reading="continuous", traits=EngineTraits(**traits), max_tokens_per_pass=2048
    )
    return Estimator(
        model=model, workload=Workload(input_tokens=500, output_tokens=100), fidelity=fidelity
    )


def pipeline(estimator: Estimator) -> tuple[list[Stage], list[StageTime]]:
    stages = [
        Stage(shape=BOX, tp=2, num_layers=3, node=0),
        Stage(shape=BOX, tp=2, num_layers=3, node=0),
        Stage(shape=BOX, tp=1, num_layers=1, node=1),
        Stage(shape=BOX, tp=4, num_layers=1, node=2),
    ]
    return stages, stage_times(estimator, stages)


def expected_s(estimator: Estimator, stages: list[Stage], index: int, work: Pass) -> float:
    stage = stages[index]
    layer_s = sum(estimator.operation_times_s(stage.kind, work).values())
    end_s = (
        estimator.logits_s(stage.kind, work),
        hop_s(MODEL, work, NEAR),
        hop_s(MODEL, work, FAR),
    )[(1, 2, 2, 0)[index]]
    return float(stage.num_layers * layer_s + end_s)


def decode_work(num_seqs: int, context: int) -> StepWork:
    return StepWork(0, num_seqs, 0, num_seqs * context, 0, num_seqs)


def prefill_work(num_prompts: int, length: int) -> StepWork:
    tokens = num_prompts * length
    pairs = num_prompts * length * (length + 1) // 2
    return StepWork(tokens, 0, tokens, 0, pairs, num_prompts)


@pytest.mark.parametrize("is_causal", [True, False])
def test_steps_of_one_kind_take_what_the_estimator_says(is_causal: bool) -> None:
    estimator = judge(is_attention_causal=is_causal)
    stages, times = pipeline(estimator)
    for index, time in enumerate(times):
        for num_prompts, length in ((1, 2), (1, 2048), (4, 500), (20, 100)):
            work = prefill_pass(MODEL, num_prompts, length, estimator.fidelity.traits)
            assert time.step_s(prefill_work(num_prompts, length)) == pytest.approx(
                expected_s(estimator, stages, index, work), rel=1e-12
            )
        for num_seqs, context in ((1, 1), (1, 700), (16, 1000), (300, 33), (1000, 4096)):
            assert time.step_s(decode_work(num_seqs, context)) == pytest.approx(
                expected_s(estimator, stages, index, decode_pass(num_seqs, context)), rel=1e-4
            )


def test_a_mixed_step_reads_the_weights_once() -> None:
    times = pipeline(judge())[1]
    prefill, decode = prefill_work(1, 64), decode_work(8, 500)
    mixed = StepWork(64, 8, 64, 4000, prefill.prefill_pairs, 9)
    for time in times:
        alone = time.step_s(prefill), time.step_s(decode)
        assert max(alone) < time.step_s(mixed) < 0.7 * sum(alone)


def test_interpolated_attention_is_near_for_times_that_are_not_linear() -> None:
    def bent(operation: Operation, work: Pass, gpu: Gpu, /) -> Quantity:
        del work
        return 1e-6 + (operation.flops / gpu.flops) + (operation.bytes / gpu.bandwidth) ** 0.9

    estimator = dataclasses.replace(
        judge(), fidelity=dataclasses.replace(judge().fidelity, operation_time=bent)
    )
    stages, times = pipeline(estimator)
    rng = random.Random(1)
    for _ in range(200):
        num_seqs, context = rng.randint(1, 500), rng.randint(1, 8000)
        assert times[0].step_s(decode_work(num_seqs, context)) == pytest.approx(
            expected_s(estimator, stages, 0, decode_pass(num_seqs, context)), rel=1e-4
        )


def test_a_window_bounds_what_is_attended_to() -> None:
    windowed = dataclasses.replace(MODEL, sliding_window=256, num_sliding_layers=8)
    narrow, wide = pipeline(judge(windowed))[1][0], pipeline(judge())[1][0]
    near, far = decode_work(32, 256), decode_work(32, 4096)
    assert narrow.step_s(far) == pytest.approx(narrow.step_s(near), rel=1e-3)
    assert wide.step_s(far) > narrow.step_s(far)
    prompt = prefill_work(1, 2000)
    counted = prefill_pass(windowed, 1, 2000, EngineTraits())
    layer_s = sum(judge(windowed).operation_times_s(pipeline(judge())[0][0].kind, counted).values())
    hop = hop_s(MODEL, counted, NEAR)
    assert narrow.step_s(prompt) == pytest.approx(float(np.asarray(3 * layer_s + hop)))
