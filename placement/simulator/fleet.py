"""Requests through a planned fleet: shared out by weight, each pipeline simulated on its own.

Weighted round robin by the estimated throughput of each pipeline, without feedback (ShuntServe
section 4.3). Pipelines share nothing else, so their simulations are independent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from placement.estimator import Estimator
from placement.plan import PlannedPipeline
from placement.simulator.run import (
    RequestTimes,
    SimulatedRequest,
    Simulation,
    simulate,
)
from placement.simulator.simulated_pipeline import simulated_pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSimulation:
    """What each pipeline of a fleet saw, in the order of the plan."""

    pipelines: tuple[Simulation, ...]

    @property
    def requests(self) -> list[RequestTimes]:
        return [times for one in self.pipelines for times in one.requests]

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last end."""
        requests = self.requests
        return max(times.end_s for times in requests) - min(
            times.request.arrival_s for times in requests
        )

    @property
    def throughput_rps(self) -> float:
        """Requests over the makespan."""
        return len(self.requests) / self.makespan_s

    def saturated_rps(self, warmup: float = 0.25) -> float:
        """The sum over the pipelines while each has requests waiting."""
        return sum(one.saturated_rps(warmup) for one in self.pipelines)


def simulate_fleet(
    estimator: Estimator,
    pipelines: Sequence[PlannedPipeline],
    requests: Iterable[SimulatedRequest],
    *,
    weights: Sequence[float] | None = None,
) -> FleetSimulation:
    """Serve requests with a plan's pipelines. weights: by default their estimated throughput.

    Each pipeline seats as many requests as its estimate does. Raises Infeasible or ValueError where
    a pipeline, or a request on it, does not fit.
    """
    shares = [one.estimate.throughput_rps for one in pipelines] if weights is None else weights
    queues = share_out(sorted(requests, key=lambda request: request.arrival_s), shares)
    return FleetSimulation(
        pipelines=tuple(
            simulate(
                simulated_pipeline(estimator, one.stages, max_num_seqs=one.estimate.batch), queue
            )
            for one, queue in zip(pipelines, queues, strict=True)
        )
    )


def share_out(
    requests: Iterable[SimulatedRequest], weights: Sequence[float]
) -> list[list[SimulatedRequest]]:
    """The requests of each pipeline: the next one goes where it is least in proportion."""
    if not weights or min(weights) <= 0:
        raise ValueError("weights must be positive, and there must be one")
    queues: list[list[SimulatedRequest]] = [[] for _ in weights]
    for request in requests:
        index = min(
            range(len(weights)), key=lambda index: (len(queues[index]) + 1) / weights[index]
        )
        queues[index].append(request)
    return queues
