"""Calibration: what is measured by hand-made samples becomes a profile that estimates read."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from placement.calibration.clock import busy_s, waiting_s
from placement.calibration.engine import passes_of
from placement.calibration.fit import fit_device, pass_s
from placement.calibration.profile import Device, profile_yaml
from placement.calibration.samples import (
    AllReduce,
    Attention,
    EnginePass,
    Launch,
    Matmul,
    Sample,
    sample_from_json,
    sample_json,
)
from placement.calibration.stopwatch import cpu_stopwatch, typical_s
from placement.catalogue import shipped_catalogue
from placement.hardware import Gpu
from placement.kernel_corrections import (
    Corrections,
    DecodeAttentionCorrections,
    ElementwiseCorrections,
    MatmulCorrections,
    PrefillAttentionCorrections,
    corrections_from_json,
)
from placement.kernels import decode_attention_s, matmul_s, prefill_attention_s

# The device that the samples come from.
GPU = Gpu(name="", memory_bytes=0.0, flops=1e12, bandwidth=5e10)
TRUE = Corrections(
    matmul=MatmulCorrections(launch_s=2e-5, sharpness=2.0),
    prefill_attention=PrefillAttentionCorrections(flops_share=0.4, launch_s=1e-5),
    decode_attention=DecodeAttentionCorrections(bandwidth_share=0.7, unit_s=1e-6),
    elementwise=ElementwiseCorrections(launch_s=8e-5, traffic=5.0),
    step_s=1e-3,
)


def made_samples() -> list[Sample]:
    found: list[Sample] = [Launch(seconds=5e-6)]
    for n, k in ((512, 512), (1024, 4096), (4096, 4096), (8192, 2048)):
        for m in (1, 4, 16, 64, 256, 1024):
            seconds = matmul_s(GPU, TRUE.matmul, m, n, k, 2.0 * k * (m + n))
            found.append(Matmul(m=m, n=n, k=k, seconds=float(seconds)))
    heads = (8, 2, 64)
    for batch, tokens in ((1, 128), (1, 1024), (8, 512), (32, 256)):
        prefill = prefill_attention_s(
            GPU, TRUE, batch * tokens, batch * tokens * (tokens + 1) / 2, heads
        )
        decode = decode_attention_s(GPU, TRUE, batch, tokens, heads)
        found += [
            Attention(
                is_prefill=is_prefill,
                batch=batch,
                tokens=tokens,
                heads=8,
                kv_heads=2,
                head_size=64,
                seconds=float(seconds),
            )
            for is_prefill, seconds in ((True, prefill), (False, decode))
        ]
    return found


def made_passes() -> list[EnginePass]:
    found = []
    for layers in (2, 8):
        for batch, tokens in ((1, 128), (1, 1024), (8, 256), (32, 64)):
            for is_prefill in (True, False):
                shape = EnginePass(
                    layers=layers, is_prefill=is_prefill, batch=batch, tokens=tokens, seconds=0.0
                )
                found.append(
                    EnginePass(
                        layers=layers,
                        is_prefill=is_prefill,
                        batch=batch,
                        tokens=tokens,
                        seconds=pass_s(GPU, TRUE, shape),
                    )
                )
    return found


def test_samples_come_back_from_json() -> None:
    for sample in [
        *made_samples(),
        *made_passes(),
        AllReduce(num_gpus=2, num_bytes=4, seconds=1.0),
    ]:
        assert sample_from_json(sample_json(sample)) == sample


def test_the_device_is_recovered_from_its_samples() -> None:
    found = fit_device(
        [*made_samples(), *made_passes()], num_processors=0, is_cpu=True, source="test"
    )
    assert found.flops == pytest.approx(1e12, rel=0.15)
    assert found.bandwidth == pytest.approx(5e10, rel=0.15)
    assert found.errors["products"] < 0.01
    assert found.errors["engine"] < 0.03
    corrections = found.corrections
    # Shares are of the figures that were found.
    assert corrections.matmul.flops_share * found.flops == pytest.approx(1e12, rel=0.02)
    assert corrections.matmul.bandwidth_share * found.bandwidth == pytest.approx(5e10, rel=0.02)
    assert corrections.step_s == pytest.approx(1e-3, rel=0.2)
    assert corrections.elementwise.launch_s == pytest.approx(8e-5, rel=0.1)


def test_measurements_that_contradict_each_other_are_doubted_and_give_no_absurd_share() -> None:
    samples = made_samples()
    noise = random.Random(7)
    noisy = [
        replace(one, seconds=one.seconds * noise.choice((1.0, 10.0, 100.0)))
        if isinstance(one, Matmul)
        else one
        for one in samples
    ]
    found = fit_device(noisy, num_processors=0, is_cpu=True, source="test")
    assert found.errors["products"] > 0.25
    assert found.doubts == {"products": 0.25}
    matmul = found.corrections.matmul
    assert max(matmul.flops_share, matmul.bandwidth_share) <= 2.0 + 1e-9
    assert matmul.sharpness <= 64.0 + 1e-9
    assert fit_device(samples, num_processors=0, is_cpu=True, source="test").doubts == {}


def test_links_follow_equation_3() -> None:
    reduces = [
        AllReduce(num_gpus=4, num_bytes=size, seconds=2 * (1e-5 + size / (4 * 1e10)) * 3)
        for size in (2**12, 2**16, 2**20, 2**24)
    ]
    found = fit_device([*made_samples(), *reduces], num_processors=0, is_cpu=True, source="test")
    assert found.link is not None
    assert found.link.latency_s == pytest.approx(1e-5, rel=0.01)
    assert found.link.bandwidth == pytest.approx(1e10, rel=0.01)


def profile(name: str, path: Path, *, with_link: bool = True) -> Path:
    reduces = [AllReduce(num_gpus=2, num_bytes=2**20, seconds=1e-3)] if with_link else []
    found = fit_device([*made_samples(), *reduces], num_processors=0, is_cpu=True, source="test")
    device = Device(
        name=name,
        count=2,
        memory_mib=1000.4,
        is_known=name in shipped_catalogue().gpus,
        calibrated=found,
    )
    path.write_text(profile_yaml([device], source="test"))
    return path


def test_a_profile_of_a_known_device_keeps_its_specification(tmp_path: Path) -> None:
    path = profile("cpu", tmp_path / "hardware.yaml")
    catalogue = shipped_catalogue().with_profile(path)
    entry = catalogue.gpus["cpu"]
    assert entry.memory_mib == 1000
    assert entry.calibrated.source == "test"
    assert entry.spec == shipped_catalogue().gpus["cpu"].spec
    assert catalogue.gpu("cpu", "calibrated").flops == pytest.approx(1e12, rel=0.15)
    corrections = corrections_from_json(catalogue.corrections["cpu"])
    assert corrections.matmul.launch_s == pytest.approx(2e-5, rel=0.05)
    assert catalogue.bare_shape("cpu", 2, "calibrated").intra.bandwidth < 1e10


def test_a_device_that_nobody_knows_is_added(tmp_path: Path) -> None:
    path = profile("NVIDIA Something", tmp_path / "hardware.yaml", with_link=False)
    catalogue = shipped_catalogue().with_profile(path)
    assert catalogue.gpu("NVIDIA Something", "spec").flops == pytest.approx(1e12, rel=0.15)
    assert "NVIDIA Something" in catalogue.corrections


def test_a_pass_is_executing_and_sampling() -> None:
    def note(what: str, wall_s: float, waited_s: float = 0.0, tokens: object = ()) -> dict:
        return {"what": what, "wall_s": wall_s, "waited_s": waited_s, "tokens": list(tokens)}

    notes = [
        note("execute", 5.0, 1.0, [64, 64]),
        note("sample", 0.5),
        note("execute", 1.0, 0.25, [1, 1]),
        note("execute", 2.0, 0.0, [1]),
        note("sample", 0.5, 0.5),
    ]
    assert list(passes_of(notes)) == [([64, 64], 4.5), ([1, 1], 0.75), ([1], 2.0)]


def test_the_lower_quartile_is_typical() -> None:
    assert typical_s([9.0, 1.0, 2.0, 100.0, 3.0]) == 2.0
    assert typical_s([7.0]) == 7.0


def test_the_stopwatch_rotates_through_what_it_is_given() -> None:
    seen = []
    seconds = cpu_stopwatch(seen.append)
    assert seconds >= 0
    assert seen[:2] == [0, 1]
    assert seen[2:5] == [0, 1, 2]


def test_waiting_for_a_core_is_counted_for_each_thread() -> None:
    before = busy_s()
    assert waiting_s() >= 0
    waits = []
    thread = threading.Thread(target=lambda: waits.append(waiting_s()))
    thread.start()
    thread.join()
    assert waits[0] >= 0
    assert busy_s() >= before
