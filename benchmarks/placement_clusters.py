"""Models and clusters of the placement benchmarks, in one place until a catalogue has them.

GPUs: FLOPS and bandwidth are effective ones. L4, A10G and L40S follow from ShuntServe's remark that
calibration gives about 55 of an L4's 121 TFLOPS, and are else of the same share of the data sheets'
figures (about 45 % of FLOPS, 80 % of bandwidth); none was measured here, and the benchmarks of
speed do not depend on them much. Prices: AWS on demand, us-east-1, in round figures.
"""

from __future__ import annotations

from typing import Final

from placement.hardware import Gpu, Link, Offer, Shape
from placement.model import ModelSpec

_GIB: Final = 2**30
# What the driver leaves of a GPU's memory.
_VISIBLE: Final = 0.97

LLAMA_70B: Final = ModelSpec(
    name="Llama-3.1-70B-Instruct",
    num_layers=80,
    hidden_size=8192,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=28672,
    vocab_size=128256,
)
QWEN_32B: Final = ModelSpec(
    name="Qwen3-32B",
    num_layers=64,
    hidden_size=5120,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=25600,
    vocab_size=151936,
)
MODELS: Final = (LLAMA_70B, QWEN_32B)


def _gpu(name: str, memory_gib: float, tflops: float, gb_per_s: float) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=memory_gib * _GIB * _VISIBLE,
        flops=tflops * 1e12,
        bandwidth=gb_per_s * 1e9,
    )


_T4 = _gpu("T4", 16, 25, 260)
_V100 = _gpu("V100", 16, 90, 800)
_A10G = _gpu("A10G", 24, 60, 480)
_L4 = _gpu("L4", 24, 55, 240)
_L40S = _gpu("L40S", 48, 200, 700)
_A100 = _gpu("A100-40GB", 40, 200, 1250)
_A100_80 = _gpu("A100-80GB", 80, 200, 1600)
_H100 = _gpu("H100", 80, 550, 2700)
_H200 = _gpu("H200", 141, 550, 3900)

_PCIE = Link(latency_s=2e-5, bandwidth=12e9)
_NVLINK = Link(latency_s=1e-5, bandwidth=200e9)


def _shape(
    name: str, gpu: Gpu, num_gpus: int, price: float, gbit_per_s: float, intra: Link = _PCIE
) -> Shape:
    inter = Link(latency_s=1e-4, bandwidth=gbit_per_s * 1e9 / 8)
    return Shape(
        name=name,
        gpu=gpu,
        num_gpus=num_gpus,
        intra=intra,
        inter=inter,
        price_usd_per_hour=price,
    )


# 76 GPUs of seven types on fifteen instances, one of each: the figures that the paper gives of its
# second cluster, whose list it does not give.
SHAPES_76: Final = (
    _shape("g4dn.xlarge", _T4, 1, 0.526, 10),
    _shape("g4dn.12xlarge", _T4, 4, 3.912, 50),
    _shape("g4dn.metal", _T4, 8, 7.824, 100),
    _shape("g5.xlarge", _A10G, 1, 1.006, 10),
    _shape("g5.12xlarge", _A10G, 4, 5.672, 40),
    _shape("g5.48xlarge", _A10G, 8, 16.288, 100),
    _shape("g6.xlarge", _L4, 1, 0.805, 10),
    _shape("g6.12xlarge", _L4, 4, 4.602, 40),
    _shape("g6.48xlarge", _L4, 8, 13.35, 100),
    _shape("g6e.xlarge", _L40S, 1, 1.861, 20),
    _shape("g6e.12xlarge", _L40S, 4, 10.493, 100),
    _shape("g6e.48xlarge", _L40S, 8, 30.131, 400),
    _shape("p3.16xlarge", _V100, 8, 24.48, 25, _NVLINK),
    _shape("p4d.24xlarge", _A100, 8, 32.773, 400, _NVLINK),
    _shape("p5.48xlarge", _H100, 8, 98.32, 3200, _NVLINK),
)
# Twenty types for the growth curve.
SHAPES_20: Final = (
    *SHAPES_76,
    _shape("p3.2xlarge", _V100, 1, 3.06, 10, _NVLINK),
    _shape("p3.8xlarge", _V100, 4, 12.24, 10, _NVLINK),
    _shape("p4de.24xlarge", _A100_80, 8, 40.966, 400, _NVLINK),
    _shape("p5.4xlarge", _H100, 1, 12.29, 100, _NVLINK),
    _shape("p5e.48xlarge", _H200, 8, 108.152, 3200, _NVLINK),
)
_BY_NAME: Final = {shape.name: shape for shape in SHAPES_20}


def offer(name: str, count: int) -> Offer:
    shape = _BY_NAME[name]
    price = shape.price_usd_per_hour
    assert price is not None, "all shapes here have one"
    return Offer(shape=shape, count=count, price_usd_per_hour=price)


def cluster_24() -> list[Offer]:
    """The paper's cluster: 24 GPUs on nine instances of three types."""
    return [offer("g6.12xlarge", 3), offer("g5.12xlarge", 2), offer("g6e.xlarge", 4)]


def cluster_76() -> list[Offer]:
    return [offer(shape.name, 1) for shape in SHAPES_76]


def cluster_of(num_instances: int) -> list[Offer]:
    """So many instances, as evenly as may be over twenty types."""
    share, rest = divmod(num_instances, len(SHAPES_20))
    counts = [share + (index < rest) for index in range(len(SHAPES_20))]
    return [
        offer(shape.name, count) for shape, count in zip(SHAPES_20, counts, strict=True) if count
    ]
