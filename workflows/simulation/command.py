"""`shuntyard simulate workflows`: the scheduler, its ablations and others' policies, compared."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, get_args

from workflows.scheduling.parameters import PresetName
from workflows.simulation.summary import Case, Summary, simulate
from workflows.simulation.system import SYSTEMS
from workflows.simulation.testbed import PRESETS
from workflows.simulation.workload import WorkloadName

_EPILOG = "systems:\n" + "\n".join(f"  {name:17}{system.about}" for name, system in SYSTEMS.items())
_HEAD = (
    f"{'system':17}{'clients':>8}{'dup.':>6}{'mean':>8}{'p50':>8}{'p95':>8}{'p99':>8}"
    f"{'runs/s':>9}{'nodes/run':>11}{'shared':>8}"
)


def add_command(commands: Any) -> None:
    """The parser of `simulate`."""
    simulations = commands.add_parser(
        "simulate", help="try policies in virtual time", description="Policies in virtual time."
    ).add_subparsers(dest="simulation", metavar="WHAT", required=True)
    parser = simulations.add_parser(
        "workflows",
        help="the workflow scheduler on simulated machines",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="testbed", help="the machines")
    parser.add_argument(
        "--policy", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), metavar="SYSTEM",
        help="the systems (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--scheduler-preset", choices=get_args(PresetName), help="parameters of our policy"
    )
    parser.add_argument("--workload", choices=get_args(WorkloadName), default="mixed")
    parser.add_argument(
        "--concurrency", type=_positive, nargs="+", default=[100], metavar="N",
        help="clients, each with one query at a time (default: 100)",
    )  # fmt: skip
    parser.add_argument(
        "--duplicates", type=_percent, nargs="+", default=[0.0, 0.1], metavar="PERCENT",
        help="queries that were asked before (default: 0 10)",
    )  # fmt: skip
    parser.add_argument(
        "--rate", type=_rate, metavar="PER_SECOND",
        help="an open loop: queries come at random at this rate, not from waiting clients",
    )  # fmt: skip
    parser.add_argument("--queries", type=_positive, default=2000, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")


def run(flags: dict[str, Any]) -> int:
    """Print a line for each case. Returns the exit code."""
    if not flags["json"]:
        print(_HEAD)
    for case in _cases(flags):
        summary = simulate(case)
        if flags["json"]:
            print(json.dumps({**asdict(case), **asdict(summary)}))
        else:
            print(_line(case, summary))
        sys.stdout.flush()
    return 0


def _cases(flags: dict[str, Any]) -> Iterator[Case]:
    for concurrency in flags["concurrency"]:
        for duplicates in flags["duplicates"]:
            for system in flags["policy"]:
                yield Case(
                    system=system,
                    preset=flags["preset"],
                    workload=flags["workload"],
                    concurrency=concurrency,
                    rate_per_s=flags["rate"],
                    duplicates=duplicates,
                    num_queries=max(flags["queries"], 4 * concurrency),
                    seed=flags["seed"],
                    scheduler_preset=flags["scheduler_preset"],
                )


def _line(case: Case, summary: Summary) -> str:
    return (
        f"{case.system:17}{case.concurrency:8}{case.duplicates:6.0%}"
        f"{summary.mean_s:8.2f}{summary.p50_s:8.2f}{summary.p95_s:8.2f}{summary.p99_s:8.2f}"
        f"{summary.runs_per_s:9.2f}{summary.nodes_per_run:11.1f}{summary.shared:8.1%}"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _percent(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError("must be from 0 to 100")
    return value / 100
