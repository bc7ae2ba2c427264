"""Whole workflows on one server: ours, and LangGraph, LlamaIndex and Haystack as its clients.

    python -m benchmarks.workflow_frameworks            everything, about an hour
    python -m benchmarks.workflow_frameworks --quick    a few runs of each, to see that it works
    python -m benchmarks.workflow_frameworks setup      only makes the frameworks' environment

All systems do the same work (`tasks.py`) with the same list of runs, seeds and arrival times, each
in a process of its own; they take turns, forwards one time and backwards the next, so that a
machine that becomes slower or faster is so for all. Every measurement has a `cache_salt` of its
own, so that nobody finds prefixes or results of another's. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from benchmarks.processes import BenchmarkError
from benchmarks.record import save
from benchmarks.workflow_frameworks import environment
from benchmarks.workflow_frameworks.bound import Work, bound, remaining_work
from benchmarks.workflow_frameworks.capacity import measure_capacity
from benchmarks.workflow_frameworks.cells import (
    DUPLICATE_SHARES,
    Cell,
    all_cells,
    expected_s,
    fitted,
    quick_cells,
)
from benchmarks.workflow_frameworks.load import SYSTEMS, LoadSpec, SystemName
from benchmarks.workflow_frameworks.report import Row, report, saturation
from benchmarks.workflow_frameworks.testbed import (
    CHUNK_TOKENS,
    SERVER_FLAGS,
    RunningTestbed,
    testbed,
)
from benchmarks.workflow_frameworks.workload import (
    WORKLOADS,
    Run,
    Workload,
    load_questions,
    make_runs,
    poisson_arrivals,
    warm_up_runs,
)

_CAPACITY_RUNS = 60
_QUICK_CAPACITY_RUNS = 8
_QUICK_PASSAGES = 60
_START_S = 240.0  # of the server, with storing the passages, and of the capacities


@dataclass(slots=True)
class Benchmark:
    """One run of the benchmark. Results grow as it goes on."""

    testbed: RunningTestbed
    systems: Sequence[SystemName]
    seed: int
    rows: list[Row]

    def run(self, cells: Sequence[Cell], keep: Callable[[], None]) -> None:
        """Measure all systems in each cell, and keep what there is after each."""
        turn = 0
        for number, cell in enumerate(cells):
            for repeat in range(cell.repeats):
                for system in self.systems if turn % 2 == 0 else reversed(self.systems):
                    print(f"{number + 1} of {len(cells)}: {cell.name}: {system}", file=sys.stderr)
                    self.rows.append(self._row(cell, system, repeat))
                turn += 1
            keep()

    def capacity(self, workload: Workload, runs: Sequence[Run], attempt: int) -> Work:
        """What the bound of a workload rests on."""
        print(f"capacities: {workload}", file=sys.stderr)
        addresses = self.testbed.with_salt(f"capacity {attempt} {workload}")
        return anyio.run(measure_capacity, addresses, runs)

    def _row(self, cell: Cell, system: SystemName, repeat: int) -> Row:
        spec = self._spec(cell, system, repeat)
        measured = self.testbed.measure(spec)
        outcome = measured.outcome
        for error in outcome.errors:
            print(f"{system}: {error}", file=sys.stderr)
        return {
            "cell": cell.name,
            **asdict(cell),
            "system": system,
            "repeat": repeat,
            "arrivals_per_s": len(spec.runs) / spec.arrivals_s[-1] if spec.arrivals_s else None,
            "elapsed_s": outcome.elapsed_s,
            "client_cpu_s": outcome.cpu_s,
            "server_cpu_s": measured.server_cpu_s,
            "counters": measured.counters,
            "errors": outcome.errors,
            "work": asdict(remaining_work(spec.runs)),
            "runs": [[one.number, one.start_s, one.end_s, one.digest] for one in outcome.runs],
        }

    def _spec(self, cell: Cell, system: SystemName, repeat: int) -> LoadSpec:
        questions = load_questions()
        runs = make_runs(
            cell.workload,
            questions,
            num_runs=cell.num_runs,
            duplicate_share=cell.duplicate_share,
            seed=self.seed,
        )
        spec = partial(
            LoadSpec,
            system=system,
            addresses=self.testbed.with_salt(f"{system} {cell.name} {repeat}"),
            warm_up=warm_up_runs(cell.workload, questions, runs),
            runs=runs,
            limit_s=cell.limit_s,
        )
        if cell.loop == "closed":
            return spec(concurrency=int(cell.level))
        rate = cell.level * saturation(self.rows, cell)
        if not rate:
            raise BenchmarkError("an open loop needs a framework's closed loop before it")
        return spec(arrivals_s=poisson_arrivals(len(runs), rate, self.seed))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that the command line asks for; saved after each cell unless it is quick."""
    python = environment.ensure_environment()
    parameters: dict[str, Any] = {
        "seed": arguments.seed,
        "server_flags": list(SERVER_FLAGS),
        "chunk_tokens": CHUNK_TOKENS,
        "frameworks": environment.versions(python),
    }
    results: dict[str, Any] = {"capacities": {}, "rows": []}
    quick, workloads = arguments.quick, arguments.workloads
    samples = {workload: _sample(workload, arguments) for workload in workloads}
    num_passages = _QUICK_PASSAGES if quick else None
    with testbed(python, seed=arguments.seed, num_passages=num_passages) as bed:
        benchmark = Benchmark(bed, arguments.systems, arguments.seed, results["rows"])

        def measure_capacities(attempt: int) -> dict[Workload, Work]:
            measured = {
                workload: benchmark.capacity(workload, runs, attempt)
                for workload, runs in samples.items()
            }
            for workload, capacity in measured.items():
                results["capacities"].setdefault(workload, []).append(asdict(capacity))
            return measured

        def keep() -> None:
            if not quick:
                path = save("workflow_frameworks", parameters=parameters, results=results)
                print(f"raw results so far: {path}", file=sys.stderr)

        most = {
            workload: bound(remaining_work(runs), len(runs), capacity).machine
            for (workload, capacity), runs in zip(
                measure_capacities(0).items(), samples.values(), strict=True
            )
        }
        benchmark.run(quick_cells(workloads) if quick else _cells(arguments, most), keep)
        measure_capacities(1)
        keep()
    return results


