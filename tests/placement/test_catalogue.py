"""GPUs and shapes: figures with sources, prices, and the user's file over them."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from placement.catalogue import Catalogue, Figures, shipped_catalogue
from placement.errors import InvalidInput


@pytest.fixture(name="shipped")
def _shipped() -> Catalogue:
    return shipped_catalogue()


def profile(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    return path


def test_every_gpu_of_the_clouds_is_there(shipped: Catalogue) -> None:
    wanted = "T4 L4 A10G L40S V100 A100-40 A100-80 H100 H200 B200 RTX3090 RTX4090 cpu"
    assert set(wanted.split()) <= set(shipped.gpus)


def test_every_figure_has_a_source_and_calibrated_is_below_spec(shipped: Catalogue) -> None:
    for entry in shipped.gpus.values():
        assert len(entry.spec.source) > 5
        assert len(entry.calibrated.source) > 5
        assert entry.calibrated.tflops <= entry.spec.tflops
        assert entry.calibrated.bandwidth_gb_per_s <= entry.spec.bandwidth_gb_per_s


def test_every_shape_can_be_built_and_its_price_has_a_source(shipped: Catalogue) -> None:
    for name, entry in shipped.shapes.items():
        for figures in get_args(Figures):
            shape = shipped.shape(name, figures)
            assert shape.num_gpus == entry.num_gpus
            assert shape.inter.bandwidth > 0
        assert entry.price_usd_per_hour is None or entry.price_source
    assert {entry.provider for entry in shipped.shapes.values()} == {"aws", "gcp", "azure"}


def test_figures_are_in_si_units(shipped: Catalogue) -> None:
    l4 = shipped.gpu("L4", "spec")
    assert (l4.flops, l4.bandwidth) == (121e12, 300e9)
    assert l4.memory_bytes == 23034 * 2**20
    assert shipped.gpu("L4", "calibrated").flops == 55e12
    shape = shipped.shape("g6.12xlarge", "spec")
    assert (shape.num_gpus, shape.inter.bandwidth, shape.intra.bandwidth) == (4, 5e9, 32e9)
    assert shape.inter.latency_s == pytest.approx(50e-6)
    assert shape.price_usd_per_hour == 4.6016


def test_figures_that_are_often_wrong(shipped: Catalogue) -> None:
    assert shipped.gpu("B200", "spec").flops == 2250e12
    assert {name for name, entry in shipped.gpus.items() if entry.arithmetic == "fp16"} == {
        "T4",
        "V100",
        "V100-32",
    }


def test_spot_prices_differ_by_zone(shipped: Catalogue) -> None:
    zones = shipped.spot_zones("g6.12xlarge")
    assert zones["use1-az1"] == 1.9438
    assert len(zones) == 10
    assert set(shipped.spot_prices) <= set(shipped.shapes)


@pytest.mark.parametrize(
    ("name", "near"), [("L40", "L40S"), ("l4", "L4"), ("A100", "A100-40"), ("H10", "H100")]
)
def test_an_unknown_gpu_names_the_nearest(shipped: Catalogue, name: str, near: str) -> None:
    with pytest.raises(InvalidInput, match=f"gpu: '{name}' is not known; did you mean .*{near}"):
        shipped.gpu(name, "spec")


def test_an_unknown_shape_names_the_nearest(shipped: Catalogue) -> None:
    with pytest.raises(InvalidInput, match=r"did you mean g6\.12xlarge"):
        shipped.shape("g6.12xlrge", "spec")


def test_bare_gpus_make_a_machine(shipped: Catalogue) -> None:
    shape = shipped.bare_shape("RTX4090", 2, "spec")
    assert (shape.name, shape.num_gpus, shape.price_usd_per_hour) == ("2xRTX4090", 2, None)
    assert shipped.bare_shape("cpu", 1, "spec").name == "cpu"
    assert shape.intra.bandwidth == 32e9
    assert shipped.bare_shape("H100", 8, "spec").intra.bandwidth == 450e9


def test_a_profile_overrides_single_figures(shipped: Catalogue, tmp_path: Path) -> None:
    text = "gpus:\n  L4:\n    calibrated: {tflops: 52}\n"
    changed = shipped.with_profile(profile(tmp_path, text))
    entry = changed.gpus["L4"]
    assert entry.calibrated.tflops == 52
    assert entry.calibrated.bandwidth_gb_per_s == 240
    assert entry.calibrated.source == "profile.yaml"
    assert entry.spec == shipped.gpus["L4"].spec


def test_a_profile_adds_gpus_and_shapes(shipped: Catalogue, tmp_path: Path) -> None:
    text = """
gpus:
  RTX6000: {memory_mib: 49140, calibrated: {tflops: 150, bandwidth_gb_per_s: 800}}
shapes:
  box: {gpu: RTX6000, num_gpus: 2, price_usd_per_hour: 1.5}
"""
    shape = shipped.with_profile(profile(tmp_path, text)).shape("box", "spec")
    assert (shape.gpu.flops, shape.price_usd_per_hour) == (150e12, 1.5)


def test_an_empty_profile_changes_nothing(shipped: Catalogue, tmp_path: Path) -> None:
    text = "# nothing yet\n"
    assert shipped.with_profile(profile(tmp_path, text)) == shipped


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu: {}", r"profile\.yaml, line 1: gpu: there is no such key; did you mean gpus"),
        (
            "gpus:\n  L4:\n    calibrated: {tflop: 3}",
            r"line 3: gpus\.L4\.calibrated\.tflop: there is no such key; did you mean tflops",
        ),
        (
            "gpus:\n  L4: {memory_mib: -1}",
            r"line 2: gpus\.L4\.memory_mib: must be at least 1, not -1",
        ),
        ("gpus: {X1: {memory_mib: 5}}", r"gpus\.X1\.spec: is missing"),
        (
            "shapes:\n  box: {gpu: L40, num_gpus: 1}",
            r"line 2: shapes\.box\.gpu: 'L40' is not known; did you mean L40S",
        ),
        ("shapes: {box: {gpu: L4, num_gpus: 0}}", r"shapes\.box\.num_gpus: must be at least 1"),
        ("- 1", "must be a mapping"),
        ("gpus: [", "line 1: is not YAML"),
    ],
)
def test_a_wrong_profile_is_named_by_line_and_field(
    shipped: Catalogue, tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        shipped.with_profile(profile(tmp_path, text))


@pytest.mark.parametrize(
    ("corrections", "message"),
    [
        ("{step: 3}", r"corrections\.L4\.step: there is no such key; did you mean step_s"),
        ("{step_s: .nan}", r"corrections\.L4\.step_s: must be a number of sane size"),
        (
            "{matmul: {depth: 1.0e+300}}",
            r"corrections\.L4\.matmul\.depth: must be a number of sane",
        ),
        ("{step_s: 2024-01-01}", r"corrections\.L4\.step_s: must be a number"),
    ],
)
def test_wrong_corrections_are_named(
    shipped: Catalogue, tmp_path: Path, corrections: str, message: str
) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text(f"corrections:\n  L4: {corrections}")
    with pytest.raises(InvalidInput, match=message):
        shipped.with_profile(profile)
