"""How long the placement takes, and how good it is: ours beside ShuntServe's Algorithm 1.

    python -m benchmarks.placement_speed                   everything; the capped runs take longest
    python -m benchmarks.placement_speed --part ours       exact search on the clusters of 24 and 76
    python -m benchmarks.placement_speed --part paper --beams 1 3 --cap-s 60
    python -m benchmarks.placement_speed --part growth     up to 1,000 instances of 20 types

Clusters and models are those of `placement_clusters`; the workload is `azure-conv`, the estimator
the paper's (`PAPER`) or that of `--model-fidelity`. Both searches run in one thread here.
Wall and CPU seconds are kept: on a machine that others use too, CPU seconds are what the search
itself takes; `--limit-s` limits wall seconds.

Algorithm 1 does not depend on the objective: its fleet (pipelines extracted until the machines are
used up) is counted both ways, and its first pipeline alone by throughput per dollar as well. It is
run with whole machines as stages (`node`), and with machines cut into several TP groups (`split`).
A run that is not done at `--cap-s` is reported as such; nothing is extrapolated.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from benchmarks.placement_clusters import MODELS, cluster_24, cluster_76, cluster_of
from benchmarks.record import median, save, table
from placement.corrections import CALIBRATED
from placement.estimator import PAPER, Estimator, Fidelity
from placement.hardware import Offer
from placement.model import ModelSpec
from placement.optimizer import solve, solve_paper
from placement.plan import Goal, Objective, Plan
from placement.workload import find_workload

Part = Literal["ours", "paper", "growth"]
PARTS: tuple[Part, ...] = ("ours", "paper", "growth")
OBJECTIVES: tuple[Objective, ...] = ("throughput-per-dollar", "throughput")
CLUSTERS: dict[str, Callable[[], list[Offer]]] = {"24 GPUs": cluster_24, "76 GPUs": cluster_76}
FIDELITIES: dict[str, Fidelity] = {one.name: one for one in (PAPER, CALIBRATED)}
GROWTH = (20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True)
class Options:
    parts: Sequence[Part]
    clusters: Sequence[str]
    models: Sequence[str]
    beams: Sequence[int]
    cap_s: float
    limit_s: float
    rounds: int
    splits: Sequence[bool]
    model_fidelity: str

    def estimator(self, model: ModelSpec) -> Estimator:
        workload = find_workload("azure-conv")
        return Estimator(model=model, workload=workload, fidelity=FIDELITIES[self.model_fidelity])


def timed(run: Callable[[], Plan]) -> tuple[Plan | None, float, float]:
    """A plan, or None where it was capped, with wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        plan = run()
    except TimeoutError:
        plan = None
    return plan, time.perf_counter() - wall, time.process_time() - cpu


@dataclass(frozen=True)
class Progress:
    """What a search told: (wall seconds since its start, value, bound) each."""

    told: list[tuple[float, float, float]] = field(default_factory=list)
    begun_s: float = field(default_factory=time.perf_counter)

    def tell(self, value: float, bound: float) -> None:
        self.told.append((time.perf_counter() - self.begun_s, value, bound))


def exact(
    cluster: str, offers: list[Offer], objective: Objective, options: Options, rounds: int
) -> list[dict[str, Any]]:
    results = []
    for name in options.models:
        runs = []
        for _ in range(rounds):
            # A new estimator each time: nothing is cached from the round before.
            estimator = options.estimator(MODELS[name])
            goal = Goal(objective=objective)
            progress = Progress()
            runs.append(
                timed(
                    partial(
                        solve,
                        offers,
                        estimator,
                        goal,
                        time_limit_s=options.limit_s,
                        on_progress=progress.tell,
                    )
                )
            )
        plan = runs[-1][0]
        assert plan is not None, "only the paper's search is capped"
        results.append(
            {
                "cluster": cluster,
                "model": name,
                "search": "exact",
                "objective": objective,
                "wall_s": [run[1] for run in runs],
                "cpu_s": [run[2] for run in runs],
                "load_average": os.getloadavg()[0],
                "value": plan.value,
                "bound": plan.bound,
                "gap": plan.gap,
                "progress": progress.told,
                "pipelines": pipelines(plan),
            }
        )
        show(results[-1])
    return results


