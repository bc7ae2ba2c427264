"""End to end on this CPU: `calibrate`, then its estimates against passes of vLLM on SmolLM2-135M.

    python -m benchmarks.placement_truth_cpu [--hardware FILE] [--passes FILE --passes-pp2 FILE]

Batches of 1 to 32, prompts of 64 to 1,024 tokens, 32 output tokens, one thread a stage; a pipeline
of one stage and one of two (20 and 10 layers). Compared are each stage's prefill of a whole batch
in one pass (up to 8,192 tokens) and its median decode step, as the workers measure them: the
scheduler's part and the hops are left out. The calibration has seen none of it: it times other
sizes, and the engine over models of 2 and 8 layers with random weights.

The machine may be busy: the time that a worker's thread waited for a core is taken off (Linux
counts it), what others take of caches and memory bandwidth is not. --hardware and --passes take
what an earlier run measured. About 15 minutes on two busy cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.engine_passes import OUTPUT_TOKENS
from benchmarks.record import ROOT, save, table
from placement.calibration.engine import passes_of
from placement.catalogue import Catalogue, shipped_catalogue
from placement.corrections import calibrated_fidelity
from placement.estimator import PAPER, Estimator, Fidelity, StageKind
from placement.kernel_corrections import corrections_from_json
from placement.model_catalogue import find_model
from placement.part_estimate import Part, estimate_part
from placement.workload import Workload

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SPLIT = (20, 10)
_BATCHES, _PROMPTS = (1, 2, 4, 8, 16, 32), (64, 128, 256, 512, 1024)
# Prompts of a batch in one pass, and some more of which decoding is compared only.
_MOST_TOKENS = 8192
CASES = [
    *(
        (batch, prompt)
        for prompt in _PROMPTS
        for batch in _BATCHES
        if batch * prompt <= _MOST_TOKENS
    ),
    (16, 1024),
    (32, 512),
    (32, 1024),
]
CASES_PP2 = [(1, 64), (1, 256), (1, 1024), (4, 64), (4, 256), (4, 1024), (16, 64), (16, 256),
             (32, 64), (32, 256)]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", type=Path)
    parser.add_argument("--passes", type=Path)
    parser.add_argument("--passes-pp2", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        hardware = options.hardware or _calibrate(folder)
        notes = {
            1: _notes(options.passes or _measure(folder, 1, CASES)),
            2: _notes(options.passes_pp2 or _measure(folder, 2, CASES_PP2)),
        }
        catalogue = shipped_catalogue().with_profile(hardware)
        profile = yaml.safe_load(hardware.read_text())
    fidelities = _fidelities(catalogue)
    points = [
        {**point, **_estimates(point, catalogue, fidelities)}
        for stages, lines in notes.items()
        for point in _points(stages, lines)
    ]
    results = {"mape": _mapes(points), "points": points}
    path = save(
        "placement_truth_cpu",
        parameters={"model": MODEL, "split": SPLIT, "output_tokens": OUTPUT_TOKENS},
        results={**results, "profile": profile},
    )
    _show(results)
    print(f"\n{path.relative_to(ROOT)}")
    return 0


def _calibrate(folder: Path) -> Path:
    output = folder / "hardware.yaml"
    command = [sys.executable, "-m", "server", "calibrate", "--threads", "1", "--output", output]
    subprocess.run(command, check=True, cwd=ROOT)
    return output


def _measure(folder: Path, stages: int, cases: list[tuple[int, int]]) -> Path:
    output = folder / f"passes-{stages}.jsonl"
    command = [sys.executable, "-m", "benchmarks.engine_passes", str(output), str(stages)]
    command += [f"{batch}x{prompt}" for batch, prompt in cases]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if stages > 1:
        environment["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, SPLIT))
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    return output


def _notes(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _points(stages: int, notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was measured: for each case and stage its prefill, if that was one pass, and its median
    decode step. A later stage's time begins when it has received.

    The first case is a warm-up.
    """
    points = []
    cases = [note for note in notes if note["what"] == "case"][1:]
    for case, stage in itertools.product(cases, range(stages)):
        ended = case["begun_s"] + case["wall_s"]
        own = [
            note
            for note in notes
            if note["what"] != "case"
            and note["rank"] == stage
            and case["begun_s"] <= note["begun_s"] < ended
        ]
        passes = list(passes_of(own))
        batch, prompt = case["batch"], case["prompt"]
        steps = [seconds for tokens, seconds in passes if tokens == [1] * batch]
        prefills = [seconds for tokens, seconds in passes if tokens == [prompt] * batch]
        common = {"stages": stages, "stage": stage, "batch": batch, "prompt": prompt}
        if prefills:
            points.append({**common, "phase": "prefill", "measured_s": prefills[0]})
        points.append(
            {
                **common,
                "phase": "decode",
                "measured_s": statistics.median(steps),
                "quartiles_s": statistics.quantiles(steps, n=4),
            }
        )
    return points


