"""How long a GPU takes for one kernel, with corrections: the formulas behind `calibrated`.

Each is monotone: more rows, tokens, heads or context never take less time, so that bounds of a
search over batches and splits hold.
"""

from __future__ import annotations

import numpy as np

from placement.hardware import Gpu
from placement.kernel_corrections import (
    CacheCorrections,
    CollectiveCorrections,
    Corrections,
    ElementwiseCorrections,
    MatmulCorrections,
)
from placement.roofline import Array, Quantity

# Tilings of the usual libraries: tiles of so many rows and columns of the result, and into how many
# parts the depth is split where there are fewer tiles than processors.
_TILES = ((16, 64), (32, 64), (64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128))
_SPLITS = (1, 2, 4, 8, 16)
_HEIGHT, _WIDTH, _SPLIT = np.array(
    [(height, width, split) for height, width in _TILES for split in _SPLITS], dtype=np.float64
).T
_LARGEST_TILE = (128.0, 256.0)
_QUERY_TILE, _KEY_TILE = 128.0, 64.0
_SPLIT_CONTEXT = 256.0
_PARTIAL_BYTES = 4.0
_COLD = CacheCorrections()


def matmul_s(
    gpu: Gpu,
    by: MatmulCorrections,
    rows: Quantity,
    columns: Quantity,
    depth: Quantity,
    num_bytes: Quantity,
) -> Quantity:
    """Seconds of a product of (rows × depth) with (depth × columns), reading `num_bytes`.

    Launch floor, and a soft maximum of memory and compute. Compute is that of the best tiling: its
    tiles run in whole waves over the processors (the last one faster where it fills few), each tile
    at the efficiency of its own arithmetic intensity and for a depth with an overhead.
    """
    bandwidth = gpu.bandwidth * by.bandwidth_share
    if by.num_processors:
        compute = _tiled_s(gpu, by, rows, columns, depth)
    else:
        rate = gpu.flops * by.flops_share * _tile_efficiency(by, *_LARGEST_TILE)
        compute = 2.0 * rows * columns * (depth + by.depth_overhead) / rate
    return by.launch_s + soft_max(compute, num_bytes / bandwidth, by.sharpness)


def _tiled_s(
    gpu: Gpu, by: MatmulCorrections, rows: Quantity, columns: Quantity, depth: Quantity
) -> Quantity:
    """Seconds that the best tiling computes; what parts of a split add up is written and read."""
    m, n, k = (np.asarray(one, dtype=np.float64) for one in (rows, columns, depth))
    # Tilings along a new first axis. The optimizer asks for many rows of few matrices at once.
    inner = (slice(None), *(None,) * max(m.ndim, n.ndim, k.ndim))
    height, width, split = _HEIGHT[inner], _WIDTH[inner], _SPLIT[inner]
    rate = gpu.flops * by.flops_share * _tile_efficiency(by, height, width)
    wave_s = 2.0 * height * width * by.num_processors * (k / split + by.depth_overhead) / rate
    merge_s = np.where(split > 1, _PARTIAL_BYTES * split, 0.0) * n
    merge_s = merge_s / (gpu.bandwidth * by.bandwidth_share)
    waves = np.ceil(m / height) * (np.ceil(n / width) * split) / by.num_processors
    full = np.floor(waves)
    rest = waves - full
    waves = full + np.where(rest > 0.0, np.maximum(rest, 1.0 / by.solo_rate), 0.0)
    best: Array = (waves * wave_s + m * merge_s).min(axis=0)
    return best


def _tile_efficiency(by: MatmulCorrections, height: Quantity, width: Quantity) -> Quantity:
    area = height * width
    return area / (area + by.tile_overhead * (height + width))


def elementwise_s(
    gpu: Gpu, by: ElementwiseCorrections, num_elements: Quantity, element_bytes: float
) -> Quantity:
    """Seconds of what follows a product with so many elements."""
    return by.launch_s + by.traffic * num_elements * element_bytes / gpu.bandwidth


