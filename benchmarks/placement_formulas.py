"""How far the estimator's readings are from the iteration-level simulator.

Random pipelines of the paper's three GPU types, of 1 to 8 stages, cut evenly, by memory, by speed
and at random, are estimated, and simulated with more requests than they can take: drawn from the
Azure trace, and all equal with the same mean lengths. Per reading: the median of estimated over
simulated requests per second, the mean absolute error, and whether it ranks pipelines alike
(Kendall's τ, Spearman's ρ).

And with how many seats a pipeline serves most: shares of what its KV cache holds on average.

    python -m benchmarks.placement_formulas
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.paper_setup import AZURE, ENGINE, EQUAL, MODELS, drawn, estimator, offers
from benchmarks.record import median, save, table
from placement.estimator import Estimator, Stage, StageKind
from placement.roofline import decode_pass
from placement.simulator.run import SimulatedRequest, simulate
from placement.simulator.simulated_pipeline import simulated_pipeline
from placement.workload import Workload

_DEPTHS = (1, 2, 2, 3, 3, 4, 4, 5, 6, 8)
_CUTS = ("even", "by memory", "by speed", "by speed", "at random")
_MIN_BATCH = 8
SEAT_SHARES = (None, 1.05, 1.0, 0.95, 0.9, 0.85)


def kinds() -> list[StageKind]:
    """The stages that pipelines are drawn from."""
    l4, a10g, l40s = (offer.shape for offer in offers())
    pairs = ((l4, 4), (l4, 4), (l4, 2), (a10g, 4), (a10g, 2), (l40s, 1), (l40s, 1))
    return [StageKind(shape=shape, tp=tp) for shape, tp in pairs]


def draw_pipeline(estimator: Estimator, rng: random.Random) -> tuple[str, list[Stage]]:
    """A pipeline that holds at least `_MIN_BATCH` requests, and how it was cut."""
    while True:
        depth, cut = rng.choice(_DEPTHS), rng.choice(_CUTS)
        is_homogeneous = rng.random() < 0.4
        first = rng.choice(kinds())
        chosen = [first if is_homogeneous else rng.choice(kinds()) for _ in range(depth)]
        shares = [_share(estimator, kind, cut, rng) for kind in chosen]
        stages = cut_layers(estimator, chosen, shares)
        if stages is not None and estimator.max_batch(stages) >= _MIN_BATCH:
            return cut, stages


def cut_layers(
    estimator: Estimator, kinds: Sequence[StageKind], shares: Sequence[float]
) -> list[Stage] | None:
    """Layers by shares, each stage on a machine of its own; None if one would have none."""
    num_layers, total = estimator.model.num_layers, sum(shares)
    ends = [round(num_layers * part / total) for part in itertools.accumulate(shares)]
    counts = [end - start for start, end in itertools.pairwise([0, *ends])]
    if min(counts) < 1:
        return None
    return [
        Stage(shape=kind.shape, tp=kind.tp, num_layers=count, node=node)
        for node, (kind, count) in enumerate(zip(kinds, counts, strict=True))
    ]


def _share(estimator: Estimator, kind: StageKind, cut: str, rng: random.Random) -> float:
    if cut == "even":
        return 1.0
    if cut == "by memory":
        return kind.tp * estimator.stage_memory(kind).available
    batch = np.array([64.0])
    seconds = sum(
        float(times.layer_s[0])
        for times in (estimator.prefill_times(kind, batch), estimator.decode_times(kind, batch, 1))
    )
    return (rng.uniform(0.7, 1.4) if cut == "at random" else 1.0) / seconds


def plain_rps(estimator: Estimator, stages: Sequence[Stage]) -> float:
    """The reading that one would write down first: batches of B / D at each stage, prefill once."""
    batch, depth = estimator.max_batch(stages), len(stages)
    sizes = np.array([float(batch)])
    seconds = []
    for index, stage in enumerate(stages):
        prefill = estimator.prefill_times(stage.kind, sizes)
        work = decode_pass(sizes / depth, estimator.workload.mean_held_tokens)
        layer_s = sum(estimator.operation_times_s(stage.kind, work).values())
        decode_s = stage.num_layers * layer_s
        if index == depth - 1:
            decode_s = decode_s + estimator.logits_s(stage.kind, work)
        num_passes = depth * estimator.workload.output_tokens
        seconds.append(float((stage.num_layers * prefill.layer_s + num_passes * decode_s)[0]))
    return batch / max(seconds)


def paced_rps(estimator: Estimator, stages: Sequence[Stage]) -> float:
    batch = estimator.max_batch(stages)
    return batch / estimator.paced_batch_s(stages, batch)


def batch_rps(estimator: Estimator, stages: Sequence[Stage]) -> float:
    """The paper's reading on the same figures of hardware and engine."""
    fidelity = replace(estimator.fidelity, reading="batch")
    return replace(estimator, fidelity=fidelity, _memory={}).evaluate(stages).throughput_rps


