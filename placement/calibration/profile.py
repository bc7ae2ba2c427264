"""The hardware profile that `calibrate` writes: a file for `--hardware`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from placement.calibration.fit import Calibrated

_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6
_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of device of this machine. name: the catalogue's, else what the driver says.

    is_known: whether the catalogue has it (its spec figures then stay).
    """

    name: str
    count: int
    memory_mib: float
    is_known: bool
    calibrated: Calibrated


def profile_yaml(devices: Sequence[Device], *, source: str) -> str:
    """The file's text."""
    document: dict[str, Any] = {"gpus": {}, "fabrics": {}, "shapes": {}, "corrections": {}}
    for device in devices:
        found = device.calibrated
        entry: dict[str, Any] = {
            "memory_mib": round(device.memory_mib),
            "calibrated": {
                "tflops": _short(found.flops / _TERA),
                "bandwidth_gb_per_s": _short(found.bandwidth / _GIGA),
                "source": source,
            },
        }
        if found.link is not None:
            fabric = f"{device.name}, measured"
            document["fabrics"][fabric] = {
                "calibrated": {
                    "latency_us": _short(found.link.latency_s / _MICRO),
                    "bandwidth_gb_per_s": _short(found.link.bandwidth / _GIGA),
                    "source": source,
                }
            }
            entry["fabric"] = fabric
            if device.count > 1:
                document["shapes"][f"this machine, {device.name}"] = {
                    "gpu": device.name,
                    "num_gpus": device.count,
                    "fabric": fabric,
                }
        document["gpus"][device.name] = entry
        document["corrections"][device.name] = _rounded(
            {
                key: value
                for key, value in found.corrections.as_json().items()
                if value is not None and key != "cache"
            }
        )
    head = f"# {source}. For --hardware; seconds, and shares of the calibrated figures.\n"
    return head + yaml.safe_dump(
        {key: value for key, value in document.items() if value}, sort_keys=False
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return _short(value)
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