def prefill_attention_s(
    gpu: Gpu,
    by: Corrections,
    tokens: Quantity,
    pairs: Quantity,
    heads: tuple[float, float, int],
    *,
    kv_bytes: float = 2.0,
    cache: CacheCorrections = _COLD,
) -> Quantity:
    """Seconds of causal attention of `tokens` queries over `pairs` (query, key) pairs of a head.

    The kernel works in tiles of 128 queries by 64 keys, so that the diagonal is computed in whole
    tiles; the tiles of the last queries are the longest, and one processor does each. What is read
    and written comes on top: these kernels hide little of it. The length of the prompts is taken
    from pairs / tokens. heads: (query heads, KV heads, head size).
    """
    ours = by.prefill_attention
    query_heads, kv_heads, size = heads
    length = np.maximum(1.0, 2.0 * np.asarray(pairs) / tokens - 1.0)
    num_prompts = tokens / length
    tiles = np.ceil(length / _QUERY_TILE - 1e-9)
    keys = np.ceil(length / _KEY_TILE - 1e-9) * _KEY_TILE
    long = _QUERY_TILE * tiles * (tiles + 1.0) / 2.0
    seen = np.where(length <= _QUERY_TILE, keys, long)  # keys, summed over a prompt's tiles
    flop_per_key = 4.0 * size * _QUERY_TILE
    work = num_prompts * query_heads * (seen + tiles * ours.key_overhead)
    flops = gpu.flops * ours.flops_share
    longest = (keys + ours.key_overhead) * by.matmul.num_processors / ours.solo_rate
    compute = flop_per_key / flops * soft_max(work, longest, 2.0)
    moved = tokens * (2.0 * query_heads * 2.0 + ours.kv_traffic * kv_heads * kv_bytes) * size
    bandwidth = gpu.bandwidth * ours.bandwidth_share
    return ours.launch_s + compute + _moving_s(moved, bandwidth, gpu, cache)


def decode_attention_s(
    gpu: Gpu,
    by: Corrections,
    sequences: Quantity,
    context: Quantity,
    heads: tuple[float, float, int],
    *,
    kv_bytes: float = 2.0,
    cache: CacheCorrections = _COLD,
) -> Quantity:
    """Seconds of attention of one token of each of `sequences`, over `context` tokens each."""
    ours = by.decode_attention
    query_heads, kv_heads, size = heads
    per_token = 2.0 * kv_heads * size * kv_bytes
    moved = sequences * (context * per_token + 2.0 * query_heads * size * 2.0)
    reading = _moving_s(moved, gpu.bandwidth * ours.bandwidth_share, gpu, cache)
    is_alone = query_heads <= kv_heads
    share = ours.alone_stream_share if is_alone else ours.grouped_stream_share
    stream = context * 2.0 * size * kv_bytes / (gpu.bandwidth * share)
    units = sequences * kv_heads * ours.unit_s
    regrouping: Quantity = 0.0
    if not is_alone:
        is_gathered = (np.asarray(sequences) > 1.0) & (kv_heads > 1.0)
        is_split = np.asarray(context) >= _SPLIT_CONTEXT
        regrouping = ours.split_s * is_split + ours.gather_s * is_gathered
    p = ours.sharpness
    return ours.launch_s + regrouping + soft_max(soft_max(units, reading, p), stream, p)


def all_reduce_message_s(by: CollectiveCorrections, message: Quantity) -> Quantity:
    """Seconds of one all-reduce of `message` bytes."""
    short = by.short_latency_s + message / by.short_bandwidth
    long = by.long_latency_s + message / by.long_bandwidth
    return np.minimum(short, long)


def soft_max(one: Quantity, other: Quantity, sharpness: float) -> Array:
    """(one^p + other^p)^(1/p), between the maximum and the sum; without overflow."""
    larger, smaller = np.maximum(one, other), np.minimum(one, other)
    share = np.divide(smaller, larger, out=np.zeros_like(larger, dtype=float), where=larger > 0)
    result: Array = larger * (1.0 + share**sharpness) ** (1.0 / sharpness)
    return result


def _moving_s(moved: Quantity, bandwidth: float, gpu: Gpu, cache: CacheCorrections) -> Quantity:
    """Seconds to move so many bytes; with a warm cache, what fits comes from there.

    Of data that is larger than the cache, its excess pushes out as much again.
    """
    if not cache.num_bytes:
        return moved / bandwidth
    hit = np.clip(2.0 - moved / cache.num_bytes, 0.0, 1.0)
    return moved * (hit / (gpu.bandwidth * cache.bandwidth_share) + (1.0 - hit) / bandwidth)
