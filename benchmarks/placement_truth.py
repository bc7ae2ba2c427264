"""How far the estimator is from published measurements that its fit has not seen.

    python -m benchmarks.placement_truth

Mean absolute percentage error (MAPE) of the plain roofline (fidelity `paper`, with the effective
figures of the catalogue) and of the corrected one (`calibrated`), for each GPU, phase and kind of
measurement, on the held-out part (`benchmarks/profiles.py` says how it is split, and what the
serving range is). `without` turns one correction off at a time. `profiles_s` says how long it took.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks import profiles
from benchmarks.profile_estimates import (
    PROMPT_TOKENS,
    Estimate,
    Seconds,
    all_reduce_plain_s,
    all_reduce_s,
    decode_layer_plain_s,
    decode_layer_s,
    gemm_plain_s,
    gemm_s,
    prompt_layer_plain_s,
    prompt_layer_s,
)
from benchmarks.profile_estimates import (
    context_attention_plain_s as context_plain_s,
)
from benchmarks.profile_estimates import (
    context_attention_s as context_s,
)
from benchmarks.profile_estimates import (
    generation_attention_plain_s as generated_plain_s,
)
from benchmarks.profile_estimates import (
    generation_attention_s as generated_s,
)
from benchmarks.profiles import Measured
from benchmarks.record import ROOT, save, table
from placement.kernel_corrections import CORRECTIONS, shipped_corrections

# ShuntServe, section 7.1.1: MAPE of 54 configurations that its estimator was not fitted on.
PAPER = {"overall": 0.0663, "L4": 0.0349, "L40S": 0.0668, "A10G": 0.0967, "worst": 0.2372}
_GOAL, _GOAL_EACH = 0.066, 0.10
# Products of so many rows are decoding, of more are prompts.
_MOST_SEQUENCES = 256


@dataclass(frozen=True)
class Subject:
    """One kind of measurement of one GPU, and both estimates of it."""

    gpu: str
    phase: str
    kind: str
    data: Measured
    corrected: Estimate
    plain: Callable[[Measured], Seconds]

    @property
    def name(self) -> str:
        return f"{self.gpu} {self.phase}: {self.kind}"


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    started = time.perf_counter()
    found = subjects()
    cells = [_cell(subject) for subject in found]
    results = {
        "cells": cells,
        "by_gpu_and_phase": _by_gpu_and_phase(cells),
        "overall": _overall(cells),
        "without": _without(found),
        "paper": PAPER,
        "goal": {"overall": _GOAL, "each_gpu_and_phase": _GOAL_EACH},
        "profiles_s": time.perf_counter() - started,
    }
    parameters = {
        "split": profiles.__doc__,
        "llama30b_decode_context": _decode_context(),
        "llama30b_prompt_tokens": PROMPT_TOKENS,
    }
    path = save("placement_truth", parameters=parameters, results=results)
    _show(results)
    print(f"\n{path.relative_to(ROOT)}")
    return 0


def subjects() -> list[Subject]:
    """Everything that is measured."""
    found = []
    for gpu in ("L40S", "A100-80"):
        products = profiles.gemms(gpu)
        is_decode = products["m"] <= _MOST_SEQUENCES
        prompts, steps = profiles.context_attention(gpu), profiles.generation_attention(gpu)
        reduces = profiles.all_reduces(gpu)
        found += [
            Subject(gpu, "prefill", "products", products.only(~is_decode), gemm_s, gemm_plain_s),
            Subject(gpu, "decode", "products", products.only(is_decode), gemm_s, gemm_plain_s),
            Subject(gpu, "prefill", "attention", prompts, context_s, context_plain_s),
            Subject(gpu, "decode", "attention", steps, generated_s, generated_plain_s),
            Subject(gpu, "both", "all-reduce", reduces, all_reduce_s, all_reduce_plain_s),
        ]
    layer, context = "layer of LLaMA-30B", _decode_context()
    decode_s = partial(decode_layer_s, context=context)
    decode_plain_s = partial(decode_layer_plain_s, context=context)
    for gpu in ("L4", "A100-40"):
        prompts, steps = profiles.prompt_layers(gpu), profiles.decode_layers(gpu)
        found += [
            Subject(gpu, "prefill", layer, prompts, prompt_layer_s, prompt_layer_plain_s),
            Subject(gpu, "decode", layer, steps, decode_s, decode_plain_s),
        ]
    return found


def _cell(subject: Subject) -> dict[str, Any]:
    by = shipped_corrections()[subject.gpu]
    data = subject.data
    corrected, plain = subject.corrected(data, by), subject.plain(data)
    held, serving = data.is_held_out, data.is_held_out & data.is_serving
    signed = corrected / data.seconds - 1.0
    beyond = np.maximum(0.0, np.abs(corrected - data.seconds) - data.resolution_s / 2)
    parts = {}
    for name, mask in (
        ("held_out_serving", serving),
        ("held_out_full", held),
        ("fitted_serving", data.is_serving & ~held),
    ):
        parts[name] = {
            "points": int(mask.sum()),
            "plain": _mape(plain, data.seconds, mask),
            "calibrated": _mape(corrected, data.seconds, mask),
            "calibrated_beyond_rounding": float((beyond / data.seconds)[mask].mean()),
            "calibrated_median_signed": float(np.median(signed[mask])),
            "calibrated_p90": float(np.quantile(np.abs(signed[mask]), 0.9)),
        }
    worst = np.argsort(-np.abs(np.where(serving, signed, 0.0)))[:5]
    return {
        "gpu": subject.gpu,
        "phase": subject.phase,
        "kind": subject.kind,
        **parts,
        "worst_serving": [_point(data, corrected, index) for index in worst],
        "by_size_serving": _by_size(data, signed, serving),
    }


def _by_size(data: Measured, signed: Seconds, mask: Any) -> list[dict[str, float]]:
    """MAPE for each value of what the sizes of a batch are."""
    key = next(name for name in ("m", "tokens", "sequences", "bytes") if name in data.columns)
    column = data[key]
    values = np.unique(column[mask])
    if len(values) > 24:
        edges = np.quantile(column[mask], np.linspace(0, 1, 9))
        ranges = list(itertools.pairwise(edges))
    else:
        ranges = [(value, value) for value in values]
    return [
        {
            f"{key}_from": float(low),
            f"{key}_to": float(high),
            "calibrated": float(np.abs(signed[chosen]).mean()),
        }
        for low, high in ranges
        if (chosen := mask & (column >= low) & (column <= high)).any()
    ]


def _point(data: Measured, estimate: Seconds, index: int) -> dict[str, float]:
    sizes = {name: float(column[index]) for name, column in data.columns.items()}
    return {**sizes, "measured_s": float(data.seconds[index]), "estimate_s": float(estimate[index])}


def _by_gpu_and_phase(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """MAPE over the kinds of measurement of a GPU and phase, each kind with the same weight."""
    keys = list(dict.fromkeys((cell["gpu"], cell["phase"]) for cell in cells))
    return [
        {"gpu": gpu, "phase": phase, **_mean_of(_same(cells, gpu, phase))} for gpu, phase in keys
    ]


def _same(cells: list[dict[str, Any]], gpu: str, phase: str) -> list[dict[str, Any]]:
    return [cell for cell in cells if (cell["gpu"], cell["phase"]) == (gpu, phase)]


def _overall(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all kinds with the same weight; over all points; over whole layers only."""
    layers = [cell for cell in cells if cell["kind"].startswith("layer")]
    return {
        "kinds_alike": _mean_of(cells),
        "points_alike": {
            part: {
                which: float(
                    np.average(
                        [cell[part][which] for cell in cells],
                        weights=[cell[part]["points"] for cell in cells],
                    )
                )
                for which in ("plain", "calibrated")
            }
            for part in ("held_out_serving", "held_out_full")
        },
        "layers": _mean_of(layers),
    }


