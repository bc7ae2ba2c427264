"""What is wanted of a placement, and the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from placement.errors import InvalidInput
from placement.estimator import PipelineEstimate, Stage
from placement.hardware import Offer

# What adding up in another order makes of a bound that is reached.
_ROUNDING = 1e-12

Objective = Literal["throughput-per-dollar", "throughput", "cost-for-load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What the fleet is chosen for.

    objective: requests per dollar, requests per second, or the lowest price that serves `load_rps`.
    slo_ttft_s, slo_tpot_s, slo_latency_s: limits of each pipeline's estimate.
    latency_penalty: γ of equation 7, by which an SLO that is missed by a share x lowers a
    pipeline's throughput by the factor 1 − γ·x (never below 0); infinite: SLOs are hard limits.
    With several SLOs the worst one counts.
    max_price_usd_per_hour: cap on the fleet's price.
    on_demand_share: of the fleet's throughput, at least so much from pipelines without spot
        machines.
    max_zone_share: of the fleet's throughput, at most so much from pipelines that need one zone.
    recovery_s: how long a pipeline serves nothing after one of its machines was taken away. By
        `effective_rps` all of this counts, loads, shares and objective alike.
    """

    objective: Objective = "throughput-per-dollar"
    load_rps: float | None = None
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_latency_s: float | None = None
    latency_penalty: float = math.inf
    max_price_usd_per_hour: float | None = None
    on_demand_share: float = 0.0
    max_zone_share: float = 1.0
    recovery_s: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            "load_rps",
            "slo_ttft_s",
            "slo_tpot_s",
            "slo_latency_s",
            "max_price_usd_per_hour",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidInput(name, "must be positive")
        for name in ("latency_penalty", "recovery_s"):
            if not getattr(self, name) >= 0:
                raise InvalidInput(name, "must not be negative")
        for name in ("on_demand_share", "max_zone_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidInput(name, "must lie between 0 and 1")
        if self.objective == "cost-for-load" and self.load_rps is None:
            raise InvalidInput("load_rps", "the objective cost-for-load needs a load to serve")

    @property
    def counts_dollars(self) -> bool:
        """Whether it cannot be told without the price of every machine."""
        return self.objective != "throughput" or self.max_price_usd_per_hour is not None

    def value(self, rps: float, price_usd_per_hour: float) -> float:
        """What the objective counts, of a fleet's effective throughput and its price."""
        if self.objective == "throughput":
            return rps
        return price_usd_per_hour if self.objective == "cost-for-load" else rps / price_usd_per_hour

    def latency_factor(self, estimate: PipelineEstimate) -> float:
        """Equation 7's factor of a pipeline's throughput, 0 to 1."""
        excess = 0.0
        for limit_s, seconds in (
            (self.slo_ttft_s, estimate.ttft_s),
            (self.slo_tpot_s, estimate.tpot_s),
            (self.slo_latency_s, estimate.latency_s),
        ):
            if limit_s is not None:
                # Rounding must not make a plan at the limit miss it.
                excess = max(excess, seconds / limit_s * (1 - 1e-12) - 1)
        return 1.0 if excess == 0 else max(0.0, 1 - self.latency_penalty * excess)

    def availability(self, interruptions_per_hour: float) -> float:
        """Share of the time in which a pipeline serves, given the sum over its machines.

        To first order: each interruption costs `recovery_s`; two at once are not told apart.
        """
        return max(0.0, 1 - interruptions_per_hour * self.recovery_s / 3600)

    def effective_rps(self, estimate: PipelineEstimate, offers: Sequence[Offer]) -> float:
        """A pipeline's throughput, less what interruptions and missed SLOs take."""
        interruptions = sum(offer.interruptions_per_hour for offer in offers)
        factor = self.latency_factor(estimate) * self.availability(interruptions)
        return estimate.throughput_rps * factor


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPipeline:
    """One pipeline of a plan. offers: what each of its machines is rented as, by `Stage.node`."""

    stages: tuple[Stage, ...]
    offers: tuple[Offer, ...]
    estimate: PipelineEstimate

    @property
    def price_usd_per_hour(self) -> float:
        """The sum of those that are known."""
        return sum(offer.price_usd_per_hour for offer in self.offers)

    @property
    def known_price_usd_per_hour(self) -> float | None:
        """None if the price of one of its machines is not known."""
        is_known = all(offer.price_usd_per_hour for offer in self.offers)
        return self.price_usd_per_hour if is_known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A fleet.

    value: what `goal.objective` counts: requests per second and per dollar an hour, requests per
    second, or dollars per hour. bound: no fleet of these offers has a better value. gap:
    |bound − value| / value; 0 is a proof of optimality. solver: `exact` or `paper`.
    """

    pipelines: tuple[PlannedPipeline, ...]
    goal: Goal
    value: float
    bound: float
    solve_s: float
    solver: str

    @property
    def throughput_rps(self) -> float:
        return sum(pipeline.estimate.throughput_rps for pipeline in self.pipelines)

    @property
    def price_usd_per_hour(self) -> float:
        """The sum of those that are known."""
        return sum(pipeline.price_usd_per_hour for pipeline in self.pipelines)

    @property
    def known_price_usd_per_hour(self) -> float | None:
        """None if the price of one of its machines is not known."""
        prices = [pipeline.known_price_usd_per_hour for pipeline in self.pipelines]
        return None if None in prices else self.price_usd_per_hour

    @property
    def gap(self) -> float:
        gap = abs(self.bound - self.value) / self.value if self.value else math.inf
        return 0.0 if gap < _ROUNDING else gap
