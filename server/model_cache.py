"""Folders that are made once, checked on every use, and shared between processes.

A folder is sealed with a manifest (name, size, time and sha256 of each file). A later use trusts
a file whose size and time are those of the manifest, hashes one whose time has changed, and has
the folder made anew when a file is missing, cut short or different.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from spot.errors import ShuntyardError

Progress = Callable[[str], None]

MANIFEST_NAME: Final = "shuntyard-manifest.json"


class ModelUnavailable(ShuntyardError):
    """The model cannot be had. `message` says what failed and what to do about it."""


def silent(_line: str) -> None:
    """The progress of one who does not want to hear of it."""


def default_cache_dir() -> Path:
    """`SHUNTYARD_CACHE_DIR`, else `shuntyard` in the user's cache folder."""
    if configured := os.environ.get("SHUNTYARD_CACHE_DIR"):
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "shuntyard"


def make_once(
    target: Path, recipe: str, fill: Callable[[Path], None], *, progress: Progress
) -> Path:
    """Return `target`, filled by `fill(folder)` unless it is already there and sound.

    recipe: names what goes into the folder; a folder made by another recipe is made anew.
    Between processes one fills and the others wait. The folder appears whole or not at all.
    Raises ModelUnavailable if the cache cannot be written.
    """
    if is_sound(target, recipe):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f"{target.name}.lock"), progress):
            if not is_sound(target, recipe):
                if target.exists():
                    progress(f"{target} is damaged or out of date: making it anew")
                _make(target, recipe, fill)
    except OSError as error:
        raise ModelUnavailable(
            f"Cannot write the model cache {target.parent}: {error}. Free some space there, or "
            "set SHUNTYARD_CACHE_DIR to a folder that you can write to."
        ) from error
    return target


def is_sound(folder: Path, recipe: str) -> bool:
    """Whether `folder` was made by `recipe` and its files are still those that were sealed."""
    manifest = _read_manifest(folder)
    if manifest is None or manifest["recipe"] != recipe:
        return False
    try:
        return all(_is_unchanged(folder / name, seal) for name, seal in manifest["files"].items())
    except OSError:
        return False


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make(target: Path, recipe: str, fill: Callable[[Path], None]) -> None:
    for left_by_a_killed_process in target.parent.glob(f"{target.name}.partial-*"):
        shutil.rmtree(left_by_a_killed_process, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    try:
        folder = partial / "new"
        folder.mkdir()
        fill(folder)
        _seal(folder, recipe)
        if target.exists():
            target.rename(partial / "old")
        folder.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _seal(folder: Path, recipe: str) -> None:
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        path.chmod(0o644)
        stat = path.stat()
        files[str(path.relative_to(folder))] = {
            "num_bytes": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "sha256": sha256_of(path),
        }
    manifest = {"recipe": recipe, "files": files}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=1) + "\n")


def _is_unchanged(path: Path, seal: dict[str, Any]) -> bool:
    stat = path.stat()
    if stat.st_size != seal["num_bytes"]:
        return False
    return bool(stat.st_mtime_ns == seal["mtime_ns"] or sha256_of(path) == seal["sha256"])


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
        if isinstance(manifest, dict) and "recipe" in manifest and "files" in manifest:
            return manifest
    return None


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock at `path`; the kernel gives it back however this process ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"Another process is preparing {path.with_suffix('').name}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