def _mean_of(cells: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        part: {
            which: float(np.mean([cell[part][which] for cell in cells]))
            for which in ("plain", "calibrated")
        }
        for part in ("held_out_serving", "held_out_full")
    }


def _without(found: list[Subject]) -> dict[str, dict[str, float]]:
    """MAPE on the held-out serving range with one correction turned off, by subject."""
    result: dict[str, dict[str, float]] = {}
    for name in CORRECTIONS:
        for subject in found:
            if name == "all_reduce" or subject.kind == "all-reduce":
                continue
            by = shipped_corrections()[subject.gpu].without(name)
            data = subject.data.only(subject.data.is_held_out & subject.data.is_serving)
            error = _mape(subject.corrected(data, by), data.seconds, data.is_held_out)
            result.setdefault(name, {})[subject.name] = error
    return result


def _mape(estimate: Seconds, seconds: Seconds, mask: Any) -> float:
    return float(np.abs(estimate / seconds - 1.0)[mask].mean())


def _decode_context() -> float:
    path = ROOT / "placement" / "data" / "corrections.json"
    return float(json.loads(path.read_text())["llama30b_decode_context"])


def _show(results: dict[str, Any]) -> None:
    def row(*names: str, of: dict[str, Any]) -> list[str]:
        serving, full = of["held_out_serving"], of["held_out_full"]
        return [
            *names,
            str(serving.get("points", "")),
            *(f"{one[which]:.1%}" for one in (serving, full) for which in ("plain", "calibrated")),
        ]

    rows = [row(cell["gpu"], cell["phase"], cell["kind"], of=cell) for cell in results["cells"]] + [
        row(one["gpu"], one["phase"], "kinds alike", of=one) for one in results["by_gpu_and_phase"]
    ]
    rows += [
        row("all", "", name.replace("_", " "), of=one) for name, one in results["overall"].items()
    ]
    head = ["GPU", "phase", "what", "points", "plain", "calibrated", "full: plain", "calibrated"]
    print(table(head, rows))
    print("\nMAPE on the held-out part: serving range, then full range. Layers beyond rounding:")
    for cell in results["cells"]:
        if cell["kind"].startswith("layer"):
            error = cell["held_out_serving"]["calibrated_beyond_rounding"]
            print(f"  {cell['gpu']} {cell['phase']}: {error:.1%}")


if __name__ == "__main__":
    sys.exit(main())
