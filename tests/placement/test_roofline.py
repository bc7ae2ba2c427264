"""Table 2 and equations 1 to 3, against values computed by hand.

The model of these tests: H = 64, 4 heads of 16, 2 KV heads (H_kv = 32), H_ffn = 160, V = 1000, one
byte per element so that elements are bytes. B = 3, S_in = 10, S_out = 5.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from placement.hardware import Gpu, Link
from placement.model import Experts, LatentAttention, ModelSpec
from placement.roofline import (
    EngineTraits,
    Operation,
    Pass,
    all_reduce_s,
    decode_pass,
    hop_s,
    layer_operations,
    logits_operation,
    mean_decode_context,
    prefill_pass,
    roofline_s,
)

TABLE = EngineTraits(is_attention_causal=False, computes_all_logits=True)
ENGINE = EngineTraits()
MODEL = ModelSpec(
    name="hand",
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=160,
    vocab_size=1000,
    weight_bytes=1,
    activation_bytes=1,
    kv_bytes=1,
)
BATCH, INPUT, OUTPUT = 3, 10, 5

# (FLOPs, elements) of the prefill at TP 1 and TP 2. B · S_in = 30 tokens.
PREFILL = {
    # 3(2·10·64² + 4·10·64·32) = 3(81,920 + 81,920); 30·64 + 64² + 2·64·32 = 1,920 + 8,192
    "qkv": ((491_520, 10_112), (245_760, 1_920 + 4_096)),
    # 4·3·10²·64; 30·64 + 2·30·32 = 1,920 + 1,920
    "attention": ((76_800, 3_840), (38_400, 1_920)),
    # 2·30·64²; 30·64 + 64² = 1,920 + 4,096
    "output": ((245_760, 6_016), (122_880, 3_008)),
    # 4·30·64·160; 30·64 + 2·64·160 = 1,920 + 20,480 (only the matrices are split)
    "up_gate": ((1_228_800, 22_400), (614_400, 1_920 + 10_240)),
    # 2·30·64·160; 30·160 + 64·160 = 4,800 + 10,240
    "down": ((614_400, 15_040), (307_200, 7_520)),
    # 2·30·64·1000; 30·64 + 64·1000 = 1,920 + 64,000 (only the matrix is split)
    "logits": ((3_840_000, 65_920), (1_920_000, 1_920 + 32_000)),
}
# The same of all five decode steps. B · S_out = 15 tokens, Σ_{t=1..5} (10 + t) = 65.
DECODE = {
    # 15(2·64² + 4·64·32) = 15·16,384; 5(3·64 + 8,192) = 5·8,384
    "qkv": ((245_760, 41_920), (122_880, 5 * (192 + 4_096))),
    # 4·3·65·64; 5·3·64 + 2·3·65·32 = 960 + 12,480
    "attention": ((49_920, 13_440), (24_960, 6_720)),
    # 2·15·64²; 5(192 + 4,096)
    "output": ((122_880, 21_440), (61_440, 10_720)),
    # 4·15·64·160; 5(192 + 20,480)
    "up_gate": ((614_400, 103_360), (307_200, 5 * (192 + 10_240))),
    # 2·15·64·160; 5(480 + 10,240)
    "down": ((307_200, 53_600), (153_600, 26_800)),
    # 2·15·64·1000; 5(192 + 64,000)
    "logits": ((1_920_000, 320_960), (960_000, 5 * (192 + 32_000))),
}


def operations(model: ModelSpec, tp: int, work: Pass) -> dict[str, Operation]:
    listed = [*layer_operations(model, tp, work), logits_operation(model, tp, work)]
    return {operation.name: operation for operation in listed}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", PREFILL)
def test_prefill_row_of_table_2(name: str, tp: int) -> None:
    found = operations(MODEL, tp, prefill_pass(MODEL, BATCH, INPUT, TABLE))[name]
    assert (found.flops, found.bytes) == PREFILL[name][tp - 1]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", DECODE)
def test_decode_row_of_table_2(name: str, tp: int) -> None:
    context = mean_decode_context(MODEL, INPUT, OUTPUT)
    found = operations(MODEL, tp, decode_pass(BATCH, context))[name]
    expected = DECODE[name][tp - 1]
    assert (OUTPUT * found.flops, OUTPUT * found.bytes) == expected


def test_a_batch_may_be_an_array() -> None:
    found = operations(MODEL, 1, prefill_pass(MODEL, np.array([3.0, 6.0]), INPUT, TABLE))
    assert list(found["qkv"].flops) == [491_520, 983_040]
    assert list(found["attention"].bytes) == [3_840, 7_680]


def test_matrix_products_state_their_share_as_their_shape() -> None:
    found = operations(MODEL, 2, prefill_pass(MODEL, BATCH, INPUT, TABLE))
    assert {name: one.shape for name, one in found.items()} == {
        "qkv": (30, 64 / 2 + 2 * 16, 64),
        "attention": None,
        "output": (30, 64, 32),
        "up_gate": (30, 160, 64),
        "down": (30, 64, 80),
        "logits": (30, 500, 64),
    }


def test_each_kind_of_element_counts_at_its_own_size() -> None:
    # Weights of half a byte, activations of two, a cache of one.
    model = dataclasses.replace(MODEL, weight_bytes=0.5, activation_bytes=2, kv_bytes=1)
    found = operations(model, 1, prefill_pass(model, BATCH, INPUT, TABLE))
    assert found["qkv"].bytes == 1_920 * 2 + 8_192 * 0.5
    assert found["attention"].bytes == 1_920 * 2 + 1_920 * 1
    # The LM head is not quantised.
    assert found["logits"].bytes == 1_920 * 2 + 64_000 * 2


def test_query_width_is_heads_times_head_dim_not_hidden_size() -> None:
    # As in Qwen3-32B: 4 heads of 32 over a hidden size of 64, so queries are 128 wide; H_kv = 64.
    model = dataclasses.replace(MODEL, head_dim=32)
    found = operations(model, 1, prefill_pass(model, BATCH, INPUT, TABLE))
    assert found["qkv"].flops == 2 * 30 * 64 * (128 + 2 * 64)  # 983,040
    assert found["qkv"].bytes == 1_920 + 64 * 256
    assert found["attention"].flops == 4 * 3 * 100 * 128  # 153,600
    assert found["attention"].bytes == 30 * 128 + 2 * 30 * 64
    assert found["output"].flops == 2 * 30 * 128 * 64
    assert found["output"].bytes == 30 * 128 + 128 * 64


def test_engines_compute_the_logits_of_the_last_position_only() -> None:
    found = operations(MODEL, 1, prefill_pass(MODEL, BATCH, INPUT, ENGINE))
    assert found["logits"].flops == 2 * 3 * 64 * 1000
    assert found["logits"].bytes == 3 * 64 + 64_000


def test_causal_attention_computes_half_the_pairs_and_the_diagonal() -> None:
    found = operations(MODEL, 1, prefill_pass(MODEL, BATCH, INPUT, ENGINE))
    # 3 prompts, 10·11/2 = 55 pairs each, 4·64 FLOPs a pair.
    assert found["attention"].flops == 3 * 55 * 4 * 64
    assert found["attention"].bytes == 3_840


def test_kv_heads_fewer_than_tp_are_replicated() -> None:
    found = operations(MODEL, 4, prefill_pass(MODEL, BATCH, INPUT, TABLE))
    # One head of 16 queries, and one whole KV head (of two) on each of four GPUs.
    assert found["qkv"].flops == 2 * 30 * 64 * (16 + 2 * 16)
    assert found["attention"].bytes == 30 * 16 + 2 * 30 * 16


def test_a_window_bounds_what_is_attended_to() -> None:
    model = dataclasses.replace(MODEL, sliding_window=4, num_sliding_layers=4)
    # Σ min(i, 4) for i = 1..10: 1 + 2 + 3 + 7·4 = 34.
    assert prefill_pass(model, 1, INPUT, ENGINE).attention_pairs == 34
    assert prefill_pass(model, 1, INPUT, TABLE).attention_pairs == 10 * 4
    # A prompt that is shorter than the window: 1 + 2 + 3.
    assert prefill_pass(model, 1, 3, ENGINE).attention_pairs == 6
    # Decode contexts 11..15 are all cut to 4.
    assert mean_decode_context(model, INPUT, OUTPUT) == 4


def test_layers_with_and_without_a_window_count_as_their_mean() -> None:
    model = dataclasses.replace(MODEL, sliding_window=4, num_sliding_layers=3)
    # Three of four layers with 34 pairs, one with 55.
    assert prefill_pass(model, 1, INPUT, ENGINE).attention_pairs == (3 * 34 + 55) / 4
    # Mean context 13 without the window.
    assert mean_decode_context(model, INPUT, OUTPUT) == (3 * 4 + 13) / 4


def test_experts_compute_by_the_active_and_read_by_the_touched() -> None:
    experts = Experts(num=8, num_per_token=2, size=40, shared_size=20)
    model = dataclasses.replace(MODEL, experts=experts)
    one = operations(model, 1, decode_pass(1, 10))
    # Active: 2·40 + 20 = 100 wide. Touched by one token: the same.
    assert one["up_gate"].flops == pytest.approx(2 * 64 * 2 * 100)
    assert one["up_gate"].bytes == pytest.approx(64 + 2 * 64 * 100)
    assert one["down"].flops == pytest.approx(2 * 100 * 64)
    assert one["down"].bytes == pytest.approx(100 + 64 * 100)
    two = operations(model, 1, decode_pass(2, 10))
    # Two tokens miss an expert with (3/4)², so 8·7/16 = 3.5 experts are touched: 3.5·40 + 20 = 160.
    assert two["up_gate"].bytes == pytest.approx(2 * 64 + 2 * 64 * 160)
    # On two GPUs each has half of every expert.
    half = operations(model, 2, decode_pass(1, 10))
    assert half["down"].flops == pytest.approx(100 * 64)
    assert half["down"].bytes == pytest.approx(50 + 64 * 50)


def test_layers_without_experts_keep_their_dense_ffn() -> None:
    experts = Experts(num=8, num_per_token=2, size=40, num_dense_layers=1)
    model = dataclasses.replace(MODEL, experts=experts)
    found = operations(model, 1, decode_pass(1, 10))
    # One of four layers 160 wide, three with 2·40 active.
    assert found["down"].flops == pytest.approx(2 * 64 * (160 + 3 * 80) / 4)


def test_latent_attention_runs_over_the_latent_vectors() -> None:
    latent = LatentAttention(q_rank=24, kv_rank=32, nope_dim=12, rope_dim=8, value_dim=16)
    model = dataclasses.replace(MODEL, latent=latent)
    found = operations(model, 1, decode_pass(3, 10))
    # Query: 64·24 + 24·4·20 = 3,456. Key and value: 64·40 + 32·4·(12 + 16) = 6,144.
    assert found["qkv"].flops == 2 * 3 * 9_600
    assert found["qkv"].bytes == 3 * 64 + 9_600
    # A pair: scores over 32 + 8, values over 32, for each of 4 heads; a cached token has 40.
    assert found["attention"].flops == 2 * 30 * 4 * 72
    assert found["attention"].bytes == 3 * 4 * 40 + 30 * 40
    assert found["output"].flops == 2 * 3 * 4 * 16 * 64
    # Every GPU reads the whole latent cache.
    split = operations(model, 2, decode_pass(3, 10))
    assert split["attention"].flops == 2 * 30 * 2 * 72
    assert split["attention"].bytes == 3 * 2 * 40 + 30 * 40


def test_an_operation_takes_the_longer_of_computing_and_reading() -> None:
    gpu = Gpu(name="hand", memory_bytes=1, flops=1e6, bandwidth=1e3)
    work = decode_pass(1, 1)
    assert roofline_s(Operation(name="x", flops=2e6, bytes=1e3), work, gpu) == 2.0
    assert roofline_s(Operation(name="x", flops=2e6, bytes=5e3), work, gpu) == 5.0


def test_a_hop_takes_its_delay_and_its_transfer() -> None:
    # 3·10 tokens of 64 elements of 2 bytes: 3,840 bytes at 1,000 bytes/s, and 0.5 s.
    model = dataclasses.replace(MODEL, activation_bytes=2)
    work = prefill_pass(model, BATCH, INPUT, TABLE)
    assert hop_s(model, work, Link(latency_s=0.5, bandwidth=1_000)) == pytest.approx(4.34)


@pytest.mark.parametrize(
    ("tp", "seconds"),
    [
        (1, 0.0),
        # 4·(0.5 + 3,840/(2·1,000))·1
        (2, 9.68),
        # 4·(0.5 + 3,840/(4·1,000))·3
        (4, 17.52),
    ],
)
def test_two_ring_all_reduces_a_layer(tp: int, seconds: float) -> None:
    model = dataclasses.replace(MODEL, activation_bytes=2)
    work = prefill_pass(model, BATCH, INPUT, TABLE)
    assert all_reduce_s(model, tp, work, Link(latency_s=0.5, bandwidth=1_000)) == pytest.approx(
        seconds
    )
