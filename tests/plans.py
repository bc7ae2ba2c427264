"""Plans made by hand, for what reads and shows plans."""

from __future__ import annotations

from typing import Any

from placement.catalogue import shipped_catalogue
from placement.estimator import PAPER, Estimator, Stage
from placement.hardware import Offer
from placement.model_catalogue import find_model
from placement.plan import Goal, Plan, PlannedPipeline
from placement.workload import Workload, find_workload

AZURE = find_workload("azure-conv")


def estimator(model: str = "Qwen/Qwen3-32B", workload: Workload = AZURE) -> Estimator:
    spec = find_model(model)
    assert spec is not None
    return Estimator(model=spec, workload=workload, fidelity=PAPER)


def offer(shape: str, count: int = 1, **fields: Any) -> Offer:
    """An offer of a shape of the catalogue, at its on-demand price."""
    found = shipped_catalogue().shape(shape, "calibrated")
    values = {"price_usd_per_hour": found.price_usd_per_hour, **fields}
    return Offer(shape=found, count=count, **values)


def pipeline(
    estimates: Estimator, *stages: tuple[Offer, int, int, int], batch: int | None = None
) -> PlannedPipeline:
    """stages: (offer, TP, layers, node) each."""
    cut = tuple(
        Stage(shape=one.shape, tp=tp, num_layers=layers, node=node)
        for one, tp, layers, node in stages
    )
    rented = {node: one for one, _, _, node in stages}
    return PlannedPipeline(
        stages=cut,
        offers=tuple(rented[node] for node in sorted(rented)),
        estimate=estimates.evaluate(cut, batch),
    )


def plan(
    *pipelines: PlannedPipeline, goal: Goal | None = None, gap: float = 0.0, solver: str = "exact"
) -> Plan:
    wanted = goal or Goal()
    throughput = sum(one.estimate.throughput_rps for one in pipelines)
    price = sum(one.price_usd_per_hour for one in pipelines)
    value = wanted.value(throughput, price)
    return Plan(
        pipelines=pipelines,
        goal=wanted,
        value=value,
        bound=value * (1 + gap),
        solve_s=0.05,
        solver=solver,
    )


def papers_plan() -> Plan:
    """Two pipelines of the paper's cluster: one machine of four L4, two of an L40S each."""
    estimates = estimator()
    l4, l40s = offer("g6.12xlarge", 3), offer("g6e.xlarge", 4)
    return plan(
        pipeline(estimates, (l4, 4, 64, 0)),
        pipeline(estimates, (l40s, 1, 33, 0), (l40s, 1, 31, 1)),
        gap=0.02,
    )
