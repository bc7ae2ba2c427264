"""Bytes per element of weights, activations and KV cache, from a checkpoint's formats.

Scales and zero points are counted as a share of each element; the small matrices that quantisers
leave alone (routers, norms, biases) are not. Embedding and LM head stay in the activations' format,
as in nearly every quantised checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from placement.errors import InvalidInput, shortened, unknown_name

_DTYPE_BYTES = {
    "half": 2.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "float": 4.0,
    "float32": 4.0,
}
# What a checkpoint may say of itself.
_CONFIG_DTYPES = ("auto", *_DTYPE_BYTES, "double", "float64", "float8_e4m3fn", "float8_e5m2")
_KV_BYTES = {
    **_DTYPE_BYTES,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_inc": 1.0,
    "fp8_ds_mla": 1.0,
}
_FP16, _FP32 = 2.0, 4.0
_MOST_BITS, _LARGEST_GROUP = 32, 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementBytes:
    """Bytes of one element of the layers' matrices, of activations (embedding and LM head too), and
    of the KV cache."""

    weight: float
    activation: float
    kv: float


def element_bytes(
    config: Mapping[str, Any],
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> ElementBytes:
    """What an engine keeps a checkpoint in.

    config: a config.json. dtype, quantization, kv_cache_dtype: vLLM's flags of these names.
    Raises InvalidInput for names that are not known, and for a quantization that is not the
    checkpoint's.
    """
    activation = _activation_bytes(config, dtype)
    stated = config.get("quantization_config") or config.get("compression_config")
    if stated is not None and not isinstance(stated, Mapping):
        raise InvalidInput("quantization_config", "must be an object")
    weight = _weight_bytes(stated, quantization, activation)
    if kv_cache_dtype == "auto":
        kv = 1.0 if stated is not None and _has_8_bit_cache(stated) else activation
    elif kv_cache_dtype in _KV_BYTES:
        kv = _KV_BYTES[kv_cache_dtype]
    else:
        raise unknown_name("kv_cache_dtype", kv_cache_dtype, ["auto", *_KV_BYTES])
    return ElementBytes(weight=weight, activation=activation, kv=kv)


def _activation_bytes(config: Mapping[str, Any], dtype: str) -> float:
    """vLLM serves every checkpoint in 16 bits, float32 ones too, unless it is told otherwise."""
    if dtype == "auto":
        for name in ("dtype", "torch_dtype"):
            stated = config.get(name)
            if stated is not None and str(stated).removeprefix("torch.") not in _CONFIG_DTYPES:
                raise unknown_name(f"config.json: {name}", str(stated), _CONFIG_DTYPES)
        return _FP16
    if dtype not in _DTYPE_BYTES:
        raise unknown_name("dtype", dtype, ["auto", *_DTYPE_BYTES])
    return _DTYPE_BYTES[dtype]


def _weight_bytes(stated: Mapping[str, Any] | None, wanted: str | None, activation: float) -> float:
    method = None if stated is None else str(stated.get("quant_method", "")).lower()
    if wanted is not None:
        family = _family(wanted)
        if family not in _METHODS:
            raise unknown_name("quantization", wanted, _METHODS)
        if method is not None and family != _family(method):
            raise InvalidInput(
                "quantization", f"the checkpoint is quantised as {method}, not as {wanted}"
            )
        return _METHODS[family](stated or {})
    if stated is None or method is None:
        return activation
    if _family(method) not in _METHODS:
        raise unknown_name("quantization_config.quant_method", method, _METHODS)
    return _METHODS[_family(method)](stated)


def _family(method: str) -> str:
    """The format behind vLLM's names for its kernels (`gptq_marlin` and `gptq` are one)."""
    name = method.lower().replace("-", "_").removesuffix("_marlin")
    return {"modelopt_fp4": "modelopt", "fbgemm_fp8": "fp8"}.get(name, name)


def _grouped(bits: float, group: float, scale_bytes: float, zero_bytes: float = 0.0) -> float:
    """Bytes of an element with a scale and a zero point for each `group`; −1: one per row, which
    is as good as none."""
    shared = (scale_bytes + zero_bytes) / group if group > 0 else 0.0
    return bits / 8 + shared


def _gptq_bytes(stated: Mapping[str, Any]) -> float:
    """GPTQ and AWQ: 16-bit scales and zero points of the weights' own width, per group of 128."""
    bits = _bits(stated, "bits", "w_bit", default=4)
    return _grouped(bits, _group(stated, "group_size", "q_group_size", default=128), 2, bits / 8)


