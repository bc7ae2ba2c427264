"""What serves the queries: ours, its ablations, and others' policies on the same resources."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from workflows.scheduling.parameters import SchedulerParameters

Batching = Literal["across-runs", "within-run", "single"]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """How a system schedules and shares.

    shares: equal nodes run once, those that are queued or run (mode I and II), and for
    `cache_ttl_s` after their end. num_pipelines: static split of item stages. max_split: dynamic.
    batching: whose items go in one call. has_barrier: a level of the graph starts when the one
    before has ended. learns: costs are fitted while it runs, from priors; else they are known.
    """

    name: str
    about: str
    parameters: SchedulerParameters = field(default_factory=SchedulerParameters)
    shares: bool = True
    cache_ttl_s: float = 600.0
    num_pipelines: int = 1
    max_split: int = 4
    batching: Batching = "across-runs"
    has_barrier: bool = False
    learns: bool = False


_FULL = System(name="hera", about="the full system")
_FCFS = SchedulerParameters(policy="fcfs")
_FRAMEWORK = replace(
    _FULL, parameters=_FCFS, shares=False, max_split=1, batching="within-run", has_barrier=True
)

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        _FULL,
        replace(_FULL, name="hera-learning", about="the same, which learns costs", learns=True),
        replace(_FULL, name="no-fusion", about="equal nodes run each", shares=False),
        replace(_FULL, name="fcfs", about="first come first served", parameters=_FCFS),
        replace(
            _FULL,
            name="srtf",
            about="shortest remaining service alone",
            parameters=SchedulerParameters(policy="srtf"),
        ),
        replace(
            _FULL,
            name="plas",
            about="least attained service",
            parameters=SchedulerParameters(policy="plas"),
        ),
        replace(_FULL, name="fixed-k", about="two static pipelines", num_pipelines=2, max_split=1),
        replace(_FULL, name="no-split", about="stages are never split", max_split=1),
        System(
            name="ayo",
            about="Ayo: graphs of single runs, split in two, topology-aware batches",
            parameters=SchedulerParameters(policy="topology"),
            shares=False,
            num_pipelines=2,
            max_split=1,
        ),
        replace(
            _FRAMEWORK,
            name="langgraph",
            about="a framework's graph: levels, one item per call",
            batching="single",
        ),
        replace(
            _FRAMEWORK, name="langgraph-tuned", about="the same, with batches within each node"
        ),
    )
}
