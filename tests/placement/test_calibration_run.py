"""Which devices are calibrated, and under which names."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from placement.calibration import run
from placement.calibration.fit import Calibrated
from placement.calibration.samples import Launch, sample_json
from placement.calibration.stopwatch import cuda_stopwatch
from placement.kernel_corrections import Corrections


def pretend(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    properties = SimpleNamespace(total_memory=24 * 2**30, multi_processor_count=58)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


def test_a_machine_without_gpus_is_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, [])
    (found,) = run._devices()
    assert (found.device, found.name, found.num_processors) == ("cpu", "cpu", 0)
    assert found.memory_mib > 100


def test_gpus_of_one_kind_are_one_device_under_the_catalogues_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, ["NVIDIA L4"] * 4)
    (found,) = run._devices()
    assert (found.device, found.name, found.count) == ("cuda:0", "L4", 4)
    assert (found.memory_mib, found.num_processors) == (24 * 1024, 58)


def test_each_kind_of_gpu_is_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ["NVIDIA L4", "NVIDIA Unheard Of", "NVIDIA L4"])
    found = run._devices()
    assert [(one.device, one.name) for one in found] == [
        ("cuda:0", "L4"),
        ("cuda:1", "NVIDIA Unheard Of"),
    ]
    # All-reduces over GPUs of several kinds say nothing of one of them.
    assert [one.count for one in found] == [1, 1]


def test_a_worker_that_fails_is_told_in_its_last_words() -> None:
    with pytest.raises(run.CalibrationFailed, match=r"nonsense cannot be measured: .*nonsense"):
        list(run._worker_lines("nonsense", None))


def test_the_workers_samples_are_told_apart_from_what_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, ["NVIDIA L4"])
    (found,) = run._devices()

    def lines(device: str, num_threads: int | None) -> Generator[dict[str, Any]]:
        yield {"say": "products"}
        yield sample_json(Launch(seconds=1.0))

    monkeypatch.setattr(run, "_worker_lines", lines)
    told: list[str] = []
    samples = run._measured(found, told.append, None, with_engine=True)
    assert samples == [Launch(seconds=1.0)]
    assert told == ["L4: products"]


def test_a_worker_ends_with_the_measurement_that_is_broken_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, ["NVIDIA L4"])
    (found,) = run._devices()
    ended: list[str] = []

    def lines(device: str, num_threads: int | None) -> Generator[dict[str, Any]]:
        try:
            yield {"say": "products"}
        finally:
            ended.append(device)

    def break_off(text: str) -> None:
        raise SystemExit

    monkeypatch.setattr(run, "_worker_lines", lines)
    with pytest.raises(SystemExit) as held:  # with it the frame that has the lines
        run._measured(found, break_off, None, with_engine=True)
    assert ended == ["cuda:0"]
    assert held.value.code is None


@pytest.mark.parametrize("takes_any_fit", [False, True])
def test_a_fit_that_is_far_off_is_written_only_if_told_so(
    monkeypatch: pytest.MonkeyPatch, takes_any_fit: bool
) -> None:
    pretend(monkeypatch, [])
    found = Calibrated(
        flops=1e12,
        bandwidth=1e10,
        corrections=Corrections(),
        errors={"products": 0.81, "attention": 0.18, "engine": 1.0},
        link=None,
    )
    monkeypatch.setattr(run, "_measured", lambda *_, **__: [])
    monkeypatch.setattr(run, "fit_device", lambda *_, **__: found)
    told: list[str] = []
    if takes_any_fit:
        assert "gpus:" in run.calibrate(told.append, takes_any_fit=True)
    else:
        message = (
            r"cpu: .* products 81% \(limit 25%\), engine 100% \(limit 25%\); .*--threads.*--force"
        )
        with pytest.raises(run.CalibrationFailed, match=message):
            run.calibrate(told.append)
    assert "products 81%" in told[-1]


class FakeEvent:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: FakeEvent) -> float:
        return 50.0  # milliseconds, for ten operations


@pytest.mark.parametrize("can_capture", [True, False])
def test_a_gpus_time_is_that_of_ten_operations_by_ten(can_capture: bool) -> None:
    class Capture:
        def __init__(self, graph: object) -> None: ...

        def __enter__(self) -> None:
            if not can_capture:
                raise RuntimeError("cannot be captured")

        def __exit__(self, *failure: object) -> None: ...

    cuda = SimpleNamespace(
        synchronize=lambda: None,
        Event=FakeEvent,
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: None),
        graph=Capture,
    )
    stopwatch = cuda_stopwatch(SimpleNamespace(cuda=cuda))
    assert stopwatch(lambda index: None) == pytest.approx(5e-3)
