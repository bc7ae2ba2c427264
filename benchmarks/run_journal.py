"""What the journal costs a run of one node: service, journal and an embedded Postgres, no engine.

    python -m benchmarks.run_journal            about a minute
    python -m benchmarks.run_journal --quick    few runs, to see that it works

With and without a journal by turns, in one process. The node answers at once, so that all that is
left is the run itself. `alone`: one run after the other; `crowd`: as many at a time as --crowd
says. `answer`: until its client is answered; `record`: until its end is on record, for which
streams and requests with a key wait. CPU time is this process's; Postgres has its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from benchmarks.record import median, percentile, save, table
from workflows.checked import CheckedWorkflow, check_workflow
from workflows.operators.text import TemplateOperator
from workflows.run_journal import RunJournal
from workflows.service import WorkflowService
from workflows.stores.database import Database
from workflows.stores.runs import RunStore

_DOCUMENT = {
    "nodes": [{"id": "a", "op": "template", "params": {"value": "{{ inputs.text }}"}}],
}
_FIGURES = ("answer_p50_ms", "answer_p99_ms", "record_p50_ms", "record_p99_ms", "cpu_ms")


def compiled(document: Any) -> CheckedWorkflow:
    operator = TemplateOperator()
    return check_workflow(document, {operator.name: operator})


async def run_once(
    service: WorkflowService, workflow: CheckedWorkflow, number: int
) -> tuple[float, float]:
    """Seconds until a run has ended, and until that is on record."""
    start_s = time.perf_counter()
    inputs = {"text": f"{number} " * 200}
    run = service.submit(workflow, inputs, tenant="", wall_s=time.time())
    await run.ended.wait()
    end_s = time.perf_counter()
    await run.events.until_all_shown()
    return end_s - start_s, time.perf_counter() - start_s


async def measure(service: WorkflowService, num_runs: int, num_at_once: int) -> dict[str, float]:
    """Latency of runs, and CPU time per run, in milliseconds."""
    workflow = compiled(_DOCUMENT)
    times: list[tuple[float, float]] = []
    numbers = iter(range(num_runs))

    async def client() -> None:
        for number in numbers:
            times.append(await run_once(service, workflow, number))  # noqa: PERF401

    start_cpu_s = time.process_time()
    async with anyio.create_task_group() as group:
        for _ in range(num_at_once):
            group.start_soon(client)
    cpu_s = time.process_time() - start_cpu_s
    return {
        "answer_p50_ms": 1e3 * median([answer for answer, _ in times]),
        "answer_p99_ms": 1e3 * percentile([answer for answer, _ in times], 0.99),
        "record_p50_ms": 1e3 * median([record for _, record in times]),
        "record_p99_ms": 1e3 * percentile([record for _, record in times], 0.99),
        "cpu_ms": 1e3 * cpu_s / num_runs,
    }


async def compare(num_runs: int, num_rounds: int, crowd: int, folder: Path) -> list[dict[str, Any]]:
    journal_of = Database(folder=folder)
    async with journal_of as database, WorkflowService() as plain:
        journal = RunJournal(RunStore(database), now_wall_s=time.time, identities={}, tenants=[""])
        async with WorkflowService(journal=journal, compiled=compiled) as journaled:
            await journaled.ready()
            services = {"memory": plain, "journal": journaled}
            for service in services.values():
                await measure(service, 50, 1)
            return [
                {"round": number, "load": load, "kind": kind, **await measure(service, num_runs, n)}
                for number in range(num_rounds)
                for load, n in (("alone", 1), ("crowd", crowd))
                for kind, service in services.items()
            ]


def report(results: Sequence[dict[str, Any]]) -> str:
    rows = []
    for load in ("alone", "crowd"):
        for kind in ("memory", "journal"):
            those = [one for one in results if (one["load"], one["kind"]) == (load, kind)]
            figures = [median([one[name] for one in those]) for name in _FIGURES]
            rows.append([load, kind, *(f"{figure:.2f}" for figure in figures)])
    head = [name.replace("_", " ").removesuffix(" ms") for name in _FIGURES]
    return table(["load", "runs kept in", *head], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few runs")
    parser.add_argument("--crowd", type=int, default=64, help="runs at a time")
    arguments = parser.parse_args(argv)
    num_runs, num_rounds = (50, 1) if arguments.quick else (500, 5)
    folder = Path(tempfile.mkdtemp(prefix="shuntyard-bench-"))
    os.chmod(folder, 0o755)  # Postgres does not run as root, and must reach it
    try:
        results = anyio.run(
            compare,
            num_runs,
            num_rounds,
            arguments.crowd,
            folder,
            backend_options={"use_uvloop": True},
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(report(results))
    if not arguments.quick:
        parameters = {"num_runs": num_runs, "num_rounds": num_rounds, "crowd": arguments.crowd}
        print(save("run_journal", parameters=parameters, results=results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
