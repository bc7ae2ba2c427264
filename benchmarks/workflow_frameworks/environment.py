"""The environment that the frameworks are installed into; it is none of the server's.

It is made when it is first needed and kept until `requirements.txt` changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import ROOT
from server.model_cache import default_cache_dir

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
NAMED = ("langgraph", "langchain-openai", "llama-index-core", "llama-index-workflows",
         "llama-index-llms-openai-like", "llama-index-embeddings-openai-like", "haystack-ai",
         "openai", "httpx", "psycopg")  # fmt: skip
# Nothing is sent anywhere but to the server that is measured.
_QUIET = {
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LANGSMITH_TRACING": "false",
    "NO_PROXY": "127.0.0.1",
}
# The project's root comes last on the path: LlamaIndex has a package `workflows` too.
_RUN_MODULE = (
    "import runpy, sys; root, module = sys.argv[1:3]; sys.path.append(root); "
    "runpy.run_module(module, run_name='__main__')"
)


def ensure_environment() -> Path:
    """The interpreter of an environment with the frameworks. Raises CalledProcessError."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = default_cache_dir() / f"workflow-frameworks-{version}-{digest}"
    python, stamp = folder / "bin" / "python", folder / "complete"
    if not stamp.exists():
        print(f"installing the frameworks into {folder}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", "-r", str(REQUIREMENTS)], check=True)
        stamp.touch()
    return python


def command(python: Path, module: str) -> Sequence[str]:
    """How a module of ours is run there."""
    return [str(python), "-P", "-c", _RUN_MODULE, str(ROOT), module]


def variables() -> dict[str, str]:
    """The environment variables there."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | _QUIET


def versions(python: Path) -> dict[str, str]:
    """Of the packages that are compared."""
    listed = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"],
        capture_output=True,
        check=True,
    )
    found = {one["name"].lower(): one["version"] for one in json.loads(listed.stdout)}
    return {name: found[name] for name in NAMED}
