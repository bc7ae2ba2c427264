"""From measurements of a device to its effective figures and corrections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from placement.calibration.engine import engine_model
from placement.calibration.samples import (
    AllReduce,
    Attention,
    EnginePass,
    Launch,
    Matmul,
    Sample,
)
from placement.corrections import operation_s
from placement.fit import Vector, fit_positive, mean_log_error
from placement.hardware import Gpu, Link
from placement.kernel_corrections import (
    Corrections,
    DecodeAttentionCorrections,
    ElementwiseCorrections,
    MatmulCorrections,
    PrefillAttentionCorrections,
)
from placement.kernels import decode_attention_s, matmul_s, prefill_attention_s
from placement.roofline import (
    EngineTraits,
    decode_pass,
    layer_operations,
    logits_operation,
    prefill_pass,
)

# Elements moved after a product for each of its elements: rotation, residual and norm, activation.
_ELEMENTWISE_TRAFFIC = 3.0
_COMPUTE_BOUND_ROWS = 512
_CPU_COMPUTE_BOUND_ROWS = 128
_ELEMENT_BYTES = 2.0

# Nothing runs at more than so many times the rate that was measured of the device.
_MOST_SHARE = 2.0
# Above this, p of (compute^p + memory^p)^(1/p) is the roofline's max.
_MOST_SHARPNESS = 64.0
# Elements moved after a product for each of its elements, eager layers with all their copies.
_MOST_TRAFFIC = 100.0
# No fit is further off on an idle machine. Attention's own time is small beside that of products,
# and its formula is rougher.
_MOST_ERRORS = {"products": 0.25, "attention": 0.5, "engine": 0.25}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What was found. errors: of each fit, the mean of |log(estimate / measurement)|.

    link: between the GPUs of this machine, None where there is one only.
    """

    flops: float
    bandwidth: float
    corrections: Corrections
    errors: dict[str, float]
    link: Link | None

    @property
    def doubts(self) -> dict[str, float]:
        """Errors of fits that cannot be trusted, with the most that each may be off: what was
        measured contradicts itself."""
        return {
            name: most for name, most in _MOST_ERRORS.items() if self.errors.get(name, 0) > most
        }


def fit_device(
    samples: Sequence[Sample], *, num_processors: int, is_cpu: bool, source: str
) -> Calibrated:
    """The figures of a device. num_processors: SMs of a GPU; 0 for a CPU."""
    products = [one for one in samples if isinstance(one, Matmul)]
    gpu = Gpu(
        name="",
        memory_bytes=0.0,
        flops=_compute_rate(products, is_cpu=is_cpu),
        bandwidth=_memory_rate(products),
    )
    launch = median(one.seconds for one in samples if isinstance(one, Launch))
    base = Corrections(
        elementwise=ElementwiseCorrections(launch_s=launch, traffic=_ELEMENTWISE_TRAFFIC),
        source=source,
    )
    errors: dict[str, float] = {}
    base, errors["products"] = _fit_products(gpu, base, products, launch, num_processors)
    attentions = [one for one in samples if isinstance(one, Attention)]
    base, errors["attention"] = _fit_attention(gpu, base, attentions, launch)
    passes = [one for one in samples if isinstance(one, EnginePass)]
    if passes:
        base, errors["engine"] = _fit_passes(gpu, base, passes)
    return Calibrated(
        flops=gpu.flops,
        bandwidth=gpu.bandwidth,
        corrections=base,
        errors=errors,
        link=_link([one for one in samples if isinstance(one, AllReduce)]),
    )


def _compute_rate(products: Sequence[Matmul], *, is_cpu: bool) -> float:
    """Median rate of products that compute bounds (the paper's calibration, section 7.1.5)."""
    rows = _CPU_COMPUTE_BOUND_ROWS if is_cpu else _COMPUTE_BOUND_ROWS
    bound = [one for one in products if one.m >= rows]
    return median(2.0 * one.m * one.n * one.k / one.seconds for one in bound)


