"""FLOPs and bytes of the operations of one forward pass, and how long a GPU takes for each.

Source: ShuntServe table 2 and equation 1. One formula serves both phases: a prefill is a pass over
B · S_in tokens, decoding is S_out passes over B tokens (the table's sums over t are S_out times the
pass at the mean context). Differences from the table:
- Query and output width is num_heads · head_dim, not H (they differ in Qwen3-32B).
- Each kind of element is counted at its own size: weights, activations, KV cache.
- Experts: FLOPs of the active ones; bytes of the expected number of distinct ones that a batch
  touches. MLA: the absorbed form, in which attention runs over the latent vectors.
- `EngineTraits` turns on what real engines do otherwise than the table.
All quantities may be arrays of one shape; they broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from placement.hardware import Gpu, Link
from placement.model import ModelSpec

Array = NDArray[np.float64]
Quantity = Array | float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """How an engine computes, where that is otherwise than the paper's formulas.

    is_attention_causal: prompts attend to what is before them only, at half the FLOPs.
    computes_all_logits: logits for every prompt token, or for the last one only.
    """

    is_attention_causal: bool = True
    computes_all_logits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward pass of a batch.

    num_tokens: new tokens. attention_pairs: (query, key) pairs of one head, summed over the batch.
    kv_tokens: cached tokens that the pass reads, its own included. logit_rows: tokens that need
    logits. is_prefill: whether queries have more than one token.
    """

    num_tokens: Quantity
    attention_pairs: Quantity
    kv_tokens: Quantity
    logit_rows: Quantity
    is_prefill: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation on one of `tp` GPUs.

    name: of table 2. flops, bytes: of this GPU's share. shape: (m, n, k) if the operation is one
    matrix product. heads: (query heads, KV heads, size of a head) on this GPU if it is attention
    over keys and values.
    """

    name: str
    flops: Quantity
    bytes: Quantity
    shape: tuple[Quantity, float, float] | None = None
    heads: tuple[float, float, int] | None = None


class OperationTime(Protocol):
    """How long a GPU takes for one operation, in seconds."""

    def __call__(self, operation: Operation, work: Pass, gpu: Gpu, /) -> Quantity: ...


def roofline_s(operation: Operation, work: Pass, gpu: Gpu) -> Quantity:
    """Equation 1: the longer of computing and of reading memory."""
    del work
    return np.maximum(operation.flops / gpu.flops, operation.bytes / gpu.bandwidth)


def prefill_pass(model: ModelSpec, batch: Quantity, num_tokens: int, traits: EngineTraits) -> Pass:
    """The pass that computes `batch` prompts of `num_tokens` each, at once."""
    return Pass(
        num_tokens=batch * num_tokens,
        attention_pairs=batch * _prompt_pairs(model, num_tokens, traits),
        kv_tokens=batch * num_tokens,
        logit_rows=batch * (num_tokens if traits.computes_all_logits else 1),
        is_prefill=True,
    )


def _prompt_pairs(model: ModelSpec, num_tokens: int, traits: EngineTraits) -> float:
    """(query, key) pairs of one prompt in one head, as the mean over the layers."""

    def pairs(window: int) -> float:
        # Σ min(i, w) over the positions i = 1..S, or S · w for a kernel that skips no mask.
        triangle = window * (window - 1) / 2 if traits.is_attention_causal else 0.0
        return num_tokens * window - triangle

    if model.sliding_window is None:
        return pairs(num_tokens)
    share = model.num_sliding_layers / model.num_layers
    narrow = pairs(min(num_tokens, model.sliding_window))
    return (1 - share) * pairs(num_tokens) + share * narrow


def decode_pass(batch: Quantity, context: Quantity) -> Pass:
    """The pass that computes one more token of `batch` sequences of `context` tokens each."""
    return Pass(
        num_tokens=batch,
        attention_pairs=batch * context,
        kv_tokens=batch * context,
        logit_rows=batch,
        is_prefill=False,
    )


def mean_decode_context(model: ModelSpec, input_tokens: int, output_tokens: int) -> float:
    """Mean over t = 1..S_out of the tokens that a layer attends to (S_in + t, or its window)."""
    contexts = np.arange(input_tokens + 1, input_tokens + output_tokens + 1, dtype=np.float64)
    if model.sliding_window is None:
        return float(contexts.mean())
    share = model.num_sliding_layers / model.num_layers
    windows = np.minimum(contexts, model.sliding_window)
    return float(((1 - share) * contexts + share * windows).mean())


def layer_operations(model: ModelSpec, tp: int, work: Pass) -> list[Operation]:
    """The operations of one layer on one of `tp` GPUs."""
    if model.latent is not None:
        attention = _latent_attention_operations(model, tp, work)
    else:
        attention = _attention_operations(model, tp, work)
    return [*attention, *_ffn_operations(model, tp, work)]


def logits_operation(model: ModelSpec, tp: int, work: Pass) -> Operation:
    """The LM head, on the last stage."""
    return _matmul(
        "logits",
        work.logit_rows,
        model.hidden_size,
        model.vocab_size / tp,
        activation_bytes=model.activation_bytes,
        weight_bytes=model.activation_bytes,
    )


def all_reduce_s(model: ModelSpec, tp: int, work: Pass, link: Link) -> Quantity:
    """Equation 3, of one layer: two ring all-reduces over `tp` GPUs."""
    if tp == 1:
        return 0.0 * work.num_tokens
    message = work.num_tokens * model.hidden_size * model.activation_bytes
    return 4 * (link.latency_s + message / (tp * link.bandwidth)) * (tp - 1)


def hop_s(model: ModelSpec, work: Pass, link: Link) -> Quantity:
    """Equation 2: sending the activations of a pass to the next stage."""
    message = work.num_tokens * model.hidden_size * model.activation_bytes
    return link.latency_s + message / link.bandwidth


def _matmul(
    name: str,
    num_rows: Quantity,
    num_in: float,
    num_out: float,
    *,
    activation_bytes: float,
    weight_bytes: float,
) -> Operation:
    """A product of `num_rows` rows with a matrix; the paper counts the reading of rows and matrix.

    num_in, num_out: of this GPU's share of the matrix, so that a row that is split over the GPUs
    (of "output", of "down") is counted by its share, as the table does.
    """
    return Operation(
        name=name,
        flops=2 * num_rows * num_in * num_out,
        bytes=num_rows * num_in * activation_bytes + num_in * num_out * weight_bytes,
        shape=(num_rows, num_out, num_in),
    )


def _attention_operations(model: ModelSpec, tp: int, work: Pass) -> list[Operation]:
    tokens, query = work.num_tokens, model.query_size
    kv_heads = -(-model.num_kv_heads // tp)
    kv_width = kv_heads * model.head_dim
    sizes = {"activation_bytes": model.activation_bytes, "weight_bytes": model.weight_bytes}
    return [
        _matmul("qkv", tokens, model.hidden_size, query / tp + 2 * kv_width, **sizes),
        Operation(
            name="attention",
            flops=4 * work.attention_pairs * query / tp,
            bytes=tokens * query / tp * model.activation_bytes
            + 2 * work.kv_tokens * kv_width * model.kv_bytes,
            heads=(model.num_heads / tp, kv_heads, model.head_dim),
        ),
        _matmul("output", tokens, query / tp, model.hidden_size, **sizes),
    ]


def _latent_attention_operations(model: ModelSpec, tp: int, work: Pass) -> list[Operation]:
    latent = model.latent
    assert latent is not None
    tokens, heads = work.num_tokens, model.num_heads / tp
    cached = latent.kv_rank + latent.rope_dim
    activation, weight = model.activation_bytes, model.weight_bytes
    output = heads * latent.value_dim * model.hidden_size
    projections = model.attention_weights(tp) - output
    return [
        Operation(
            name="qkv",
            flops=2 * tokens * projections,
            bytes=tokens * model.hidden_size * activation + projections * weight,
        ),
        Operation(
            name="attention",
            flops=2 * work.attention_pairs * heads * (cached + latent.kv_rank),
            bytes=tokens * heads * cached * activation + work.kv_tokens * cached * model.kv_bytes,
        ),
        Operation(
            name="output",
            flops=2 * tokens * output,
            bytes=tokens * heads * latent.value_dim * activation + output * weight,
        ),
    ]


def _ffn_operations(model: ModelSpec, tp: int, work: Pass) -> list[Operation]:
    num_up = 2 if model.is_ffn_gated else 1
    hidden, tokens = model.hidden_size, work.num_tokens
    sizes = {"activation_bytes": model.activation_bytes, "weight_bytes": model.weight_bytes}
    size = model.ffn_size / tp
    dense = [
        _matmul("up_gate", tokens, hidden, num_up * size, **sizes),
        _matmul("down", tokens, size, hidden, **sizes),
    ]
    if model.experts is None:
        return dense
    experts = model.experts
    active = (experts.num_per_token * experts.size + experts.shared_size) / tp
    untouched = (1 - experts.num_per_token / experts.num) ** tokens
    loaded = (experts.num * (1 - untouched) * experts.size + experts.shared_size) / tp
    share = experts.num_dense_layers / model.num_layers
    mixed = []
    for operation, num_matrices, num_in in (
        (dense[0], num_up, hidden),
        (dense[1], 1, active),
    ):
        flops = 2 * tokens * hidden * num_matrices * active
        scanned = tokens * num_in * model.activation_bytes
        moved = scanned + num_matrices * hidden * loaded * model.weight_bytes
        mixed.append(
            Operation(
                name=operation.name,
                flops=share * operation.flops + (1 - share) * flops,
                bytes=share * operation.bytes + (1 - share) * moved,
            )
        )
    return mixed
