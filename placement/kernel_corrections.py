"""What measured kernels do otherwise than the roofline, as a few named parameters per GPU.

All rates are shares of the GPU's own effective figures (`Gpu.flops`, `Gpu.bandwidth`), so that a
profile with other figures scales them, and a GPU that nobody measured can borrow them from one that
is built alike. `data/corrections.json` keeps what was fitted, on which measurements;
`benchmarks/fit_corrections.py` reproduces it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from placement.errors import unknown_name


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulCorrections:
    """How long a matrix product takes. See `kernels.matmul_s`.

    flops_share: rate inside a tile without overheads, of `Gpu.flops`.
    bandwidth_share: achievable when memory bounds, of `Gpu.bandwidth`.
    launch_s: floor of one kernel.
    tile_overhead: c in a tile's efficiency a·b / (a·b + c·(a + b)): its arithmetic intensity.
    depth_overhead: elements of k that beginning and ending a tile cost.
    sharpness: p of (compute^p + memory^p)^(1/p); infinite is the roofline's max.
    num_processors: SMs over which tiles are spread in whole waves; 0: no waves.
    solo_rate: of one processor that works alone, in parts of its rate when all do: where power
        limits a GPU, clocks rise as processors idle.
    """

    flops_share: float = 1.0
    bandwidth_share: float = 1.0
    launch_s: float = 0.0
    tile_overhead: float = 0.0
    depth_overhead: float = 0.0
    sharpness: float = 1e6
    num_processors: int = 0
    solo_rate: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAttentionCorrections:
    """How long attention of prompts takes. See `kernels.prefill_attention_s`.

    key_overhead: keys that beginning and ending a tile of queries cost.
    kv_traffic: elements moved for each cached element (keys and values are written, too).
    solo_rate: as of products.
    """

    flops_share: float = 1.0
    bandwidth_share: float = 1.0
    launch_s: float = 0.0
    key_overhead: float = 0.0
    kv_traffic: float = 2.0
    solo_rate: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttentionCorrections:
    """How long attention of single tokens takes. See `kernels.decode_attention_s`.

    unit_s: for each sequence and KV head, over the whole GPU.
    split_s: for merging the parts of contexts of 256 tokens and more, where heads are grouped.
    gather_s: for regrouping queries, where several sequences have several grouped KV heads.
    stream_share: of `Gpu.bandwidth`, how fast one KV head of one sequence is read, where each query
        head has its own (`alone`) and where they are grouped (`grouped`: in parts, in parallel).
    """

    bandwidth_share: float = 1.0
    launch_s: float = 0.0
    unit_s: float = 0.0
    split_s: float = 0.0
    gather_s: float = 0.0
    alone_stream_share: float = 1e3
    grouped_stream_share: float = 1e3
    sharpness: float = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseCorrections:
    """What follows each matrix product: norm and residual, rotation, activation.

    launch_s: of what follows one product, with the engine's gaps. traffic: elements moved for each
    element of the product (read it, read the residual, write both).
    """

    launch_s: float = 0.0
    traffic: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCorrections:
    """A last-level cache, as micro-benchmarks see it that repeat one kernel on the same data.

    An engine's layers push each other out: estimates take none of this. num_bytes: what stays.
    bandwidth_share: from there, of `Gpu.bandwidth`.
    """

    num_bytes: float = 0.0
    bandwidth_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCorrections:
    """All-reduce over so many GPUs: the faster of two protocols, each α + bytes / β."""

    short_latency_s: float
    short_bandwidth: float
    long_latency_s: float
    long_bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """Everything of one GPU. step_s: of each pass besides its operations, on the last stage.

    all_reduce: by number of GPUs. source: what it was fitted on, or whose it borrows.
    """

    matmul: MatmulCorrections = MatmulCorrections()
    prefill_attention: PrefillAttentionCorrections = PrefillAttentionCorrections()
    decode_attention: DecodeAttentionCorrections = DecodeAttentionCorrections()
    elementwise: ElementwiseCorrections = ElementwiseCorrections()
    cache: CacheCorrections = CacheCorrections()
    all_reduce: Mapping[int, CollectiveCorrections] | None = None
    step_s: float = 0.0
    source: str = "none"

    def without(self, name: str) -> Corrections:
        """These corrections with one of `CORRECTIONS` turned off."""
        if name not in _NEUTRAL:
            raise unknown_name("correction", name, _NEUTRAL)
        return _NEUTRAL[name](self)

    def as_json(self) -> dict[str, Any]:
        """As `corrections_from_json` reads it."""
        return asdict(self)


def _matmul(**changes: Any) -> Callable[[Corrections], Corrections]:
    return lambda base: replace(base, matmul=replace(base.matmul, **changes))


def _without_launch(base: Corrections) -> Corrections:
    return replace(
        base,
        matmul=replace(base.matmul, launch_s=0.0),
        prefill_attention=replace(base.prefill_attention, launch_s=0.0),
        decode_attention=replace(base.decode_attention, launch_s=0.0, split_s=0.0, gather_s=0.0),
    )


def _without_solo_rate(base: Corrections) -> Corrections:
    return replace(
        base,
        matmul=replace(base.matmul, solo_rate=1.0),
        prefill_attention=replace(base.prefill_attention, solo_rate=1.0),
    )


def _without_prefill_attention(base: Corrections) -> Corrections:
    return replace(base, prefill_attention=PrefillAttentionCorrections())


def _without_decode_attention(base: Corrections) -> Corrections:
    return replace(base, decode_attention=DecodeAttentionCorrections())


_NEUTRAL: dict[str, Callable[[Corrections], Corrections]] = {
    "launch_floor": _without_launch,
    "tile_efficiency": _matmul(tile_overhead=0.0, depth_overhead=0.0),
    "wave_quantisation": _matmul(num_processors=0),
    "solo_rate": _without_solo_rate,
    "soft_roofline": _matmul(sharpness=1e6),
    "memory_bandwidth": _matmul(bandwidth_share=1.0),
    "prefill_attention": _without_prefill_attention,
    "decode_attention": _without_decode_attention,
    "elementwise": lambda base: replace(base, elementwise=ElementwiseCorrections()),
    "all_reduce": lambda base: replace(base, all_reduce=None),
    "step": lambda base: replace(base, step_s=0.0),
}
CORRECTIONS = tuple(_NEUTRAL)


def corrections_from_json(value: Mapping[str, Any]) -> Corrections:
    """Corrections as `as_json` gives them; groups that are left out are neutral."""
    collectives = value.get("all_reduce")
    return Corrections(
        matmul=MatmulCorrections(**value.get("matmul", {})),
        prefill_attention=PrefillAttentionCorrections(**value.get("prefill_attention", {})),
        decode_attention=DecodeAttentionCorrections(**value.get("decode_attention", {})),
        elementwise=ElementwiseCorrections(**value.get("elementwise", {})),
        cache=CacheCorrections(**value.get("cache", {})),
        all_reduce={int(count): CollectiveCorrections(**one) for count, one in collectives.items()}
        if collectives
        else None,
        step_s=value.get("step_s", 0.0),
        source=value.get("source", "the user's file"),
    )


@cache
def shipped_corrections() -> Mapping[str, Corrections]:
    """By GPU: fitted ones, and those that borrow them, with their own number of SMs."""
    text = (resources.files("placement") / "data" / "corrections.json").read_text("utf-8")
    document = json.loads(text)
    found = {name: corrections_from_json(one) for name, one in document["fitted"].items()}
    for name, borrowed in document["borrowed"].items():
        base = found[borrowed["from"]]
        found[name] = replace(
            base,
            matmul=replace(base.matmul, num_processors=borrowed["num_processors"]),
            all_reduce=None,
            source=f"borrowed from {borrowed['from']}: {borrowed['reason']}",
        )
    return found
