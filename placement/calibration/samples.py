"""What calibration measures: each kind of operation with its sizes and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """(m × k) by (k × n), weights from memory."""

    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """tokens: of each prompt, or cached of each sequence of which one more token is computed."""

    is_prefill: bool
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_size: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The smallest operation."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    num_gpus: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePass:
    """One pass of the engine over a model of `ENGINE_DIMENSIONS` with `layers` layers.

    tokens: of each prompt, or cached of each sequence.
    """

    layers: int
    is_prefill: bool
    batch: int
    tokens: int
    seconds: float


Sample = Matmul | Attention | Launch | AllReduce | EnginePass
_KINDS: dict[str, type[Sample]] = {
    kind.__name__: kind for kind in (Matmul, Attention, Launch, AllReduce, EnginePass)
}


def sample_json(sample: Sample) -> dict[str, Any]:
    return {"kind": type(sample).__name__, **asdict(sample)}


def sample_from_json(value: Mapping[str, Any]) -> Sample:
    fields = dict(value)
    return _KINDS[fields.pop("kind")](**fields)