def _fidelities(catalogue: Catalogue) -> dict[str, Fidelity]:
    corrections = {
        name: corrections_from_json(values) for name, values in catalogue.corrections.items()
    }
    return {"plain": PAPER, "calibrated": calibrated_fidelity(corrections)}


def _estimates(
    point: dict[str, Any], catalogue: Catalogue, fidelities: dict[str, Fidelity]
) -> dict[str, float]:
    return {
        f"{name}_s": _estimate_s(point, catalogue, fidelity)
        for name, fidelity in fidelities.items()
    }


def _estimate_s(point: dict[str, Any], catalogue: Catalogue, fidelity: Fidelity) -> float:
    model = find_model(MODEL)
    assert model is not None
    batch, prompt = point["batch"], point["prompt"]
    kind = StageKind(shape=catalogue.bare_shape("cpu", 1, "calibrated"), tp=1)
    estimator = Estimator(
        model=model,
        workload=Workload(input_tokens=prompt, output_tokens=OUTPUT_TOKENS),
        fidelity=fidelity,
    )
    is_last = point["stage"] == point["stages"] - 1
    part = Part(
        kind=kind,
        num_layers=model.num_layers if point["stages"] == 1 else SPLIT[point["stage"]],
        is_bare=not is_last,
        context=prompt + OUTPUT_TOKENS // 2,
    )
    found = estimate_part(estimator, part, batch)
    return found.prefill_s if point["phase"] == "prefill" else found.decode_step_s


def _mapes(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups = [
        (f"{stages} stage{'s' if stages > 1 else ''}, {phase}", own)
        for stages in (1, 2)
        for phase in ("prefill", "decode")
        if (own := [p for p in points if (p["stages"], p["phase"]) == (stages, phase)])
    ]
    return [
        {
            "what": name,
            "points": len(own),
            **{
                which: statistics.mean(
                    abs(point[f"{which}_s"] / point["measured_s"] - 1) for point in own
                )
                for which in ("plain", "calibrated")
            },
        }
        for name, own in [*groups, ("all", points)]
    ]


def _show(results: dict[str, Any]) -> None:
    head = ["what", "points", "plain", "calibrated"]
    rows = [
        [one["what"], str(one["points"]), f"{one['plain']:.1%}", f"{one['calibrated']:.1%}"]
        for one in results["mape"]
    ]
    print(table(head, rows))
    print("\nMilliseconds, measured / calibrated estimate:")
    for point in results["points"]:
        measured, estimate = point["measured_s"], point["calibrated_s"]
        stage = f"{point['stage'] + 1}/{point['stages']}"
        print(
            f"  {stage} {point['phase']:7} {point['batch']:>2} x {point['prompt']:<4} "
            f"{measured * 1e3:7.1f} / {estimate * 1e3:7.1f}  {estimate / measured - 1:+.0%}"
        )


if __name__ == "__main__":
    sys.exit(main())
