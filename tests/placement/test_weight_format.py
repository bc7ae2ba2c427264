"""Bytes per element by format."""

from __future__ import annotations

from typing import Any

import pytest

from placement.errors import InvalidInput
from placement.weight_format import element_bytes


def config(**quantization: Any) -> dict[str, Any]:
    return {"quantization_config": quantization}


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 1.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 0.5 + 2.5 / 64),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}, 0.5 + 2.5 / 128),
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "fbgemm_fp8"}, 1.0),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 16384),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1.0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5 + 4 / 64),
        (
            {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_use_double_quant": True,
            },
            0.5 + (1 + 4 / 256) / 64,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}
                },
            },
            0.5 + 2 / 128,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
                },
            },
            1.0,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}
                },
            },
            0.5 + 1 / 16,
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5 + 1 / 16),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1.0),
    ],
)
def test_weights_are_counted_with_their_scales(
    quantization: dict[str, Any], expected: float
) -> None:
    sizes = element_bytes(config(**quantization))
    assert sizes.weight == pytest.approx(expected)
    assert (sizes.activation, sizes.kv) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (2, 2, 2)),
        ({"dtype": "float32"}, (4, 4, 4)),
        ({"dtype": "half"}, (2, 2, 2)),
        ({"quantization": "fp8"}, (1, 2, 2)),
        ({"quantization": "gptq_marlin"}, (0.5 + 2.5 / 128, 2, 2)),
        ({"kv_cache_dtype": "fp8"}, (2, 2, 1)),
        ({"kv_cache_dtype": "fp8_e5m2", "dtype": "float32"}, (4, 4, 1)),
    ],
)
def test_flags_of_vllm_override(flags: dict[str, Any], expected: tuple[float, ...]) -> None:
    sizes = element_bytes({"torch_dtype": "float32"}, **flags)
    assert (sizes.weight, sizes.activation, sizes.kv) == pytest.approx(expected)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
    ],
)
def test_a_checkpoint_may_ask_for_an_8_bit_cache(quantization: dict[str, Any]) -> None:
    assert element_bytes(config(**quantization)).kv == 1.0


@pytest.mark.parametrize(
    ("stated", "flags", "message"),
    [
        ({}, {"dtype": "bfloat61"}, "dtype: 'bfloat61' is not known; did you mean bfloat16"),
        ({}, {"quantization": "gtpq"}, "quantization: 'gtpq' is not known; did you mean gptq"),
        ({}, {"kv_cache_dtype": "fp9"}, "kv_cache_dtype: 'fp9' is not known; did you mean fp8"),
        (config(quant_method="awq"), {"quantization": "gptq"}, "quantised as awq, not as gptq"),
        (config(quant_method="magic"), {}, r"quant_method: 'magic' is not known"),
        (config(quant_method="awq", bits="four"), {}, "bits: 'four' is no number"),
        (
            config(quant_method="gptq", bits=-4),
            {},
            "config.bits: must lie between 1 and 32, not -4",
        ),
        (config(quant_method="gptq", bits=10**400), {}, "config.bits: must lie between 1 and 32"),
        (config(quant_method="gptq", group_size=0), {}, "config.group_size: must be -1, or"),
        (
            config(quant_method="fp8", weight_block_size=[0, 8]),
            {},
            "weight_block_size: must be two",
        ),
        (config(quant_method="fp8", weight_block_size=128), {}, "weight_block_size: must be two"),
        (
            config(quant_method="compressed-tensors", config_groups=[1]),
            {},
            "config_groups: must be an object",
        ),
        (
            config(quant_method="compressed-tensors", config_groups={"g": {"weights": 8}}),
            {},
            "config_groups.g.weights: must be an object",
        ),
        ({"quantization_config": 4}, {}, "quantization_config: must be an object"),
    ],
)
def test_unknown_formats_are_named(
    stated: dict[str, Any], flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        element_bytes(stated, **flags)
