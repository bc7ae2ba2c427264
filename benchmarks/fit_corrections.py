"""Fits `placement/data/corrections.json` on the published measurements, without the held-out part.

    python -m benchmarks.fit_corrections [--check]

Each group of parameters minimises the mean absolute logarithm of estimate / measurement over the
serving range of the part to fit on (`benchmarks/profiles.py`), by Nelder-Mead from a fixed start.
First the kernels of L40S and A100-80. Then the layers of LLaMA-30B: L4 takes L40S's kernels and
fits its two rates, A100-40 takes A100-80's and fits its bandwidth; with them the context of the
decode runs, which their source does not state. Not fitted: what follows each product is one kernel
of the smallest time measured. --check compares with the file instead of writing it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import profiles
from benchmarks.profile_estimates import (
    Estimate,
    context_attention_s,
    decode_layer_s,
    gemm_s,
    generation_attention_s,
    prompt_layer_s,
)
from benchmarks.profiles import Measured
from benchmarks.record import ROOT
from placement.fit import Vector, fit_positive, mean_log_error
from placement.kernel_corrections import (
    CacheCorrections,
    CollectiveCorrections,
    Corrections,
    DecodeAttentionCorrections,
    ElementwiseCorrections,
    MatmulCorrections,
    PrefillAttentionCorrections,
)
from placement.kernels import all_reduce_message_s

FILE = ROOT / "placement" / "data" / "corrections.json"
NUM_PROCESSORS = {"L40S": 142, "A100-80": 108, "A100-40": 108, "L4": 58}
# L40S keeps 96 MB in its cache between repetitions of a kernel; of A100's 40 MB nothing is seen.
CACHED = {"L40S"}
SWITCHED = {"A100-80"}
# Elements moved for each element of a product: mean of 2 (rotation), 4 (residual and norm, twice)
# and 1.5 (activation).
ELEMENTWISE_TRAFFIC = 3.0
BORROWED = {
    "A10G": ("L40S", 80, "consumer Ampere (GA102), as Ada's cards built for GDDR6"),
    "RTX3090": ("L40S", 82, "consumer Ampere (GA102), as Ada's cards built for GDDR6X"),
    "RTX4090": ("L40S", 128, "the same generation (AD102)"),
    "T4": ("L4", 40, "the same class: 70 W, GDDR6"),
    "V100": ("A100-80", 80, "data-centre card with HBM, one generation before"),
    "V100-32": ("A100-80", 80, "data-centre card with HBM, one generation before"),
    "A100-80-PCIe": ("A100-80", 108, "the same chip"),
    "H100": ("A100-80", 132, "data-centre card with HBM, one generation after"),
    "H200": ("A100-80", 132, "data-centre card with HBM, one generation after"),
    "B200": ("A100-80", 148, "data-centre card with HBM, two generations after"),
}
KERNELS = "kernels measured by ai-dynamo/aiconfigurator"
LAYERS = "layers of LLaMA-30B measured by Thesys-lab/Helix-ASPLOS25"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(argv).check
    document = fitted_document()
    text = json.dumps(document, indent=1) + "\n"
    if check:
        return int(not _is_close(json.loads(FILE.read_text()), document))
    FILE.write_text(text)
    print(f"wrote {FILE.relative_to(ROOT)}")
    return 0


def fitted_document() -> dict[str, Any]:
    """The whole file."""
    fitted = {gpu: fit_kernels(gpu) for gpu in ("L40S", "A100-80")}
    layers, context = fit_layers(fitted)
    fitted |= layers
    return {
        "comment": "written by `python -m benchmarks.fit_corrections`; see docs/estimator.md",
        "llama30b_decode_context": round(context),
        "fitted": {name: _rounded(one.as_json()) for name, one in fitted.items()},
        "borrowed": {
            name: {"from": source, "num_processors": processors, "reason": reason}
            for name, (source, processors, reason) in BORROWED.items()
        },
    }


def fit_kernels(gpu: str) -> Corrections:
    """Products, both kinds of attention and all-reduce of one GPU."""
    base = Corrections(
        elementwise=ElementwiseCorrections(
            launch_s=_smallest_kernel_s(gpu), traffic=ELEMENTWISE_TRAFFIC
        ),
        source=f"{KERNELS}, {gpu}",
    )
    base = _fit_matmul(base, gpu)
    base = _fit_decode_attention(base, gpu)
    base = _fit_prefill_attention(base, gpu)
    return replace(base, all_reduce=_fit_all_reduce(gpu))


def _fit_matmul(base: Corrections, gpu: str) -> Corrections:
    data = _to_fit(profiles.gemms(gpu))
    floor = _smallest_kernel_s(gpu)

    def at(values: Vector) -> Corrections:
        flops, bandwidth, launch, tile, depth, sharpness, solo = values
        return replace(
            base,
            matmul=MatmulCorrections(
                flops_share=flops,
                bandwidth_share=bandwidth,
                launch_s=floor + launch,
                tile_overhead=tile,
                depth_overhead=depth,
                sharpness=sharpness,
                num_processors=NUM_PROCESSORS[gpu],
                solo_rate=max(1.0, float(solo)),
            ),
        )

    return _fit(at, [1.3, 1.0, 1e-6, 20.0, 200.0, 3.5, 1.3], [(gemm_s, data)], f"{gpu} products")


def _smallest_kernel_s(gpu: str) -> float:
    """What no kernel undercuts: the first percentile of all products to fit on."""
    every = profiles.gemms(gpu)
    return float(np.quantile(every.seconds[~every.is_held_out], 0.01))


def _fit_decode_attention(base: Corrections, gpu: str) -> Corrections:
    data = _to_fit(profiles.generation_attention(gpu))

    def at(values: Vector) -> Corrections:
        bandwidth, launch, unit, split, gather, alone, grouped, sharpness, size, rate = values
        cache = CacheCorrections(num_bytes=size, bandwidth_share=rate)
        return replace(
            base,
            cache=cache if gpu in CACHED else CacheCorrections(),
            decode_attention=DecodeAttentionCorrections(
                bandwidth_share=bandwidth,
                launch_s=launch,
                unit_s=unit,
                split_s=split,
                gather_s=gather,
                alone_stream_share=alone,
                grouped_stream_share=grouped,
                sharpness=sharpness,
            ),
        )

    start = [1.0, 9e-6, 3e-8, 4e-6, 4e-6, 0.03, 0.5, 2.5, 8e7, 3.0]
    return _fit(at, start, [(generation_attention_s, data)], f"{gpu} generation attention")


def _fit_prefill_attention(base: Corrections, gpu: str) -> Corrections:
    data = _to_fit(profiles.context_attention(gpu))

    def at(values: Vector) -> Corrections:
        flops, bandwidth, launch, keys, traffic, solo = values
        return replace(
            base,
            prefill_attention=PrefillAttentionCorrections(
                flops_share=flops,
                bandwidth_share=bandwidth,
                launch_s=launch,
                key_overhead=keys,
                kv_traffic=traffic,
                solo_rate=max(1.0, float(solo)),
            ),
        )

    start = [0.8, 1.3, 4e-6, 30.0, 5.0, 1.2]
    return _fit(at, start, [(context_attention_s, data)], f"{gpu} context attention")


def _fit_all_reduce(gpu: str) -> dict[int, CollectiveCorrections]:
    """By number of GPUs. Over a switch (NVLink) one ring formula holds for all numbers; over PCIe
    each has a topology of its own."""
    every = profiles.all_reduces(gpu)
    data = _to_fit(every)
    counts = [int(count) for count in np.unique(every["gpus"])]
    if gpu in SWITCHED:
        return _fit_ring(data, counts, gpu)
    found = {}
    for count in counts:
        part = data.only(data["gpus"] == count)
        found |= _fit_ring(part, [count], gpu)
    return found


def _fit_ring(data: Measured, counts: Sequence[int], gpu: str) -> dict[int, CollectiveCorrections]:
    """2(P − 1) steps of α each and a fixed part; the long protocol passes 2(P − 1)/P of a message,
    the short one all of it to all at once."""

    def at(values: Vector, count: int) -> CollectiveCorrections:
        short, short_step, short_rate, long, long_step, long_rate = map(float, values)
        steps = 2.0 * (count - 1)
        return CollectiveCorrections(
            short_latency_s=short + steps * short_step,
            short_bandwidth=short_rate,
            long_latency_s=long + steps * long_step,
            long_bandwidth=long_rate * count / steps,
        )

    def loss(values: Vector) -> float:
        errors = []
        for count in counts:
            part = data.only(data["gpus"] == count)
            seconds = np.asarray(all_reduce_message_s(at(values, count), part["bytes"]))
            errors.append(mean_log_error(seconds, part.seconds))
        return float(np.mean(errors))

    fastest = float((data["bytes"] / data.seconds).max())
    start = [float(data.seconds.min()), 1e-6, fastest / 3, 4 * float(data.seconds.min())]
    values, error = fit_positive(loss, [*start, 1e-6, 1.5 * fastest])
    _tell(f"{gpu} all-reduce over {counts}", error)
    return {count: at(values, count) for count in counts}


def fit_layers(kernels: dict[str, Corrections]) -> tuple[dict[str, Corrections], float]:
    """L4 and A100-40 from the layers, and the context of the decode runs."""
    data = {
        gpu: (_to_fit(profiles.prompt_layers(gpu)), _to_fit(profiles.decode_layers(gpu)))
        for gpu in ("L4", "A100-40")
    }

    def at(values: Vector) -> tuple[dict[str, Corrections], float]:
        flops, l4_bandwidth, a100_bandwidth, context = values
        ada, ampere = kernels["L40S"], kernels["A100-80"]
        l4 = replace(
            _scaled(ada, "L40S", "L4", flops, l4_bandwidth),
            cache=CacheCorrections(),
            all_reduce=None,
            source=f"rates: {LAYERS}, L4; the rest: L40S",
        )
        a100 = replace(
            _scaled(ampere, "A100-80", "A100-40", 1.0, a100_bandwidth),
            source=f"bandwidth: {LAYERS}, A100; the rest: A100-80",
        )
        return {"L4": l4, "A100-40": a100}, float(context)

    def loss(values: Vector) -> float:
        found, context = at(values)
        errors = []
        for gpu, (prompts, decodes) in data.items():
            by = found[gpu]
            errors += [
                mean_log_error(prompt_layer_s(prompts, by), prompts.seconds),
                mean_log_error(decode_layer_s(decodes, by, context), decodes.seconds),
            ]
        return float(np.mean(errors))

    values, error = fit_positive(loss, [1.0, 1.0, 1.0, 900.0])
    _tell("layers of LLaMA-30B", error)
    return at(values)


def _scaled(
    base: Corrections, measured: str, gpu: str, flops: float, bandwidth: float
) -> Corrections:
    """The corrections of `measured` for another GPU of its generation, by factors of its rates.

    One KV head of one sequence is read by one processor: as fast as there, in bytes per second.
    """
    matmul, prefill, decode = base.matmul, base.prefill_attention, base.decode_attention
    stream = profiles.GPUS[measured].bandwidth / profiles.GPUS[gpu].bandwidth
    return replace(
        base,
        matmul=replace(
            matmul,
            flops_share=matmul.flops_share * flops,
            bandwidth_share=matmul.bandwidth_share * bandwidth,
            num_processors=NUM_PROCESSORS[gpu],
        ),
        prefill_attention=replace(
            prefill,
            flops_share=prefill.flops_share * flops,
            bandwidth_share=prefill.bandwidth_share * bandwidth,
        ),
        decode_attention=replace(
            decode,
            bandwidth_share=decode.bandwidth_share * bandwidth,
            alone_stream_share=decode.alone_stream_share * stream,
            grouped_stream_share=decode.grouped_stream_share * stream,
        ),
    )


def _to_fit(data: Measured) -> Measured:
    return data.only(data.is_serving & ~data.is_held_out)


def _fit(
    at: Callable[[Vector], Corrections],
    start: Sequence[float],
    parts: Sequence[tuple[Estimate, Measured]],
    name: str,
) -> Corrections:
    def loss(values: Vector) -> float:
        by = at(values)
        return float(np.mean([mean_log_error(one(data, by), data.seconds) for one, data in parts]))

    values, error = fit_positive(loss, start)
    _tell(name, error)
    return at(values)


def _tell(name: str, error: float) -> None:
    print(f"{name:40} {error:6.2%} on the part that was fitted", file=sys.stderr, flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    return value


def _is_close(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_close(one[key], other[key]) for key in one)
    if isinstance(one, int | float) and isinstance(other, int | float):
        return bool(np.isclose(one, other, rtol=0.05))
    return bool(one == other)


if __name__ == "__main__":
    sys.exit(main())
