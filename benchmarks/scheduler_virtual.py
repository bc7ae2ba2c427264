"""The workflow scheduler against its ablations and others' policies, in virtual time.

    python -m benchmarks.scheduler_virtual            all parts, about ten minutes of one core
    python -m benchmarks.scheduler_virtual --quick    few queries, to see that it works

Parts, on the paper's testbed (2 LLM pipelines, 3 embedders, 3 rerankers, closed loop):

    systems     mixed workload at 6, 30, 100 and 300 clients, 0, 5, 10 and 15 % duplicates: ours,
                Ayo's policy, a framework's graph as it comes and with batches within each node
    ablations   mixed, 100 clients: without fusion, FCFS, SRTF alone, least attained service, fixed
                and no splits; two seeds
    workloads   mean latency of each kind of query alone, 100 clients
    splits      nodes per query of RAG with rerank, at low load and at high load of the embedders
    presets     the parameter sets of table 3
    documents   five times longer documents, where embedding is the limit
    open        queries at random, at 50, 80 and 95 % of what the best baseline can take

The policies share machines, engines and queries; only decisions differ. A framework that batches
within its nodes has the same engines with continuous batching: differences are then due to shared
work and to order alone, and small where the LLM is the limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, get_args

from benchmarks.record import median, save, table
from workflows.scheduling.parameters import PresetName
from workflows.simulation.summary import Case, Summary, simulate
from workflows.simulation.workload import WorkloadName

_BASELINES = ("ayo", "langgraph-tuned", "langgraph")
_ABLATIONS = ("no-fusion", "fcfs", "srtf", "plas", "fixed-k", "no-split")
_PARTS = ("systems", "ablations", "workloads", "splits", "presets", "documents", "open")
_DUPLICATES = (0.0, 0.05, 0.1, 0.15)
Row = dict[str, Any]


def measure(case: Case) -> Row:
    print(".", end="", file=sys.stderr, flush=True)
    return {**asdict(case), **asdict(simulate(case))}


def systems(base: Case) -> list[Row]:
    return [
        measure(
            replace(
                base,
                system=system,
                concurrency=concurrency,
                duplicates=duplicates,
                num_queries=base.num_queries * percent // 100,
            )
        )
        for concurrency, percent in ((6, 40), (30, 60), (100, 100), (300, 150))
        for duplicates in _DUPLICATES
        for system in ("hera", *_BASELINES)
    ]


def ablations(base: Case) -> list[Row]:
    return [
        measure(replace(base, system=system, duplicates=duplicates, seed=seed))
        for duplicates in (0.0, 0.15)
        for system in ("hera", *_ABLATIONS)
        for seed in (base.seed, base.seed + 1)
    ]


def workloads(base: Case) -> list[Row]:
    names: tuple[WorkloadName, ...] = ("rag", "rag-rerank", "web")
    return [
        measure(replace(base, system=system, workload=name, duplicates=duplicates))
        for name in names
        for duplicates in (0.0, 0.15)
        for system in ("hera", "ayo", "langgraph-tuned", "langgraph")
    ]


def splits(base: Case) -> list[Row]:
    return [
        measure(
            replace(
                base,
                system=system,
                workload="rag-rerank",
                preset=place,
                concurrency=concurrency,
                duplicates=0.0,
            )
        )
        for place, concurrency in (("testbed", 6), ("documents", 6), ("documents", 100))
        for system in ("hera", "fixed-k", "no-split")
    ]


def presets(base: Case) -> list[Row]:
    names: tuple[PresetName, ...] = get_args(PresetName)
    return [measure(replace(base, system="hera", scheduler_preset=name)) for name in names]


def documents(base: Case) -> list[Row]:
    return [
        measure(replace(base, system=system, preset="documents", duplicates=duplicates))
        for duplicates in (0.0, 0.15)
        for system in ("hera", "no-fusion", "fcfs", *_BASELINES)
    ]


def open_loop(base: Case, saturation: float) -> list[Row]:
    """saturation: queries per second of the best baseline at 300 clients."""
    return [
        measure(replace(base, system=system, duplicates=duplicates, rate_per_s=share * saturation))
        for duplicates in (0.0, 0.15)
        for share in (0.5, 0.8, 0.95)
        for system in ("hera", "fcfs", "ayo", "langgraph-tuned")
    ]


def _saturation(rows: Sequence[Row]) -> float:
    """Runs per second of the best baseline under the highest load, without duplicates."""
    return max(
        find(rows, system=system, concurrency=300, duplicates=0.0)["runs_per_s"]
        for system in _BASELINES
    )


def find(rows: Sequence[Row], **wanted: Any) -> Row:
    """The median row of a case over its seeds, number by number."""
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    assert found, wanted
    numbers = [name for name in Summary.__dataclass_fields__ if name != "busy"]
    return {**found[0], **{name: median([row[name] for row in found]) for name in numbers}}


def claims(results: dict[str, list[Row]]) -> str:
    """The paper's numbers beside ours, at the share of duplicates that is best for us, and at 0."""
    head = ["claim of the paper", "theirs", "ours, 15 % duplicates", "ours, 0 %"]
    rows: list[list[str]] = []

    def add(claim: str, theirs: str, ours: dict[float, float]) -> None:
        rows.append([claim, theirs, f"{ours[0.15]:.2f}", f"{ours[0.0]:.2f}"])

    main, cut = results["systems"], results["ablations"]
    for name, key, theirs, system in (
        ("P99, framework / ours, best load", "p99_s", "2.17", "langgraph"),
        ("P99, tuned framework / ours, best load", "p99_s", "2.17", "langgraph-tuned"),
        ("P99, Ayo / ours, best load", "p99_s", "-", "ayo"),
        ("runs/s, ours / framework, best load", "runs_per_s", "1.85", "langgraph"),
        ("runs/s, ours / tuned framework, best load", "runs_per_s", "1.85", "langgraph-tuned"),
        ("runs/s, ours / Ayo, best load", "runs_per_s", "1.50", "ayo"),
    ):
        add(name, theirs, {d: _best(main, key, system, d) for d in (0.15, 0.0)})
    for name, key, theirs, system, ours_first in (
        ("runs/s, with / without fusion", "runs_per_s", "1.16", "no-fusion", True),
        ("P99, FCFS / ours", "p99_s", "1.125", "fcfs", False),
        ("P99, SRTF / ours", "p99_s", "1.223", "srtf", False),
        ("P50, SRTF / ours", "p50_s", "0.87", "srtf", False),
        ("mean, fixed k / ours", "mean_s", "-", "fixed-k", False),
    ):
        ratios = {}
        for share in (0.15, 0.0):
            other = find(cut, system=system, duplicates=share)[key]
            own = find(cut, system="hera", duplicates=share)[key]
            ratios[share] = own / other if ours_first else other / own
        add(name, theirs, ratios)
    for workload, theirs in (("rag-rerank", "0.648"), ("rag", "0.693"), ("web", "0.582")):
        ratios = {}
        for share in (0.15, 0.0):
            where = {"workload": workload, "duplicates": share}
            own = find(results["workloads"], system="hera", **where)["mean_s"]
            ratios[share] = own / max(
                find(results["workloads"], system=system, **where)["mean_s"]
                for system in _BASELINES
            )
        add(f"mean latency, ours / worst baseline, {workload}", theirs, ratios)
    return table(head, rows)


