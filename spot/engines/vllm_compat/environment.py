"""Environment variables that must stand before vLLM, torch or OpenMP is imported."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

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


def apply_default_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what the engine needs in `environ`, leaving alone what the user chose."""
    for name, value in _DEFAULTS.items():
        environ.setdefault(name, value)
