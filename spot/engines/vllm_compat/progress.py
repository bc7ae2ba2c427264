"""What vLLM's log says about its start, in a few words. Imports nothing of vLLM."""

from __future__ import annotations

_STAGES = (
    ("Starting to load model", "loading the model"),
    ("Loading weights took", "weights loaded"),
    ("Model loading took", "weights loaded"),
    ("Loading safetensors", "loading weights"),
    ("KV cache size", "KV cache allocated"),
    ("Warming up model", "warming up"),
    ("Capturing CUDA graphs", "capturing CUDA graphs"),
    ("init engine", "engine core initialised"),
    ("torch.compile takes", "compiled"),
)


def describe(line: str) -> str | None:
    """The stage of start-up that a log line announces, or None."""
    for marker, stage in _STAGES:
        if marker in line:
            return stage
    return None