def _best(rows: Sequence[Row], key: str, system: str, duplicates: float) -> float:
    ratios = []
    for concurrency in (6, 30, 100, 300):
        where = {"concurrency": concurrency, "duplicates": duplicates}
        own = find(rows, system="hera", **where)[key]
        other = find(rows, system=system, **where)[key]
        ratios.append(own / other if key == "runs_per_s" else other / own)
    return max(ratios)


def report(name: str, rows: Sequence[Row]) -> str:
    head = ["system", "workload", "clients", "per s", "dup.", "mean s", "P50", "P95", "P99"]
    lines = [
        [
            row["system"] + (f" {row['scheduler_preset']}" if row["scheduler_preset"] else ""),
            row["workload"] + ("" if row["preset"] == "testbed" else f", {row['preset']}"),
            "open" if row["rate_per_s"] else str(row["concurrency"]),
            f"{row['rate_per_s']:.2f}" if row["rate_per_s"] else "",
            f"{row['duplicates']:.0%}",
            *(f"{row[key]:.2f}" for key in ("mean_s", "p50_s", "p95_s", "p99_s", "runs_per_s")),
            f"{row['nodes_per_run']:.1f}",
            f"{row['calls_per_run']:.1f}",
            f"{row['busy']['llm']:.2f} {row['busy']['embed']:.2f}",
        ]
        for row in rows
    ]
    return f"\n## {name}\n\n" + table(
        [*head, "runs/s", "nodes/run", "calls/run", "busy llm, embed"], lines
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few queries")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", nargs="+", choices=_PARTS, help="only these parts")
    arguments = parser.parse_args(argv)
    base = Case(system="hera", seed=arguments.seed, num_queries=150 if arguments.quick else 1000)
    wanted = arguments.part or _PARTS
    half = replace(base, num_queries=base.num_queries // 2)
    results: dict[str, list[Row]] = {}
    if {"systems", "open"} & set(wanted):
        results["systems"] = systems(base)
    if "ablations" in wanted:
        results["ablations"] = ablations(base)
    if "workloads" in wanted:
        results["workloads"] = workloads(half)
    if "splits" in wanted:
        results["splits"] = splits(base)
    if "presets" in wanted:
        results["presets"] = presets(base)
    if "documents" in wanted:
        results["documents"] = documents(base)
    if "open" in wanted:
        results["open"] = open_loop(base, _saturation(results["systems"]))
    print(file=sys.stderr)
    for name, rows in results.items():
        print(report(name, rows))
    if {"systems", "ablations", "workloads"} <= set(results):
        print("\n## The paper's ratios\n\n" + claims(results))
    if not arguments.quick:
        parameters = {"seed": arguments.seed, "num_queries": base.num_queries}
        print(save("scheduler_virtual", parameters=parameters, results=results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
