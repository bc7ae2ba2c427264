"""Environment variables that must stand before vLLM, torch or OpenMP is imported."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib.metadata import PackageNotFoundError, distribution

# OpenMP threads spin at barriers by default: with fewer cores than runnable threads, an engine that
# starts takes nine tenths of the speed of one that serves. Passive waiting costs next to nothing.
_DEFAULTS = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_COLOR": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


# On a CPU, parts of sampling (log probabilities, top-p, grammars) would be compiled with g++ by the
# first request that needs them: half a minute in which no other request moves, and the engine's end
# on a machine without a compiler.
_CPU_DEFAULTS = {"TORCH_COMPILE_DISABLE": "1"}


def apply_default_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what the engine needs in `environ`, leaving alone what the user chose."""
    defaults = _DEFAULTS | (_CPU_DEFAULTS if is_cpu_build() else {})
    for name, value in defaults.items():
        environ.setdefault(name, value)


def is_cpu_build() -> bool:
    """Whether vLLM is installed as its CPU build, told without importing it."""
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True