def _sample(workload: Workload, arguments: argparse.Namespace) -> list[Run]:
    """The runs that capacities are measured with."""
    num_runs = _QUICK_CAPACITY_RUNS if arguments.quick else _CAPACITY_RUNS
    return make_runs(
        workload, load_questions(), num_runs=num_runs, duplicate_share=0.0, seed=arguments.seed
    )


def _cells(arguments: argparse.Namespace, most: dict[Workload, float]) -> list[Cell]:
    cells = fitted(
        all_cells(
            arguments.workloads,
            arguments.duplicates,
            heaviest_only=arguments.heaviest_only,
            repeats=arguments.repeats,
        ),
        most,
        num_systems=len(arguments.systems),
        budget_s=60 * arguments.minutes - _START_S,
    )
    minutes = expected_s(cells, most, len(arguments.systems)) / 60
    print(f"{len(cells)} cells, about {minutes:.0f} minutes", file=sys.stderr)
    return cells


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.workflow_frameworks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", choices=["run", "setup"], default="run")
    parser.add_argument("--quick", action="store_true", help="a few runs; measures nothing")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--repeats",
        type=int,
        default=2,
        help="how often each system is measured in the cells that count",
    )
    parser.add_argument("--minutes", type=float, default=60, help="cells get fewer runs to keep it")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--duplicates", nargs="+", type=float, default=list(DUPLICATE_SHARES))
    parser.add_argument(
        "--heaviest-only",
        action="store_true",
        help="the mixed workload with 100 clients and at 95%%",
    )
    parser.add_argument("--show", metavar="FILE", help="print the tables of a result file")
    arguments = parser.parse_args(argv)
    if arguments.what == "setup":
        print(environment.ensure_environment())
        return 0
    if arguments.show:
        print(report(json.loads(Path(arguments.show).read_text())["results"]))
        return 0
    try:
        results = run(arguments)
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1
    print(report(results))
    return int(any(row["errors"] for row in results["rows"]))


if __name__ == "__main__":
    sys.exit(main())
