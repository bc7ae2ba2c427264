"""Equations 4 to 6, memory, units and monotonicity of the estimator."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.errors import Infeasible
from placement.estimator import (
    PAPER,
    Estimator,
    Fidelity,
    Stage,
    StageKind,
    activation_bytes,
)
from placement.hardware import Gpu, Link, Shape
from placement.model import ModelSpec
from placement.roofline import EngineTraits
from placement.workload import Workload
from tests.placement.models import LLAMA_70B

MODEL = ModelSpec(
    name="hand",
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=160,
    vocab_size=1000,
    weight_bytes=1,
    activation_bytes=1,
    kv_bytes=1,
)
WORKLOAD = Workload(input_tokens=10, output_tokens=5)
# One FLOP is a second, and bytes are free: times are FLOPs.
GPU = Gpu(name="slow", memory_bytes=1e9, flops=1.0, bandwidth=1e30)
FREE = Link(latency_s=0.0, bandwidth=1e30)
BOX = Shape(name="box", gpu=GPU, num_gpus=4, intra=FREE, inter=FREE)
FAST_BOX = dataclasses.replace(BOX, name="fast", gpu=dataclasses.replace(GPU, flops=2.0))
CONTINUOUS = Fidelity(name="c", reading="continuous", traits=PAPER.traits)

# FLOPs of one request, per layer (test_roofline computes them for B = 3):
# prefill 163,840 + 25,600 + 81,920 + 409,600 + 204,800; decode of 5 tokens
# 81,920 + 16,640 + 40,960 + 204,800 + 102,400. Logits 1,280,000 and 640,000.
PREFILL, DECODE = 885_760, 446_720
LOGITS_PREFILL, LOGITS_DECODE = 1_280_000, 640_000


def stage(num_layers: int, *, shape: Shape = BOX, tp: int = 1, node: int = 0) -> Stage:
    return Stage(shape=shape, tp=tp, num_layers=num_layers, node=node)


def estimator(model: ModelSpec = MODEL, fidelity: Fidelity = PAPER) -> Estimator:
    return Estimator(model=model, workload=WORKLOAD, fidelity=fidelity)


def test_a_stage_takes_its_layers_and_the_last_one_the_logits() -> None:
    found = estimator().evaluate([stage(3), stage(1, shape=FAST_BOX, node=1)], 2)
    first, last = found.stages
    assert first.prefill_s == 2 * 3 * PREFILL
    assert first.decode_s == 2 * 3 * DECODE
    assert last.prefill_s == (PREFILL + LOGITS_PREFILL)  # half of two requests
    assert last.decode_s == (DECODE + LOGITS_DECODE)


def test_equation_5_takes_the_bottleneck_of_each_phase_apart() -> None:
    # Prefill: 2·1·885,760 against (3·885,760 + 1,280,000)/1; decode alike, on another machine.
    found = estimator().evaluate([stage(1), stage(3, node=1)], 2)
    prefill = [2 * PREFILL, 2 * (3 * PREFILL + LOGITS_PREFILL)]
    decode = [2 * DECODE, 2 * (3 * DECODE + LOGITS_DECODE)]
    assert found.batch_s == max(prefill) + max(decode)
    # Equation 4.
    assert found.throughput_rps == pytest.approx(2 / found.batch_s)
    # A request passes all stages.
    assert found.latency_s == sum(prefill) + sum(decode)
    assert found.ttft_s == sum(prefill)
    assert found.tpot_s == sum(decode) / 5


def test_the_two_bottlenecks_may_be_different_stages() -> None:
    # The first machine computes slowly, the second reads slowly.
    slow_memory = dataclasses.replace(GPU, name="narrow", flops=1e30, bandwidth=1e-2)
    second = dataclasses.replace(BOX, name="narrow", gpu=slow_memory)
    found = estimator().evaluate([stage(2), stage(2, shape=second, node=1)], 1)
    compute, memory = found.stages
    assert found.batch_s == max(compute.prefill_s, memory.prefill_s) + max(
        compute.decode_s, memory.decode_s
    )
    assert compute.decode_s < memory.decode_s


def test_a_hop_is_paid_by_who_sends_over_its_own_link() -> None:
    near, far = Link(latency_s=1.0, bandwidth=64.0), Link(latency_s=7.0, bandwidth=6.4)
    fast = dataclasses.replace(GPU, flops=1e30)
    box = dataclasses.replace(BOX, gpu=fast, intra=near, inter=far)
    one = estimator().evaluate(
        [stage(1, shape=box), stage(1, shape=box), stage(2, shape=box, node=1)], 2
    )
    # Prefill: 2·10 rows of 64 bytes: 1 + 20 s, 7 + 200 s. Decode: five times 1 + 2 s, 7 + 20 s.
    assert [one.prefill_s for one in one.stages] == pytest.approx([21, 207, 0], abs=1e-9)
    assert [one.decode_s for one in one.stages] == pytest.approx([15, 135, 0], abs=1e-9)


def test_all_reduces_are_paid_per_layer_and_pass() -> None:
    fast = dataclasses.replace(GPU, flops=1e30)
    box = dataclasses.replace(BOX, gpu=fast, intra=Link(latency_s=1.0, bandwidth=64.0))
    found = estimator().evaluate([stage(4, shape=box, tp=2)], 2)
    # 4 layers · 4·(1 + 20·64/(2·64))·1, and with 2 rows for each of five steps.
    assert found.stages[0].prefill_s == pytest.approx(4 * 4 * 11)
    assert found.stages[0].decode_s == pytest.approx(5 * 4 * 4 * 2)


def test_without_a_pipeline_continuous_batching_does_the_same_work() -> None:
    # Times are FLOPs, which do not depend on what runs together.
    found = estimator(fidelity=CONTINUOUS).evaluate([stage(4)], 3)
    work = 4 * (PREFILL + DECODE) + LOGITS_PREFILL + LOGITS_DECODE
    assert found.batch_s == pytest.approx(3 * work)
    assert found.stages[0].prefill_s == 3 * (4 * PREFILL + LOGITS_PREFILL)
    assert found.latency_s == found.batch_s
    assert found.tpot_s == found.batch_s / 5


def test_in_a_pipeline_prompts_hold_up_what_decodes_elsewhere() -> None:
    found = estimator(fidelity=CONTINUOUS).evaluate([stage(2), stage(2, node=1)], 2)
    # One request in each of two groups, so 0.2 prompts a step: they count 2/(1 + 0.4/4.2) times.
    prompts = 2 / (1 + 0.4 / 4.2)
    last = 2 * (2 * DECODE + LOGITS_DECODE + prompts * (2 * PREFILL + LOGITS_PREFILL))
    assert found.batch_s == pytest.approx(last)
    first = found.stages[0]
    assert first.prefill_s + first.decode_s == pytest.approx(4 * (DECODE + prompts * PREFILL))


def test_equally_fast_stages_have_the_same_pace_in_both_formulas() -> None:
    judge = estimator(
        dataclasses.replace(MODEL, vocab_size=64), dataclasses.replace(CONTINUOUS, max_batch=64)
    )
    stages = [stage(2), stage(2, node=1)]
    slowest = judge.evaluate(stages, 6).batch_s
    assert judge.paced_batch_s(stages, 6) == pytest.approx(slowest, rel=0.03)
    # With a fast stage beside the slow one the bubbles are less.
    uneven = [stage(3), stage(1, shape=FAST_BOX, node=1)]
    assert judge.paced_batch_s(uneven, 6) < 0.9 * judge.evaluate(uneven, 6).batch_s


def test_continuous_batching_holds_less_than_full_lengths() -> None:
    memory = estimator(fidelity=CONTINUOUS).stage_memory(StageKind(shape=BOX, tp=1))
    # 10 + 6/2 tokens of 64 bytes, 5 % left free.
    assert memory.layer_kv_per_request == pytest.approx(13 * 64 / 0.95)


def test_memory_by_hand() -> None:
    memory = estimator().stage_memory(StageKind(shape=BOX, tp=1))
    # 2·64·64 + 2·64·32 + 3·64·160; 2·32 a token for 15 tokens; 1,000 rows are padded to 1,024.
    assert memory.layer_weights == 43_008
    assert memory.layer_kv_per_request == 960
    assert memory.vocabulary == 65_536
    # 2,048 tokens of 2·64 + 320 bytes.
    assert memory.available == 1e9 - 2_048 * 448


def test_equation_6_by_hand() -> None:
    # 2,000,000 − 917,504 free; the first stage holds 3·43,008 + 65,536 = 194,560.
    box = dataclasses.replace(BOX, gpu=dataclasses.replace(GPU, memory_bytes=2e6))
    stages = [stage(3, shape=box), stage(1, shape=box, node=1)]
    # (1,082,496 − 194,560)/(3·960) = 308.3; (1,082,496 − 108,544)/960 = 1,014.5
    assert estimator().max_batch(stages) == 308
    assert estimator().max_batch(stages[::-1]) == 308


def test_tied_embeddings_are_stored_once_where_one_stage_has_both_ends() -> None:
    tied = estimator(dataclasses.replace(MODEL, tie_word_embeddings=True))
    kind = StageKind(shape=BOX, tp=1)
    assert tied.weight_bytes(kind, 1, is_first=True, is_last=True) == 43_008 + 65_536
    assert tied.weight_bytes(kind, 1, is_first=True, is_last=False) == 43_008 + 65_536
    assert estimator().weight_bytes(kind, 1, is_first=True, is_last=True) == 43_008 + 131_072
    assert tied.weight_bytes(kind, 1, is_first=False, is_last=False) == 43_008
    total = dataclasses.replace(MODEL, tie_word_embeddings=True).weight_bytes_total()
    assert total == 4 * 43_008 + 65_536


def test_replicated_kv_heads_take_memory_on_every_gpu() -> None:
    # Two KV heads over four GPUs: one whole head each, 2·16 bytes a token.
    assert MODEL.kv_bytes_per_token(1) == 64
    assert MODEL.kv_bytes_per_token(2) == 32
    assert MODEL.kv_bytes_per_token(4) == 32


def test_a_window_bounds_the_cache() -> None:
    model = dataclasses.replace(MODEL, sliding_window=5, num_sliding_layers=2)
    memory = estimator(model).stage_memory(StageKind(shape=BOX, tp=1))
    # Half of the layers keep 5 tokens, half 15.
    assert memory.layer_kv_per_request == 10 * 64


@pytest.mark.parametrize("tp", [3, 8])
def test_tp_that_does_not_divide_the_heads_cannot_run(tp: int) -> None:
    with pytest.raises(Infeasible, match=f"TP {tp}"):
        estimator().evaluate([stage(4, tp=tp)])


def test_layers_must_add_up() -> None:
    with pytest.raises(Infeasible, match="3 layers are placed of 4"):
        estimator().evaluate([stage(3)])


# A 70B model on data-centre GPUs: units are seconds and bytes.

NODE = Shape(
    name="8xA100",
    gpu=Gpu(name="A100", memory_bytes=80 * 2**30, flops=312e12, bandwidth=2039e9),
    num_gpus=8,
    intra=Link(latency_s=5e-6, bandwidth=300e9),
    inter=Link(latency_s=30e-6, bandwidth=12.5e9),
)


def test_units_of_a_known_model() -> None:
    assert LLAMA_70B.weight_bytes_total() == pytest.approx(141.1e9, rel=0.01)
    azure = Estimator(
        model=LLAMA_70B, workload=Workload(input_tokens=763, output_tokens=232), fidelity=PAPER
    )
    found = azure.evaluate([Stage(shape=NODE, tp=8, num_layers=80, node=0)], 1)
    # One token reads 140 GB over 8 · 2,039 GB/s: 8.6 ms, and 80 layers wait 80·4·7·5 µs = 11.2 ms.
    assert found.tpot_s == pytest.approx(8.65e-3 + 11.2e-3, rel=0.05)


BATCHES = st.integers(1, 256)
LENGTHS = st.integers(1, 4096)
TPS = st.sampled_from([1, 2, 4, 8])
FIDELITIES = st.sampled_from(
    [PAPER, Fidelity(name="engine", reading="continuous", traits=EngineTraits())]
)


def step_s(
    fidelity: Fidelity, input_tokens: int, output_tokens: int, tp: int, batch: int
) -> tuple[float, ...]:
    """Seconds of a layer and of the logits by phase; where phases run together, of a layer."""
    subject = Estimator(
        model=LLAMA_70B,
        workload=Workload(input_tokens=input_tokens, output_tokens=output_tokens),
        fidelity=fidelity,
    )
    kind, size = StageKind(shape=NODE, tp=tp), np.array([float(batch)])
    prefill, decode = subject.prefill_times(kind, size), subject.decode_times(kind, size, 2)
    layer, logits = (
        [float(getattr(phase, name)[0]) for phase in (prefill, decode)]
        for name in ("layer_s", "logits_s")
    )
    if fidelity.reading == "continuous":
        return (sum(layer),)
    return (*layer, *logits)


def never_below(larger: tuple[float, ...], smaller: tuple[float, ...]) -> bool:
    return all(one >= other * (1 - 1e-9) for one, other in zip(larger, smaller, strict=True))


@given(FIDELITIES, LENGTHS, LENGTHS, TPS, BATCHES, BATCHES)
def test_more_requests_are_never_faster(
    fidelity: Fidelity, prompt: int, output: int, tp: int, batch: int, more: int
) -> None:
    small = step_s(fidelity, prompt, output, tp, batch)
    assert never_below(step_s(fidelity, prompt, output, tp, batch + more), small)


@given(FIDELITIES, LENGTHS, LENGTHS, TPS, BATCHES, LENGTHS)
def test_longer_prompts_are_never_faster(
    fidelity: Fidelity, prompt: int, output: int, tp: int, batch: int, more: int
) -> None:
    short = step_s(fidelity, prompt, output, tp, batch)
    assert never_below(step_s(fidelity, prompt + more, output, tp, batch), short)


@given(FIDELITIES, LENGTHS, LENGTHS, st.sampled_from([2, 4, 8]), BATCHES)
def test_fewer_gpus_are_never_faster_but_for_their_links(
    fidelity: Fidelity, prompt: int, output: int, tp: int, batch: int
) -> None:
    def computing(tp: int) -> tuple[float, ...]:
        work_of = Estimator(
            model=LLAMA_70B,
            workload=Workload(input_tokens=prompt, output_tokens=output),
            fidelity=fidelity,
        )
        free = dataclasses.replace(NODE, intra=FREE)
        kind, size = StageKind(shape=free, tp=tp), np.array([float(batch)])
        phases = (work_of.prefill_times(kind, size), work_of.decode_times(kind, size, 1))
        if fidelity.reading == "continuous":
            return (sum(float(one.layer_s[0]) for one in phases),)
        return tuple(float(value[0]) for one in phases for value in (one.layer_s, one.logits_s))

    assert never_below(computing(tp // 2), computing(tp))


@given(st.integers(1, 79), TPS, TPS, LENGTHS, LENGTHS)
def test_the_largest_batch_fits_and_one_more_request_does_not(
    layers: int, first_tp: int, last_tp: int, prompt: int, output: int
) -> None:
    fidelity = dataclasses.replace(PAPER, max_batch=10**9)
    subject = Estimator(
        model=LLAMA_70B,
        workload=Workload(input_tokens=prompt, output_tokens=output),
        fidelity=fidelity,
    )
    stages = [
        Stage(shape=NODE, tp=first_tp, num_layers=layers, node=0),
        Stage(shape=NODE, tp=last_tp, num_layers=80 - layers, node=1),
    ]
    batch = subject.max_batch(stages)
    if batch:
        for one in subject.evaluate(stages, batch).stages:
            assert one.weights_bytes + one.kv_bytes <= one.available_bytes
            activations = activation_bytes(LLAMA_70B, one.stage.tp, 2048)
            assert one.available_bytes / one.stage.tp + activations <= NODE.gpu.memory_bytes
    with pytest.raises(Infeasible, match="does not fit"):
        subject.evaluate(stages, batch + 1)