def _fp8_bytes(stated: Mapping[str, Any]) -> float:
    """One byte; with blocks (DeepSeek) a 32-bit scale for each."""
    block = stated.get("weight_block_size")
    if not block:
        return _grouped(8, -1, _FP32)
    if not isinstance(block, list) or len(block) != 2 or not all(map(_is_size, block)):
        raise InvalidInput(
            "quantization_config.weight_block_size",
            f"must be two whole numbers of at least 1, not {shortened(block)}",
        )
    return _grouped(8, block[0] * block[1], _FP32)


def _bitsandbytes_bytes(stated: Mapping[str, Any]) -> float:
    """NF4 and FP4: a 32-bit scale per 64 elements, or an 8-bit one with double quantisation.
    INT8: one byte."""
    if stated.get("load_in_8bit"):
        return 1.0
    if stated.get("bnb_4bit_use_double_quant"):
        return _grouped(4, 64, 1 + _FP32 / 256)
    return _grouped(4, 64, _FP32)


def _compressed_tensors_bytes(stated: Mapping[str, Any]) -> float:
    """The first group's weights; 16-bit scales per group, or per channel or tensor (none)."""
    groups = _object(stated, "config_groups", at="quantization_config")
    name = next(iter(groups), None)
    at = f"quantization_config.config_groups.{name}"
    first = {} if name is None else _object(groups, name, at="quantization_config.config_groups")
    weights = _object(first, "weights", at=at) or {"num_bits": 8}
    bits = _bits(weights, "num_bits", default=8, at=f"{at}.weights")
    group = _group(weights, "group_size", default=-1, at=f"{at}.weights")
    if bits == 4 and weights.get("type") == "float":  # NVFP4, MXFP4: 8-bit scales
        return _grouped(4, group, 1)
    return _grouped(bits, group, 2, 0 if weights.get("symmetric", True) else bits / 8)


def _modelopt_bytes(stated: Mapping[str, Any]) -> float:
    """NVIDIA's FP8 (one byte) and NVFP4 (an 8-bit scale per 16 elements)."""
    algorithm = str(stated.get("quant_algo") or "FP8").upper()
    return _grouped(4, 16, 1) if "FP4" in algorithm else 1.0


_METHODS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "gptq": _gptq_bytes,
    "awq": _gptq_bytes,
    "fp8": _fp8_bytes,
    "bitsandbytes": _bitsandbytes_bytes,
    "compressed_tensors": _compressed_tensors_bytes,
    "modelopt": _modelopt_bytes,
}


def _has_8_bit_cache(stated: Mapping[str, Any]) -> bool:
    scheme = stated.get("kv_cache_scheme")
    bits = scheme.get("num_bits") if isinstance(scheme, Mapping) else None
    return bits == 8 or str(stated.get("kv_cache_quant_algo")).upper() == "FP8"


def _bits(
    stated: Mapping[str, Any], *names: str, default: float, at: str = "quantization_config"
) -> float:
    name, bits = _number(stated, *names, default=default, at=at)
    if not 1 <= bits <= _MOST_BITS:
        raise InvalidInput(f"{at}.{name}", f"must lie between 1 and {_MOST_BITS}, not {bits:g}")
    return bits


def _group(
    stated: Mapping[str, Any], *names: str, default: float, at: str = "quantization_config"
) -> float:
    """Elements that share a scale; -1: those of a row."""
    name, size = _number(stated, *names, default=default, at=at)
    if size != -1 and not 1 <= size <= _LARGEST_GROUP:
        raise InvalidInput(
            f"{at}.{name}", f"must be -1, or lie between 1 and {_LARGEST_GROUP}, not {size:g}"
        )
    return size


def _number(stated: Mapping[str, Any], *names: str, default: float, at: str) -> tuple[str, float]:
    """The first of the fields that is set, with its name."""
    for name in names:
        value = stated.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidInput(f"{at}.{name}", f"{shortened(value)} is no number")
            try:
                return name, float(value)
            except OverflowError:
                return name, math.inf
    return names[0], default


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value <= _LARGEST_GROUP


def _object(stated: Mapping[str, Any], name: str, *, at: str) -> Mapping[str, Any]:
    value = stated.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise InvalidInput(f"{at}.{name}", f"must be an object, not {shortened(value)}")
    return value or {}