def _memory_rate(products: Sequence[Matmul]) -> float:
    """Median rate of the products of one row with the larger half of the matrices."""
    rows = sorted((one for one in products if one.m == 1), key=lambda one: one.n * one.k)
    larger = rows[len(rows) // 2 :]
    return median(_ELEMENT_BYTES * one.n * one.k / one.seconds for one in larger)


def _fit_products(
    gpu: Gpu, base: Corrections, products: Sequence[Matmul], launch: float, num_processors: int
) -> tuple[Corrections, float]:
    m, n, k = (np.array([getattr(one, name) for one in products], float) for name in "mnk")
    num_bytes = _ELEMENT_BYTES * (m * k + n * k)

    def at(values: Vector) -> Corrections:
        flops, bandwidth, start, depth, sharpness, tile = map(float, values)
        return replace(
            base,
            matmul=MatmulCorrections(
                flops_share=flops,
                bandwidth_share=bandwidth,
                launch_s=start,
                tile_overhead=tile if num_processors else 0.0,
                depth_overhead=depth,
                sharpness=sharpness,
                num_processors=num_processors,
            ),
        )

    def estimate(by: Corrections) -> Vector:
        return np.asarray(matmul_s(gpu, by.matmul, m, n, k, num_bytes), dtype=np.float64)

    start = [1.1, 1.0, launch, 50.0, 3.0, 20.0]
    seconds = _seconds(products)
    longest = float(seconds.max())
    most = [_MOST_SHARE, _MOST_SHARE, longest, float(k.max()), _MOST_SHARPNESS, float(n.max())]
    return _fitted(at, estimate, start, seconds, most)


def _fit_attention(
    gpu: Gpu, base: Corrections, samples: Sequence[Attention], launch: float
) -> tuple[Corrections, float]:
    prefills = [one for one in samples if one.is_prefill]
    decodes = [one for one in samples if not one.is_prefill]

    def at(values: Vector) -> Corrections:
        flops, traffic_rate, prefill_launch, bandwidth, decode_launch, unit = map(float, values)
        return replace(
            base,
            prefill_attention=PrefillAttentionCorrections(
                flops_share=flops, bandwidth_share=traffic_rate, launch_s=prefill_launch
            ),
            decode_attention=DecodeAttentionCorrections(
                bandwidth_share=bandwidth, launch_s=decode_launch, unit_s=unit
            ),
        )

    def estimate(by: Corrections) -> Vector:
        prompts = [
            prefill_attention_s(
                gpu,
                by,
                one.batch * one.tokens,
                one.batch * one.tokens * (one.tokens + 1) / 2,
                (one.heads, one.kv_heads, one.head_size),
            )
            for one in prefills
        ]
        tokens = [
            decode_attention_s(
                gpu, by, one.batch, one.tokens, (one.heads, one.kv_heads, one.head_size)
            )
            for one in decodes
        ]
        return np.array([*prompts, *tokens], dtype=np.float64)

    start = [0.5, 1.0, launch, 0.8, launch, launch / 100]
    seconds = _seconds([*prefills, *decodes])
    longest = float(seconds.max())
    most = [_MOST_SHARE, _MOST_SHARE, longest, _MOST_SHARE, longest, longest]
    return _fitted(at, estimate, start, seconds, most)


def _fit_passes(
    gpu: Gpu, base: Corrections, passes: Sequence[EnginePass]
) -> tuple[Corrections, float]:
    """What follows each product, the engine's own attention, and what a pass costs besides."""

    def at(values: Vector) -> Corrections:
        follow, traffic, flops, bandwidth, unit, step = map(float, values)
        return replace(
            base,
            elementwise=ElementwiseCorrections(launch_s=follow, traffic=traffic),
            prefill_attention=replace(base.prefill_attention, flops_share=flops, launch_s=0.0),
            decode_attention=DecodeAttentionCorrections(bandwidth_share=bandwidth, unit_s=unit),
            step_s=step,
        )

    def estimate(by: Corrections) -> Vector:
        return np.array([pass_s(gpu, by, one) for one in passes])

    start = [5e-5, 3.0, base.prefill_attention.flops_share, 0.8, 1e-6, 1e-3]
    seconds = _seconds(passes)
    longest = float(seconds.max())
    most = [longest, _MOST_TRAFFIC, _MOST_SHARE, _MOST_SHARE, longest, longest]
    return _fitted(at, estimate, start, seconds, most)


def pass_s(gpu: Gpu, by: Corrections, one: EnginePass) -> float:
    """The estimate for a pass over the calibration's own model."""
    model = engine_model(one.layers)
    work = (
        prefill_pass(model, float(one.batch), one.tokens, EngineTraits())
        if one.is_prefill
        else decode_pass(float(one.batch), float(one.tokens))
    )
    layer = sum(
        float(operation_s(item, work, gpu, by)) for item in layer_operations(model, 1, work)
    )
    logits = float(operation_s(logits_operation(model, 1, work), work, gpu, by))
    return one.layers * layer + logits


def _link(samples: Sequence[AllReduce]) -> Link | None:
    """α and β of equation 3: t = 2 · (α + N / (P · β)) · (P − 1)."""
    if not samples:
        return None
    size = np.array([one.num_bytes for one in samples], float)
    count = np.array([one.num_gpus for one in samples], float)

    def estimate(values: Vector) -> Vector:
        latency, bandwidth = values
        return np.asarray(2.0 * (latency + size / (count * bandwidth)) * (count - 1.0))

    seconds = _seconds(samples)
    start = [float(seconds.min()) / 2, float((size / seconds).max())]
    values, _ = fit_positive(lambda x: mean_log_error(estimate(x), seconds), start)
    return Link(latency_s=float(values[0]), bandwidth=float(values[1]))


def _fitted(
    at: Callable[[Vector], Corrections],
    estimate: Callable[[Corrections], Vector],
    start: Sequence[float],
    seconds: Vector,
    most: Sequence[float],
) -> tuple[Corrections, float]:
    values, error = fit_positive(
        lambda x: mean_log_error(estimate(at(x)), seconds), start, most=most
    )
    return at(values), error


def _seconds(samples: Sequence[Sample]) -> Vector:
    return np.array([one.seconds for one in samples], dtype=np.float64)