READINGS: dict[str, Callable[[Estimator, Sequence[Stage]], float]] = {
    "batch (paper)": batch_rps,
    "plain": plain_rps,
    "continuous": lambda estimator, stages: estimator.evaluate(stages).throughput_rps,
    "paced": paced_rps,
}


def judge(name: str, num_pipelines: int, seed: int) -> list[dict[str, Any]]:
    """One entry per pipeline and workload."""
    rng = random.Random(seed)
    results = []
    for index in range(num_pipelines):
        cut, stages = draw_pipeline(estimator(name), rng)
        for workload in (AZURE, EQUAL):
            results.append(
                {
                    "model": name,
                    "workload": workload.name,
                    "cut": cut,
                    "stages": [[one.shape.gpu.name, one.tp, one.num_layers] for one in stages],
                    **_measure(estimator(name, workload=workload), stages, random.Random(index)),
                }
            )
            print(".", end="", flush=True, file=sys.stderr)
    return results


def _measure(estimator: Estimator, stages: list[Stage], rng: random.Random) -> dict[str, Any]:
    batch = estimator.max_batch(stages)
    requests = _requests(estimator.workload, 6 * batch + 200, rng)
    found = simulate(simulated_pipeline(estimator, stages), requests)
    return {
        "batch": batch,
        "simulated_rps": found.saturated_rps(),
        "mean_running": found.mean_running,
        "preemptions_per_request": found.num_preemptions / len(requests),
        "busiest_stage": max(found.busy_shares),
        "estimated_rps": {
            reading: estimate(estimator, stages) for reading, estimate in READINGS.items()
        },
    }


def _requests(workload: Workload, num: int, rng: random.Random) -> list[SimulatedRequest]:
    if workload.name == AZURE.name:
        return drawn(num, rng)
    return [SimulatedRequest(0.0, workload.input_tokens, workload.output_tokens)] * num


def judge_seats(name: str, num_pipelines: int, seed: int) -> list[dict[str, Any]]:
    """Saturated throughput on the trace, by seats as a share of what the KV cache holds on average.

    None: no limit but memory.
    """
    rng = random.Random(seed)
    judge_ = estimator(name)
    results = []
    while len(results) < num_pipelines:
        _, stages = draw_pipeline(judge_, rng)
        pipeline = simulated_pipeline(judge_, stages)
        held = pipeline.num_kv_tokens / judge_.workload.mean_held_tokens
        if held > judge_.fidelity.max_batch:
            continue
        requests = drawn(round(6 * held) + 200, random.Random(len(results)))
        by_share = []
        for share in SEAT_SHARES:
            seats = len(requests) if share is None else max(1, round(share * held))
            found = simulate(replace(pipeline, max_num_seqs=seats), requests)
            by_share.append(
                {
                    "share": share,
                    "saturated_rps": found.saturated_rps(),
                    "preemptions_per_request": found.num_preemptions / len(requests),
                }
            )
        results.append({"model": name, "depth": len(stages), "held": held, "seats": by_share})
        print(".", end="", flush=True, file=sys.stderr)
    return results


