"""Prints the lock of the CPU environment: `python requirements/lock.py > requirements/cpu.lock`.

pip resolves what pyproject.toml asks for, extras included, without installing any of it. Left out
are packages that the engine asks for and never uses on a CPU with text models, each of which has
to match the build of torch. Torch itself is written without its build (`+cpu`), so that the index
in use decides.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
EXTRAS: Final = "cpu,dev,loadtest,otel"
LEFT_OUT: Final = ("torchvision", "torchaudio", "torchcodec", "shuntyard")
LEFT_OUT_PREFIXES: Final = ("nvidia-", "cuda-")

HEADER: Final = """\
# The CPU environment, resolved from pyproject.toml. Do not edit: run `make lock`.
# To install: pip install --no-deps -r requirements/cpu.lock
"""


def resolve() -> dict[str, str]:
    """Name and version of every package that pip would install."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        options = ["--quiet", f"--report={report}", f"{ROOT}[{EXTRAS}]"]
        subprocess.run([*command, *options], check=True, stdout=sys.stderr)
        packages = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {canonical(package["name"]): package["version"] for package in packages}


def canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def lock(packages: dict[str, str]) -> str:
    """The text of the lock."""
    kept = {
        name: version.partition("+")[0]
        for name, version in packages.items()
        if name not in LEFT_OUT and not name.startswith(LEFT_OUT_PREFIXES)
    }
    return HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(kept.items()))


if __name__ == "__main__":
    print(lock(resolve()), end="")
