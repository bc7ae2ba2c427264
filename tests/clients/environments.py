"""What the client libraries are installed into: a virtual environment, and node_modules.

Both are made when a test first needs them, and kept until their lock files change.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from server.model_cache import default_cache_dir

HERE: Final = Path(__file__).parent
JS: Final = HERE / "js"
REQUIREMENTS: Final = HERE / "requirements.txt"
INSTALL_TIMEOUT_S: Final = 900


def client_python() -> Path:
    """The interpreter of an environment with tests/clients/requirements.txt installed."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = default_cache_dir() / f"clients-{version}-{_digest(REQUIREMENTS)}"
    python, stamp = folder / "bin" / "python", folder / "complete"
    with _locked(folder):
        if not stamp.exists():
            shutil.rmtree(folder, ignore_errors=True)
            run([sys.executable, "-m", "venv", str(folder)])
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            run([*pip, "--no-deps", "--no-compile", "-r", str(REQUIREMENTS)])
            stamp.touch()
    return python


def missing_for_js() -> str | None:
    """Why the JavaScript clients cannot be run here, if so."""
    for name in ("node", "npm"):
        if shutil.which(name) is None:
            return f"{name} is not installed"
    return None


def install_js() -> None:
    """`npm ci`, unless what is there is of this lock file."""
    modules = JS / "node_modules"
    stamp = modules / f".complete-{_digest(JS / 'package-lock.json')}"
    with _locked(default_cache_dir() / "clients-js"):
        if not stamp.exists():
            run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=JS)
            stamp.touch()


def run(command: list[str], *, cwd: Path = HERE, timeout_s: float = INSTALL_TIMEOUT_S) -> str:
    """Run a command; its output. AssertionError with that output if it fails."""
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
    for name in ("PYTHONPATH", "OPENAI_BASE_URL", "OPENAI_API_KEY"):
        environment.pop(name, None)
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        raise AssertionError(f"{command} took more than {timeout_s} s:\n{output}") from None
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}"
    return done.stdout


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
