"""Published measurements of kernels and layers (`data/README.md`), and how they are split.

Each set is split once into a part that `fit_corrections` may see and one that it never does, by
whole sizes or ranges, so that no point has a neighbour of its own kind on the other side:
- matrix products: held out are all whose n or k is 2,048, 5,120, 7,168, 12,288 or 51,200 (the
  hidden sizes of whole families of models);
- attention: all with 12, 24 or 40 query heads, and all with 128 sequences or more;
- all-reduce: messages of 64 to 256 KiB and of 4 to 16 MiB;
- layers of LLaMA-30B: both ends, that is decoding fewer than 16 or more than 100 sequences, and
  prompts of fewer than 1,000 or more than 4,000 tokens.

Besides the full range, each has the range that serving needs (`Measured.is_serving`): products with
weights of at least 16 MiB, n and k of at least 1,024; prompts of 128 tokens and more, at most
8,192 in a pass; contexts of 128 to 16,384 tokens, at most 512 sequences; at least 8 query heads on
a GPU; messages of 16 KiB to 128 MiB; of the layers, everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.catalogue import shipped_catalogue
from placement.hardware import Gpu
from placement.model import ModelSpec

FOLDER = Path(__file__).resolve().parent / "data" / "profiles"
Column = NDArray[np.float64]
Mask = NDArray[np.bool_]

# By the catalogue's effective figures: medians of large products, or as it states.
GPUS = {
    name: shipped_catalogue().gpu(name, "calibrated")
    for name in ("L40S", "A100-80", "A100-40", "L4")
}
LLAMA_30B = ModelSpec(
    name="LLaMA-30B",
    num_layers=60,
    hidden_size=6656,
    num_heads=52,
    num_kv_heads=52,
    head_dim=128,
    ffn_size=17920,
    vocab_size=32000,
)
_HELD_WIDTHS = (2048, 5120, 7168, 12288, 51200)
_HELD_HEADS = (12, 24, 40)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One set of measurements. columns: by name. seconds: the times. is_held_out, is_serving: see
    above. resolution_s: to which times were rounded, by point."""

    gpu: Gpu
    columns: Mapping[str, Column]
    seconds: Column
    is_held_out: Mask
    is_serving: Mask
    resolution_s: Column

    def only(self, mask: Mask) -> Measured:
        return Measured(
            gpu=self.gpu,
            columns={name: column[mask] for name, column in self.columns.items()},
            seconds=self.seconds[mask],
            is_held_out=self.is_held_out[mask],
            is_serving=self.is_serving[mask],
            resolution_s=self.resolution_s[mask],
        )

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]


def gemms(gpu: str) -> Measured:
    """Columns m, n, k."""
    found = _read(f"{_file(gpu)}_gemm.csv")
    m, n, k = found["m"], found["n"], found["k"]
    return _measured(
        gpu,
        found,
        held=np.isin(n, _HELD_WIDTHS) | np.isin(k, _HELD_WIDTHS),
        serving=(n >= 1024) & (k >= 1024) & (n * k >= 8 * 2**20) & (m <= 8192),
    )


def context_attention(gpu: str) -> Measured:
    """Columns batch, tokens (of each prompt), heads, kv_heads."""
    found = _read(f"{_file(gpu)}_context_attention.csv")
    tokens, batch = found["tokens"], found["batch"]
    return _measured(
        gpu,
        found,
        held=_held_attention(found),
        serving=(tokens >= 128) & (batch * tokens <= 8192) & (found["heads"] >= 8),
    )


def generation_attention(gpu: str) -> Measured:
    """Columns batch, tokens (of the cache of each sequence), heads, kv_heads."""
    found = _read(f"{_file(gpu)}_generation_attention.csv")
    tokens = found["tokens"]
    return _measured(
        gpu,
        found,
        held=_held_attention(found),
        serving=(tokens >= 128)
        & (tokens <= 16384)
        & (found["batch"] <= 512)
        & (found["heads"] >= 8),
    )


def all_reduces(gpu: str) -> Measured:
    """Columns gpus, bytes."""
    found = _read(f"{_file(gpu)}_all_reduce.csv")
    size = found["bytes"]
    held = ((size >= 2**16) & (size <= 2**18)) | ((size >= 2**22) & (size <= 2**24))
    return _measured(gpu, found, held=held, serving=(size >= 2**14) & (size <= 2**27))


def prompt_layers(gpu: str) -> Measured:
    """One layer of LLaMA-30B. Column tokens (of the batch)."""
    found = _read(f"{_file(gpu)}_llama30b_prompt.csv")
    tokens = found["tokens"]
    return _measured(
        gpu,
        found,
        held=(tokens < 1000) | (tokens > 4000),
        serving=tokens > 0,
        resolution_s=0.0 * tokens + 1e-3,
    )


def decode_layers(gpu: str) -> Measured:
    """One layer of LLaMA-30B. Column sequences."""
    found = _read(f"{_file(gpu)}_llama30b_decode.csv")
    sequences = found["sequences"]
    return _measured(
        gpu,
        found,
        held=(sequences < 16) | (sequences > 100),
        serving=sequences > 0,
        resolution_s=np.where(sequences > 100, 1e-3, 1e-4),
    )


def _held_attention(found: Mapping[str, Column]) -> Mask:
    return np.isin(found["heads"], _HELD_HEADS) | (found["batch"] >= 128)


def _measured(
    gpu: str,
    found: dict[str, Column],
    *,
    held: Mask,
    serving: Mask,
    resolution_s: Column | None = None,
) -> Measured:
    seconds = found.pop("us") * 1e-6 if "us" in found else found.pop("ms") * 1e-3
    return Measured(
        gpu=GPUS[gpu],
        columns=found,
        seconds=seconds,
        is_held_out=held,
        is_serving=serving,
        resolution_s=0.0 * seconds if resolution_s is None else resolution_s,
    )


def _file(gpu: str) -> str:
    return gpu.split("-")[0].lower()


def _read(name: str) -> dict[str, Any]:
    path = FOLDER / name
    head = path.read_text().splitlines()[0].split(",")
    values = np.loadtxt(path, delimiter=",", skiprows=1)
    return dict(zip(head, values.T, strict=True))
