"""The fidelity `calibrated`, and the corrections that are shipped."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.catalogue import shipped_catalogue
from placement.corrections import CALIBRATED, calibrated_fidelity, operation_s
from placement.errors import InvalidInput
from placement.estimator import Estimator, StageKind
from placement.hardware import Gpu, Link, Shape
from placement.kernel_corrections import (
    CollectiveCorrections,
    Corrections,
    MatmulCorrections,
    corrections_from_json,
    shipped_corrections,
)
from placement.model import ModelSpec
from placement.model_catalogue import find_model
from placement.roofline import (
    EngineTraits,
    decode_pass,
    layer_operations,
    logits_operation,
    prefill_pass,
    roofline_s,
)
from placement.workload import Workload
from tests.placement.models import LLAMA_8B

GPU = Gpu(name="nobody's", memory_bytes=80e9, flops=2e14, bandwidth=1e12)


def estimator(model: ModelSpec = LLAMA_8B, prompt: int = 700) -> Estimator:
    return Estimator(
        model=model,
        workload=Workload(input_tokens=prompt, output_tokens=200),
        fidelity=CALIBRATED,
    )


def kind(gpu: str, tp: int = 1) -> StageKind:
    return StageKind(shape=shipped_catalogue().bare_shape(gpu, 8, "calibrated"), tp=tp)


def test_every_gpu_of_the_catalogue_has_corrections() -> None:
    assert set(shipped_catalogue().gpus) - {"cpu"} <= set(shipped_corrections())


def test_corrections_come_back_from_json() -> None:
    for one in shipped_corrections().values():
        again = corrections_from_json(one.as_json())
        assert dataclasses.replace(again, source="") == dataclasses.replace(one, source="")


def test_an_unknown_correction_is_named() -> None:
    with pytest.raises(InvalidInput, match="wave_quantisation"):
        Corrections().without("waves_quantisation")


def test_a_gpu_without_corrections_takes_the_roofline() -> None:
    work = decode_pass(8.0, 500.0)
    for operation in [
        *layer_operations(LLAMA_8B, 1, work)[:1],
        logits_operation(LLAMA_8B, 1, work),
    ]:
        plain = roofline_s(operation, work, GPU)
        assert operation_s(operation, work, GPU, Corrections()) == pytest.approx(plain, rel=1e-5)


def test_what_a_pass_costs_besides_is_paid_with_the_logits() -> None:
    work = decode_pass(1.0, 10.0)
    operation = logits_operation(LLAMA_8B, 1, work)
    with_step = operation_s(operation, work, GPU, Corrections(step_s=1.0))
    assert with_step == pytest.approx(1.0 + operation_s(operation, work, GPU, Corrections()))


def test_a_quantised_cache_is_read_faster() -> None:
    small = dataclasses.replace(LLAMA_8B, kv_bytes=1.0)
    work = decode_pass(64.0, 8000.0)
    by = shipped_corrections()["L40S"]
    times = [
        operation_s(layer_operations(model, 1, work)[1], work, GPU, by)
        for model in (LLAMA_8B, small)
    ]
    assert times[1] < 0.6 * times[0]


def test_all_reduces_are_those_measured_over_as_many_gpus() -> None:
    measured = CollectiveCorrections(
        short_latency_s=1.0, short_bandwidth=1e30, long_latency_s=2.0, long_bandwidth=1e30
    )
    fidelity = calibrated_fidelity({"own": Corrections(all_reduce={4: measured})})
    link = Link(latency_s=0.25, bandwidth=1e30)
    gpu = dataclasses.replace(GPU, name="own")
    shape = Shape(name="x", gpu=gpu, num_gpus=8, intra=link, inter=link)
    work = decode_pass(1.0, 10.0)
    assert fidelity.all_reduce_time(LLAMA_8B, 4, work, shape) == 2.0
    # None was measured over two: 4 · α · (2 − 1).
    assert fidelity.all_reduce_time(LLAMA_8B, 2, work, shape) == 1.0


def test_the_users_corrections_come_first() -> None:
    slow = Corrections(matmul=MatmulCorrections(launch_s=1.0))
    fidelity = calibrated_fidelity({"L4": slow})
    work = decode_pass(1.0, 10.0)
    operation = layer_operations(LLAMA_8B, 1, work)[0]
    gpu = shipped_catalogue().gpu("L4", "calibrated")
    assert fidelity.operation_time(operation, work, gpu) >= 1.0
    assert CALIBRATED.operation_time(operation, work, gpu) < 0.1


@pytest.mark.parametrize(
    "model", ["deepseek-ai/DeepSeek-V3", "mistralai/Mixtral-8x7B-Instruct-v0.1", "Qwen/Qwen3-32B"]
)
def test_experts_and_latent_attention_are_estimated_too(model: str) -> None:
    spec = find_model(model)
    assert spec is not None
    for work in (decode_pass(8.0, 500.0), prefill_pass(spec, 8.0, 500, EngineTraits())):
        times = estimator(spec).operation_times_s(kind("H100", 8), work)
        assert all(np.isfinite(float(one)) and float(one) >= 0 for one in times.values())


GPUS = st.sampled_from(sorted(shipped_corrections()))
BATCHES = st.integers(1, 300)


@given(GPUS, BATCHES, BATCHES, st.integers(1, 3000))
def test_more_requests_are_never_faster(gpu: str, batch: int, more: int, prompt: int) -> None:
    sizes = np.array([float(batch), float(batch + more)])
    subject = estimator(prompt=prompt)
    prefill = subject.prefill_times(kind(gpu), sizes)
    decode = subject.decode_times(kind(gpu), sizes, 2)
    # Both phases run in the same steps: only their sum is a time.
    for seconds in (prefill.layer_s, prefill.logits_s, prefill.layer_s + decode.layer_s):
        assert seconds[1] >= seconds[0] * (1 - 1e-12)


@given(GPUS, BATCHES, st.sampled_from([2, 4, 8]), st.integers(1, 3000))
def test_fewer_gpus_are_never_faster_but_for_their_links(
    gpu: str, batch: int, tp: int, prompt: int
) -> None:
    subject = estimator(prompt=prompt)
    for work in (
        decode_pass(float(batch), float(prompt)),
        prefill_pass(LLAMA_8B, float(batch), prompt, EngineTraits()),
    ):
        few, many = (subject.operation_times_s(kind(gpu, one), work) for one in (tp // 2, tp))
        for name in few.keys() - {"all_reduce"}:
            assert float(few[name]) >= float(many[name]) * (1 - 1e-12)
