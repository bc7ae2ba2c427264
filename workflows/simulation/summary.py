"""What a simulation comes to, in the numbers that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from workflows.scheduling.parameters import PresetName, preset
from workflows.simulation.simulator import Outcome, Simulation
from workflows.simulation.system import SYSTEMS, System
from workflows.simulation.testbed import PRESETS
from workflows.simulation.workload import Queries, WorkloadName


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulation. duplicates: a share. scheduler_preset: for systems with our policy.

    rate_per_s: of an open loop; `concurrency` is then the number of queries before it counts.
    """

    system: str
    preset: str = "testbed"
    workload: WorkloadName = "mixed"
    concurrency: int = 100
    rate_per_s: float | None = None
    duplicates: float = 0.1
    num_queries: int = 2000
    seed: int = 1
    scheduler_preset: PresetName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Latencies in seconds, from a query to its answer. busy: share of each resource's slots.

    nodes_per_run: parts and decode sub-nodes that were executed. calls_per_run: dispatches, each of
    which may hold parts of several runs. shared: of all logical nodes.
    """

    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    runs_per_s: float
    nodes_per_run: float
    calls_per_run: float
    shared: float
    busy: dict[str, float]


def simulate(case: Case, system: System | None = None) -> Summary:
    """Run one case; `system` in place of the one that it names."""
    place = PRESETS[case.preset]
    queries = Queries(
        case.workload,
        duplicates=case.duplicates,
        seed=case.seed,
        median_chunks=place.median_chunks,
    )
    simulation = Simulation(
        system or _system(case),
        place.testbed,
        queries,
        concurrency=case.concurrency,
        num_queries=case.num_queries,
        seed=case.seed,
        rate_per_s=case.rate_per_s,
    )
    return summarise(simulation.run(), place.testbed.slots)


def _system(case: Case) -> System:
    system = SYSTEMS[case.system]
    if case.scheduler_preset is None or system.parameters.policy != "hera":
        return system
    return replace(system, parameters=preset(case.scheduler_preset))


def summarise(outcome: Outcome, slots: dict[str, int]) -> Summary:
    latencies = sorted(outcome.latencies_s)
    elapsed_s = outcome.elapsed_s
    return Summary(
        mean_s=sum(latencies) / len(latencies),
        p50_s=percentile(latencies, 0.5),
        p95_s=percentile(latencies, 0.95),
        p99_s=percentile(latencies, 0.99),
        runs_per_s=outcome.num_in_time / elapsed_s if elapsed_s else 0.0,
        nodes_per_run=outcome.num_parts / outcome.num_runs,
        calls_per_run=sum(one.num_calls for one in outcome.usage.values()) / outcome.num_runs,
        shared=outcome.num_shared / outcome.num_nodes,
        busy={
            name: usage.busy_s / (slots[name] * outcome.total_s)
            for name, usage in outcome.usage.items()
        },
    )


def percentile(ranked: Sequence[float], share: float) -> float:
    """The smallest value that at least this share does not exceed."""
    return ranked[max(0, ceil(share * len(ranked)) - 1)]
