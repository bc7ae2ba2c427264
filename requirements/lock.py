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
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement

ROOT: Final = Path(__file__).resolve().parents[1]
SERVING_EXTRAS: Final = ("cpu", "otel")
EXTRAS: Final = (*SERVING_EXTRAS, "dev", "loadtest")
LEFT_OUT: Final = ("torchvision", "torchaudio", "torchcodec", "shuntyard")
LEFT_OUT_PREFIXES: Final = ("nvidia-", "cuda-")

HEADER: Final = """\
# The CPU environment, resolved from pyproject.toml. Do not edit: run `make lock`.
# To install: pip install --no-deps -r requirements/cpu.lock
"""
# The image for serving takes what stands above this line.
DEVELOPMENT: Final = "# Only for tests and load tests:\n"


def resolve() -> list[dict[str, Any]]:
    """The metadata of every package that pip would install, ours included."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        options = ["--quiet", f"--report={report}", f"{ROOT}[{','.join(EXTRAS)}]"]
        subprocess.run([*command, *options], check=True, stdout=sys.stderr)
        return [item["metadata"] for item in json.loads(report.read_text())["install"]]


def canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def needed(requires: Mapping[str, Collection[str]], root: str, extras: Collection[str]) -> set[str]:
    """Names of all that `root` needs with these extras, directly or not.

    requires: what each package requires, in the words of its metadata.
    """
    seen = {(root, extra) for extra in ("", *extras)}
    unread = list(seen)
    while unread:
        name, extra = unread.pop()
        for requirement in map(Requirement, requires.get(name, ())):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            child = canonical(requirement.name)
            new = {(child, asked) for asked in ("", *requirement.extras)} - seen
            seen |= new
            unread += new
    return {name for name, _ in seen}


def lock(packages: list[dict[str, Any]]) -> str:
    """The text of the lock: first what serving needs, then the rest."""
    requires = {canonical(item["name"]): item.get("requires_dist", ()) for item in packages}
    serving = needed(requires, "shuntyard", SERVING_EXTRAS)
    lines = {
        name: f"{name}=={item['version'].partition('+')[0]}\n"
        for name, item in ((canonical(item["name"]), item) for item in packages)
        if name not in LEFT_OUT and not name.startswith(LEFT_OUT_PREFIXES)
    }
    first = [lines[name] for name in sorted(lines) if name in serving]
    rest = [lines[name] for name in sorted(lines) if name not in serving]
    return "".join([HEADER, *first, DEVELOPMENT, *rest])


if __name__ == "__main__":
    print(lock(resolve()), end="")
