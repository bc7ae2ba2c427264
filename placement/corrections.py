"""The fidelity `calibrated`: the roofline with the corrections that measurements justify.

What it takes otherwise than the paper: prompts attend causally, only the last position gets logits,
batches are continuous (`estimator`), and every operation takes the time of its kernel (`kernels`)
by the corrections of its GPU. GPUs without any are taken by their figures alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from placement.estimator import AllReduceTime, Fidelity, ring_all_reduces_s
from placement.hardware import Gpu, Shape
from placement.kernel_corrections import Corrections, shipped_corrections
from placement.kernels import (
    all_reduce_message_s,
    decode_attention_s,
    elementwise_s,
    matmul_s,
    prefill_attention_s,
    soft_max,
)
from placement.model import ModelSpec
from placement.roofline import EngineTraits, Operation, OperationTime, Pass, Quantity

_NONE = Corrections()
_ELEMENT_BYTES = 2.0


def calibrated_fidelity(
    corrections: Mapping[str, Corrections] | None = None, *, name: str = "calibrated"
) -> Fidelity:
    """The fidelity with the shipped corrections, and `corrections` (by GPU) over them."""
    table = {**shipped_corrections(), **(corrections or {})}
    return Fidelity(
        name=name,
        reading="continuous",
        traits=EngineTraits(is_attention_causal=True, computes_all_logits=False),
        operation_time=corrected_time(table),
        all_reduce_time=corrected_all_reduces(table),
        usable_memory=0.9,
        max_tokens_per_pass=8192,
    )


def corrected_time(corrections: Mapping[str, Corrections]) -> OperationTime:
    """How long operations take on GPUs with these corrections, by the GPU's name."""

    def seconds(operation: Operation, work: Pass, gpu: Gpu) -> Quantity:
        return operation_s(operation, work, gpu, corrections.get(gpu.name, _NONE))

    return seconds


def corrected_all_reduces(corrections: Mapping[str, Corrections]) -> AllReduceTime:
    """All-reduces as measured over so many GPUs of a kind; where none were, by the link."""

    def seconds(model: ModelSpec, tp: int, work: Pass, shape: Shape) -> Quantity:
        measured = corrections.get(shape.gpu.name, _NONE).all_reduce or {}
        if tp not in measured:
            return ring_all_reduces_s(model, tp, work, shape)
        message = work.num_tokens * model.hidden_size * model.activation_bytes
        return 2.0 * all_reduce_message_s(measured[tp], message)

    return seconds


def operation_s(operation: Operation, work: Pass, gpu: Gpu, by: Corrections) -> Quantity:
    """Seconds of one operation of a pass, what follows it elementwise included."""
    if operation.heads is not None:
        return _attention_s(operation, work, gpu, by)
    if operation.shape is None:
        return _mixed_s(operation, gpu, by)
    rows, columns, depth = operation.shape
    product = matmul_s(gpu, by.matmul, rows, columns, depth, operation.bytes)
    if operation.name == "logits":
        return product + by.step_s
    return product + elementwise_s(gpu, by.elementwise, rows * columns, _ELEMENT_BYTES)


def _attention_s(operation: Operation, work: Pass, gpu: Gpu, by: Corrections) -> Quantity:
    assert operation.heads is not None
    heads, tokens = operation.heads, work.num_tokens
    query_heads, kv_heads, size = heads
    cached = operation.bytes - tokens * query_heads * size * _ELEMENT_BYTES
    # All of an array have the same size of an element: the first one tells.
    kv_bytes = float(np.ravel(cached / (2.0 * work.kv_tokens * kv_heads * size))[0])
    if work.is_prefill:
        pairs = work.attention_pairs
        return prefill_attention_s(gpu, by, tokens, pairs, heads, kv_bytes=kv_bytes)
    context = work.kv_tokens / tokens
    return decode_attention_s(gpu, by, tokens, context, heads, kv_bytes=kv_bytes)


def _mixed_s(operation: Operation, gpu: Gpu, by: Corrections) -> Quantity:
    """Several products in one operation (experts, latent attention): by their totals, with the
    efficiency of large tiles. An approximation: nothing of the kind was measured."""
    matmul = by.matmul
    share = matmul.flops_share / (1.0 + matmul.tile_overhead * (128 + 256) / (128 * 256))
    compute = operation.flops / (gpu.flops * share)
    memory = operation.bytes / (gpu.bandwidth * matmul.bandwidth_share)
    floor = matmul.launch_s + by.elementwise.launch_s
    return np.asarray(floor + soft_max(compute, memory, matmul.sharpness))


CALIBRATED: Final = calibrated_fidelity()