def report_seats(results: Sequence[dict[str, Any]]) -> str:
    rows = []
    for index, share in enumerate(SEAT_SHARES):
        gains = [one["seats"][index]["saturated_rps"] / _unlimited(one) for one in results]
        preempted = [one["seats"][index]["preemptions_per_request"] for one in results]
        rows.append(
            [
                "no limit" if share is None else f"{share:.0%}",
                f"{median(gains):.2f}",
                f"{min(gains):.2f} to {max(gains):.2f}",
                f"{sum(preempted) / len(preempted):.2f}",
            ]
        )
    return table(["seats", "throughput", "of all pipelines", "preemptions/request"], rows)


def _unlimited(one: dict[str, Any]) -> float:
    return float(one["seats"][0]["saturated_rps"])


def agreement(entries: Sequence[dict[str, Any]], reading: str) -> dict[str, float]:
    """How one reading compares with the simulator."""
    pairs = [(one["estimated_rps"][reading], one["simulated_rps"]) for one in entries]
    ratios = [estimated / simulated for estimated, simulated in pairs]
    return {
        "median_ratio": median(ratios),
        "mean_abs_error": sum(abs(ratio - 1) for ratio in ratios) / len(ratios),
        "max_abs_error": max(abs(ratio - 1) for ratio in ratios),
        "kendall": kendall(pairs),
        "spearman": spearman(pairs),
    }


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """τ: of all pairs of pairs, the share in the same order less the share in the other."""
    signs = [
        math.copysign(1, (a[0] - b[0]) * (a[1] - b[1])) for a, b in itertools.combinations(pairs, 2)
    ]
    return sum(signs) / len(signs) if signs else math.nan


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """ρ: the correlation of the ranks."""
    if len(pairs) < 2:
        return math.nan
    ranks = [np.argsort(np.argsort([pair[side] for pair in pairs])) for side in (0, 1)]
    return float(np.corrcoef(*ranks)[0, 1])


def summary(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By workload, model, cut and reading."""
    groups: list[tuple[str, str, Callable[[dict[str, Any]], bool]]] = [
        *((name, "all", lambda one, name=name: one["model"] == name) for name in MODELS),
        ("both", "by speed", lambda one: one["cut"] == "by speed"),
        ("both", "all", lambda one: True),
    ]
    return [
        {"workload": workload.name, "models": models, "cut": cut, "num": len(entries)}
        | {"reading": reading, **agreement(entries, reading)}
        for workload in (AZURE, EQUAL)
        for models, cut, belongs in groups
        for entries in [[o for o in results if o["workload"] == workload.name and belongs(o)]]
        if entries
        for reading in READINGS
    ]


def report(rows: Sequence[dict[str, Any]]) -> str:
    head = ["lengths", "model", "cut", "n", "reading", "ratio", "error", "worst", "τ", "ρ"]
    return table(
        head,
        [
            [
                *(str(row[key]) for key in ("workload", "models", "cut", "num", "reading")),
                f"{row['median_ratio']:.2f}",
                f"{row['mean_abs_error']:.1%}",
                f"{row['max_abs_error']:.0%}",
                f"{row['kendall']:.2f}",
                f"{row['spearman']:.2f}",
            ]
            for row in rows
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few pipelines")
    parser.add_argument("--num", type=int, default=40, help="pipelines of each model")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    num = 3 if arguments.quick else arguments.num
    results = [one for name in MODELS for one in judge(name, num, arguments.seed)]
    rows = summary(results)
    print(report(rows))
    seats = [one for name in MODELS for one in judge_seats(name, num // 3, arguments.seed)]
    print(report_seats(seats))
    if not arguments.quick:
        parameters = {"seed": arguments.seed, "num": num, "fidelity": ENGINE.name}
        found = {"summary": rows, "pipelines": results, "seats": seats}
        print(save("placement_formulas", parameters=parameters, results=found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
