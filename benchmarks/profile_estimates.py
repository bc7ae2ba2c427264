"""What the estimator says to each kind of measurement in `profiles`: corrected, and plain.

Plain is the paper's roofline with one effective figure each (fidelity `paper`): attention is not
causal, and nothing is launched. Micro-benchmarks repeat one kernel on the same data, so corrected
estimates of attention take the cache as warm here; plans never do.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.profiles import LLAMA_30B, Measured
from placement.corrections import operation_s
from placement.hardware import Gpu
from placement.kernel_corrections import Corrections
from placement.kernels import (
    all_reduce_message_s,
    decode_attention_s,
    matmul_s,
    prefill_attention_s,
)
from placement.roofline import Operation, Pass, decode_pass, layer_operations, roofline_s

Seconds = NDArray[np.float64]
Estimate = Callable[[Measured, Corrections], Seconds]
_HEAD_DIM = 128
# Mean prompt of the Azure trace, which Helix replays as well; its profiles do not say theirs.
PROMPT_TOKENS = 763.0
# α and β of a link as the catalogue has them, one figure for any number of GPUs.
_LINKS = {"L40S": (2.0e-6, 20.1e9), "A100-80": (2.4e-6, 216.7e9)}


def gemm_s(data: Measured, by: Corrections) -> Seconds:
    m, n, k = data["m"], data["n"], data["k"]
    num_bytes = 2.0 * (m * k + n * k)
    return np.asarray(matmul_s(data.gpu, by.matmul, m, n, k, num_bytes), dtype=float)


def gemm_plain_s(data: Measured) -> Seconds:
    m, n, k = data["m"], data["n"], data["k"]
    return _roofline(data.gpu, 2.0 * m * n * k, 2.0 * (m * k + n * k))


def context_attention_s(data: Measured, by: Corrections) -> Seconds:
    def one(heads: float, kv_heads: float, part: Measured) -> Seconds:
        tokens = part["batch"] * part["tokens"]
        pairs = tokens * (part["tokens"] + 1.0) / 2.0
        shape = (heads, kv_heads, _HEAD_DIM)
        return np.asarray(
            prefill_attention_s(part.gpu, by, tokens, pairs, shape, cache=by.cache), dtype=float
        )

    return _by_heads(data, one)


def context_attention_plain_s(data: Measured) -> Seconds:
    batch, tokens = data["batch"], data["tokens"]
    query, cached = data["heads"] * _HEAD_DIM, data["kv_heads"] * _HEAD_DIM
    moved = 2.0 * batch * tokens * (query + 2.0 * cached)
    return _roofline(data.gpu, 4.0 * batch * tokens**2 * query, moved)


def generation_attention_s(data: Measured, by: Corrections) -> Seconds:
    def one(heads: float, kv_heads: float, part: Measured) -> Seconds:
        shape = (heads, kv_heads, _HEAD_DIM)
        return np.asarray(
            decode_attention_s(part.gpu, by, part["batch"], part["tokens"], shape, cache=by.cache),
            dtype=float,
        )

    return _by_heads(data, one)


def generation_attention_plain_s(data: Measured) -> Seconds:
    batch, tokens = data["batch"], data["tokens"]
    query, cached = data["heads"] * _HEAD_DIM, data["kv_heads"] * _HEAD_DIM
    moved = 2.0 * batch * (query + 2.0 * tokens * cached)
    return _roofline(data.gpu, 4.0 * batch * tokens * query, moved)


def all_reduce_s(data: Measured, by: Corrections) -> Seconds:
    assert by.all_reduce is not None
    result = np.empty_like(data.seconds)
    for count, one in by.all_reduce.items():
        mask = data["gpus"] == count
        result[mask] = all_reduce_message_s(one, data["bytes"][mask])
    return result


def all_reduce_plain_s(data: Measured) -> Seconds:
    """Half of equation 3 for one layer: one ring all-reduce."""
    latency, bandwidth = _LINKS[data.gpu.name]
    count = data["gpus"]
    return 2.0 * (latency + data["bytes"] / (count * bandwidth)) * (count - 1.0)


def prompt_layer_s(data: Measured, by: Corrections) -> Seconds:
    return _layer_s(data, _prompts(data["tokens"], is_causal=True), by)


def prompt_layer_plain_s(data: Measured) -> Seconds:
    return _layer_s(data, _prompts(data["tokens"], is_causal=False), None)


def decode_layer_s(data: Measured, by: Corrections, context: float) -> Seconds:
    return _layer_s(data, decode_pass(data["sequences"], context), by)


def decode_layer_plain_s(data: Measured, context: float) -> Seconds:
    return _layer_s(data, decode_pass(data["sequences"], context), None)


def _prompts(tokens: Seconds, *, is_causal: bool) -> Pass:
    length = np.minimum(tokens, PROMPT_TOKENS)
    return Pass(
        num_tokens=tokens,
        attention_pairs=tokens * ((length + 1.0) / 2.0 if is_causal else length),
        kv_tokens=tokens,
        logit_rows=0.0 * tokens,
        is_prefill=True,
    )


def _layer_s(data: Measured, work: Pass, by: Corrections | None) -> Seconds:
    def seconds(operation: Operation) -> Seconds:
        if by is None:
            return np.asarray(roofline_s(operation, work, data.gpu), dtype=float)
        return np.asarray(operation_s(operation, work, data.gpu, by), dtype=float)

    return np.asarray(sum(map(seconds, layer_operations(LLAMA_30B, 1, work))), dtype=float)


def _by_heads(data: Measured, one: Callable[[float, float, Measured], Seconds]) -> Seconds:
    heads, kv_heads = data["heads"], data["kv_heads"]
    result = np.empty_like(data.seconds)
    for pair in {(a, b) for a, b in zip(heads, kv_heads, strict=True)}:
        mask = (heads == pair[0]) & (kv_heads == pair[1])
        result[mask] = one(*pair, data.only(mask))
    return result


def _roofline(gpu: Gpu, flops: Seconds, num_bytes: Seconds) -> Seconds:
    return np.maximum(flops / gpu.flops, num_bytes / gpu.bandwidth)