def paper(cluster: str, offers: list[Offer], options: Options) -> Iterator[dict[str, Any]]:
    for name in options.models:
        for beam in options.beams:
            for splits in options.splits:
                estimator = options.estimator(MODELS[name])
                plan, wall_s, cpu_s = timed(
                    partial(
                        solve_paper,
                        offers,
                        estimator,
                        Goal(objective="throughput"),
                        beam=beam,
                        splits=splits,
                        time_limit_s=options.cap_s,
                    )
                )
                result = {
                    "cluster": cluster,
                    "model": name,
                    "search": f"beam {beam} {'split' if splits else 'node'}",
                    "wall_s": [wall_s],
                    "cpu_s": [cpu_s],
                    "load_average": os.getloadavg()[0],
                    "is_capped": plan is None,
                    **({} if plan is None else counted(plan)),
                }
                show(result)
                yield result


def counted(plan: Plan) -> dict[str, Any]:
    first = plan.pipelines[0]
    return {
        "throughput": plan.throughput_rps,
        "throughput-per-dollar": plan.throughput_rps / plan.price_usd_per_hour,
        "throughput-per-dollar of the first pipeline": first.estimate.throughput_rps
        / first.price_usd_per_hour,
        "pipelines": pipelines(plan),
    }


def pipelines(plan: Plan) -> list[str]:
    """One line each: stages as shape/TP×layers."""
    return [
        f"{pipeline.estimate.throughput_rps:.4f} rps, batch {pipeline.estimate.batch}: "
        + ", ".join(
            f"{stage.shape.name}/{stage.tp}x{stage.num_layers}" for stage in pipeline.stages
        )
        for pipeline in plan.pipelines
    ]


def show(result: dict[str, Any]) -> None:
    keys = ("cluster", "model", "search", "objective", "value", "gap", "throughput", "is_capped")
    print(
        *(f"{key}={result[key]}" for key in keys if key in result),
        f"wall={median(result['wall_s']):.2f}s cpu={median(result['cpu_s']):.2f}s",
        flush=True,
    )


def run(options: Options) -> None:
    results: list[dict[str, Any]] = []

    def keep(new: list[dict[str, Any]]) -> None:
        results.extend(new)
        path = save("placement_speed", parameters=vars(options), results=results)
        print(f"saved {path.name}", flush=True)

    for cluster in options.clusters if "ours" in options.parts else ():
        for objective in OBJECTIVES:
            keep(exact(cluster, CLUSTERS[cluster](), objective, options, options.rounds))
    for num in GROWTH if "growth" in options.parts else ():
        for objective in OBJECTIVES:
            keep(exact(f"{num} instances", cluster_of(num), objective, options, 1))
    for cluster in options.clusters if "paper" in options.parts else ():
        for result in paper(cluster, CLUSTERS[cluster](), options):
            keep([result])
    rows = [
        [
            str(result.get(key, ""))
            for key in ("cluster", "model", "search", "objective", "value", "gap", "throughput")
        ]
        + [f"{median(result['wall_s']):.3f}", f"{median(result['cpu_s']):.3f}"]
        for result in results
    ]
    head = ["cluster", "model", "search", "objective", "value", "gap", "req/s", "wall s", "CPU s"]
    print(table(head, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 3, 8, 32])
    parser.add_argument("--cap-s", type=float, default=600.0)
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--splits", choices=("node", "split", "both"), default="both")
    parser.add_argument("--model-fidelity", choices=list(FIDELITIES), default=PAPER.name)
    args = parser.parse_args()
    run(
        Options(
            parts=args.part or PARTS,
            clusters=args.clusters,
            models=args.models,
            beams=args.beams,
            cap_s=args.cap_s,
            limit_s=args.limit_s,
            rounds=args.rounds,
            splits={"node": [False], "split": [True], "both": [False, True]}[args.splits],
            model_fidelity=args.model_fidelity,
        )
    )


if __name__ == "__main__":
    main()
