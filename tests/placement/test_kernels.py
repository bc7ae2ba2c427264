"""The corrected formulas: by hand on small numbers, and monotone everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.hardware import Gpu
from placement.kernel_corrections import (
    CORRECTIONS,
    CacheCorrections,
    CollectiveCorrections,
    Corrections,
    DecodeAttentionCorrections,
    ElementwiseCorrections,
    MatmulCorrections,
    PrefillAttentionCorrections,
    shipped_corrections,
)
from placement.kernels import (
    all_reduce_message_s,
    decode_attention_s,
    elementwise_s,
    matmul_s,
    prefill_attention_s,
    soft_max,
)

# One FLOP and one byte take a second.
GPU = Gpu(name="hand", memory_bytes=1.0, flops=1.0, bandwidth=1.0)
FREE_BYTES = Gpu(name="compute", memory_bytes=1.0, flops=1.0, bandwidth=1e30)
FREE_FLOPS = Gpu(name="memory", memory_bytes=1.0, flops=1e30, bandwidth=1.0)


def test_without_corrections_a_product_takes_the_roofline() -> None:
    plain = MatmulCorrections()
    assert matmul_s(GPU, plain, 3.0, 5.0, 7.0, 1.0) == pytest.approx(2 * 3 * 5 * 7)
    assert matmul_s(GPU, plain, 3.0, 5.0, 7.0, 500.0) == pytest.approx(500)


def test_a_launch_comes_on_top() -> None:
    by = MatmulCorrections(launch_s=10.0)
    assert matmul_s(GPU, by, 3.0, 5.0, 7.0, 1.0) == pytest.approx(10 + 210)


def test_tiles_run_in_whole_waves() -> None:
    by = MatmulCorrections(num_processors=2)
    # 128 × 256 is one tile of that size, for two processors; in smaller tiles both work.
    two = 2 * 128 * 256 * 64
    assert matmul_s(FREE_BYTES, by, 128.0, 256.0, 64.0, 0.0) == pytest.approx(two)
    # One row still takes a tile of 16 rows: 4 tiles of 16 × 64 in 2 waves.
    assert matmul_s(FREE_BYTES, by, 1.0, 256.0, 64.0, 0.0) == pytest.approx(2 * 16 * 256 * 64)
    # Three tiles of 64 columns take two waves, as four do; but each can be split along its depth:
    # 6 halves fill three waves of half the depth.
    three = matmul_s(FREE_BYTES, by, 16.0, 192.0, 64.0, 0.0)
    assert three == pytest.approx(2 * 16 * 192 * 64)


def test_a_tile_is_as_efficient_as_its_intensity() -> None:
    # a·b / (a·b + c·(a + b)) with c = 128 · 256 / (128 + 256): half for the largest tile.
    by = MatmulCorrections(num_processors=1, tile_overhead=128 * 256 / 384)
    seconds = matmul_s(FREE_BYTES, by, 256.0, 256.0, 10.0, 0.0)
    assert seconds == pytest.approx(2 * 256 * 256 * 10 * 2)


def test_depth_has_an_overhead() -> None:
    by = MatmulCorrections(depth_overhead=6.0)
    assert matmul_s(FREE_BYTES, by, 2.0, 3.0, 4.0, 0.0) == pytest.approx(2 * 2 * 3 * (4 + 6))


def test_soft_maximum_lies_between_maximum_and_sum() -> None:
    assert soft_max(3.0, 4.0, 2.0) == pytest.approx(5.0)
    assert soft_max(3.0, 4.0, 1.0) == pytest.approx(7.0)
    assert soft_max(3.0, 4.0, 1e6) == pytest.approx(4.0)
    assert soft_max(0.0, 0.0, 3.0) == 0.0


def test_elementwise_work_passes_the_product_through_memory() -> None:
    by = ElementwiseCorrections(launch_s=1.0, traffic=3.0)
    assert elementwise_s(GPU, by, 10.0, 2.0) == 1 + 3 * 10 * 2


def test_prefill_attention_computes_whole_tiles_of_the_diagonal() -> None:
    by = Corrections()
    # 256 tokens: tiles of 128 queries see 128 and 256 keys: 128 · 384 pairs, 4 · 8 FLOPs each.
    pairs = 256 * 257 / 2
    seconds = prefill_attention_s(FREE_BYTES, by, 256.0, pairs, (3.0, 1.0, 8))
    assert seconds == pytest.approx(3 * 128 * 384 * 32)
    # 10 tokens: one tile of 128 × 64.
    short = prefill_attention_s(FREE_BYTES, by, 10.0, 55.0, (3.0, 1.0, 8))
    assert short == pytest.approx(3 * 128 * 64 * 32)


def test_prefill_attention_moves_queries_results_and_cache() -> None:
    by = Corrections(prefill_attention=PrefillAttentionCorrections(kv_traffic=6.0))
    seconds = prefill_attention_s(FREE_FLOPS, by, 10.0, 55.0, (3.0, 1.0, 8))
    # 10 tokens of 8-wide heads: 3 queries and results of 2 bytes, 6 elements for the KV head.
    assert seconds == pytest.approx(10 * 8 * (2 * 3 * 2 + 6 * 1 * 2))


def test_decode_attention_reads_the_cache() -> None:
    # 2 sequences over 5 tokens: 2·5 keys and values of 8 elements for one head, 3 queries, results.
    moved = 2 * (5 * 2 * 8 * 2 + 2 * 3 * 8 * 2)
    seconds = decode_attention_s(GPU, Corrections(), 2.0, 5.0, (3.0, 1.0, 8))
    assert seconds == pytest.approx(moved)


def test_grouped_heads_are_merged_in_long_contexts_only() -> None:
    by = Corrections(decode_attention=DecodeAttentionCorrections(split_s=1000.0, gather_s=50.0))
    fast = Gpu(name="x", memory_bytes=1.0, flops=1.0, bandwidth=1e30)
    grouped, alone = (4.0, 1.0, 8), (4.0, 4.0, 8)
    assert decode_attention_s(fast, by, 1.0, 255.0, grouped) == pytest.approx(0.0)
    assert decode_attention_s(fast, by, 1.0, 256.0, grouped) == pytest.approx(1000.0)
    assert decode_attention_s(fast, by, 1.0, 256.0, alone) == pytest.approx(0.0)
    # Several sequences with several groups each are gathered first.
    assert decode_attention_s(fast, by, 2.0, 10.0, grouped) == pytest.approx(0.0)
    assert decode_attention_s(fast, by, 2.0, 10.0, (4.0, 2.0, 8)) == pytest.approx(50.0)
    assert decode_attention_s(fast, by, 2.0, 10.0, alone) == pytest.approx(0.0)


def test_a_warm_cache_serves_what_fits() -> None:
    cache = CacheCorrections(num_bytes=1000.0, bandwidth_share=10.0)
    heads = (1.0, 1.0, 1)
    # 10 tokens: 10 · 4 + 4 bytes, ten times as fast.
    seconds = decode_attention_s(GPU, Corrections(), 1.0, 10.0, heads, cache=cache)
    assert seconds == pytest.approx(4.4)
    # Twice the cache and more: nothing is left of it.
    assert decode_attention_s(GPU, Corrections(), 1.0, 500.0, heads, cache=cache) == 2004


def test_an_all_reduce_takes_the_faster_protocol() -> None:
    by = CollectiveCorrections(
        short_latency_s=1.0, short_bandwidth=1.0, long_latency_s=10.0, long_bandwidth=10.0
    )
    assert all_reduce_message_s(by, 5.0) == 6.0
    assert all_reduce_message_s(by, 100.0) == 20.0


REAL = Gpu(name="real", memory_bytes=1.0, flops=2e14, bandwidth=1e12)
SHIPPED = st.sampled_from(sorted(shipped_corrections()))
SIZES = st.integers(1, 9000)
HEADS = st.sampled_from([(8.0, 8.0, 128), (8.0, 1.0, 128), (16.0, 8.0, 64), (64.0, 8.0, 128)])


@given(SHIPPED, SIZES, SIZES, SIZES, SIZES, st.sampled_from("mnk"))
def test_a_larger_product_never_takes_less(
    gpu: str, m: int, n: int, k: int, more: int, which: str
) -> None:
    by = shipped_corrections()[gpu].matmul
    small = {"m": float(m), "n": float(n), "k": float(k)}
    large = {**small, which: small[which] + more}
    times = [
        matmul_s(REAL, by, one["m"], one["n"], one["k"], 2 * one["k"] * (one["m"] + one["n"]))
        for one in (small, large)
    ]
    assert times[1] >= times[0] * (1 - 1e-12)


@given(SHIPPED, HEADS, st.integers(1, 64), SIZES, st.integers(1, 64), SIZES)
def test_more_attention_never_takes_less(
    gpu: str, heads: tuple[float, float, int], batch: int, length: int, more: int, longer: int
) -> None:
    by = shipped_corrections()[gpu]

    def prefill(batch: int, length: int) -> float:
        tokens = float(batch * length)
        return float(prefill_attention_s(REAL, by, tokens, tokens * (length + 1) / 2, heads))

    def decode(batch: int, length: int) -> float:
        return float(decode_attention_s(REAL, by, float(batch), float(length), heads))

    for seconds in (prefill, decode):
        least = seconds(batch, length) * (1 - 1e-12)
        assert seconds(batch + more, length) >= least
        assert seconds(batch, length + longer) >= least


@given(SHIPPED, st.sampled_from(CORRECTIONS))
def test_each_correction_can_be_turned_off(gpu: str, name: str) -> None:
    by = shipped_corrections()[gpu]
    less = by.without(name)
    assert less.without(name) == less


def test_arrays_and_numbers_agree() -> None:
    by = shipped_corrections()["L40S"]
    rows = np.array([1.0, 100.0, 4000.0])
    together = matmul_s(REAL, by.matmul, rows, 4096.0, 4096.0, rows)
    apart = [matmul_s(REAL, by.matmul, one, 4096.0, 4096.0, one) for one in rows]
    assert together == pytest.approx(apart)
