"""Calibrates every kind of device of this machine, each in a process of its own."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from placement.calibration.engine import DEPTHS, is_engine_there, measure_engine
from placement.calibration.fit import Calibrated, fit_device
from placement.calibration.links import measure_links
from placement.calibration.profile import Device, profile_yaml
from placement.calibration.samples import Sample, sample_from_json
from placement.catalogue import shipped_catalogue
from placement.errors import PlacementError

Say = Callable[[str], None]

_MIB = 2.0**20
_TIMEOUT_S = 600.0


class CalibrationFailed(PlacementError):
    """A device could not be measured, or the measurements contradict each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A kind of device: torch's name of the first, how many, SMs (0 for the CPU)."""

    device: str
    name: str
    count: int
    memory_mib: float
    num_processors: int

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"


def calibrate(
    say: Say,
    *,
    num_threads: int | None = None,
    with_engine: bool = True,
    takes_any_fit: bool = False,
) -> str:
    """The profile of this machine, as YAML. num_threads: of a CPU (default: as torch chooses).

    takes_any_fit: also where the measurements contradict each other. Raises CalibrationFailed.
    """
    devices = []
    for found in _devices():
        samples = _measured(found, say, num_threads, with_engine=with_engine)
        say(f"{found.name}: fitting {len(samples)} measurements")
        source = _source(found, num_threads)
        result = fit_device(
            samples,
            num_processors=found.num_processors,
            is_cpu=found.is_cpu,
            source=source,
        )
        errors = ", ".join(f"{name} {error:.0%}" for name, error in result.errors.items())
        say(
            f"{found.name}: {result.flops / 1e12:.3g} TFLOPS, "
            f"{result.bandwidth / 1e9:.3g} GB/s; the fit is off by {errors}"
        )
        if not takes_any_fit:
            check_fit(found.name, result)
        devices.append(
            Device(
                name=found.name,
                count=found.count,
                memory_mib=found.memory_mib,
                is_known=found.name in shipped_catalogue().gpus,
                calibrated=result,
            )
        )
    return profile_yaml(devices, source=_source(None, num_threads))


def check_fit(name: str, found: Calibrated) -> None:
    """Raises CalibrationFailed for a fit that is further off than on any idle machine."""
    if found.doubts:
        errors = ", ".join(
            f"{what} {found.errors[what]:.0%} (limit {most:.0%})"
            for what, most in found.doubts.items()
        )
        raise CalibrationFailed(
            f"{name}: the measurements contradict each other, the fit is off by {errors}; nothing "
            "is written. Measure while nothing else runs, and with as many --threads as there are "
            "free cores; --force writes such a profile all the same"
        )


def _measured(
    found: _Found, say: Say, num_threads: int | None, *, with_engine: bool
) -> list[Sample]:
    samples: list[Sample] = []
    with closing(_worker_lines(found.device, num_threads)) as lines:  # ends the worker
        for value in lines:
            if "say" in value:
                say(f"{found.name}: {value['say']}")
            else:
                samples.append(sample_from_json(value))
    group = 2 if found.is_cpu else found.count
    if group > 1:
        say(f"{found.name}: all-reduces over {group}")
        samples += measure_links(group, is_cpu=found.is_cpu)
    if found.is_cpu and with_engine and is_engine_there():
        for layers in DEPTHS:
            say(f"{found.name}: the engine, over {layers} layers of random weights")
            passes = measure_engine(layers, num_threads)
            if not passes:
                say(f"{found.name}: the engine does not start here; left out")
                break
            samples += passes
    return samples


def _worker_lines(device: str, num_threads: int | None) -> Generator[dict[str, Any]]:
    command = [sys.executable, "-m", "placement.calibration.worker", device]
    if num_threads:
        command.append(str(num_threads))
    root = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stdout:
                yield json.loads(line)
            reason = process.stderr.read().strip().splitlines()
            code = process.wait(_TIMEOUT_S)
        except BaseException:
            process.kill()
            raise
    if code:
        last = reason[-1] if reason else f"exit code {code}"
        raise CalibrationFailed(f"{device} cannot be measured: {last}")


def _devices() -> list[_Found]:
    import torch

    if not torch.cuda.is_available():
        return [
            _Found(
                device="cpu",
                name="cpu",
                count=1,
                memory_mib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _MIB,
                num_processors=0,
            )
        ]
    by_name: dict[str, list[int]] = {}
    for index in range(torch.cuda.device_count()):
        by_name.setdefault(torch.cuda.get_device_name(index), []).append(index)
    found = []
    for driver_name, indexes in by_name.items():
        properties = torch.cuda.get_device_properties(indexes[0])
        found.append(
            _Found(
                device=f"cuda:{indexes[0]}",
                name=_catalogue_name(driver_name),
                # All-reduces are measured over the first GPUs: only where all are of one kind.
                count=len(indexes) if len(by_name) == 1 else 1,
                memory_mib=properties.total_memory / _MIB,
                num_processors=properties.multi_processor_count,
            )
        )
    return found


def _catalogue_name(driver_name: str) -> str:
    for name, entry in shipped_catalogue().gpus.items():
        if driver_name in entry.driver_names:
            return name
    return driver_name


def _source(found: _Found | None, num_threads: int | None) -> str:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = f"shuntyard calibrate, {today}, torch {metadata.version('torch')}"
    if num_threads and (found is None or found.is_cpu):
        text += f", {num_threads} thread{'s' if num_threads > 1 else ''}"
    return text
