"""Why a plan is as it is, and what would change it.

Everything is asked of the optimizer itself: the same question with one machine more, one less, or
at another price. A `Solve` may be exact or a heuristic; the answers are as good as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from placement.errors import Infeasible
from placement.estimator import Estimator, StageEstimate
from placement.hardware import Offer
from placement.plan import Goal, Plan, PlannedPipeline

Limit = Literal["memory", "engine", "slo", "pace"]
_PRICE_STEPS = 7
_NEARLY_FREE = 1e-3


class Solve(Protocol):
    """The best plan of some offers. Raises Infeasible."""

    def __call__(self, offers: Sequence[Offer], /) -> Plan: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What holds a pipeline back. Stages are counted from 0.

    batch_limit: what keeps the batch from growing: memory (of `memory_stage`), the engine's most
    sequences, the SLO, or that more would serve no faster. prefill_stage, decode_stage: the slowest
    ones of each phase.
    """

    batch_limit: Limit
    memory_stage: int
    prefill_stage: int
    decode_stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The answer to the question with other offers. plan: None if nothing fits then.

    gain: relative change of the objective's value, positive for the better.
    """

    offer: Offer
    plan: Plan | None
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPrice:
    """Below which price, in dollars per hour, an unused offer would be rented; None: not even for
    nearly nothing."""

    offer: Offer
    price_usd_per_hour: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """bindings: of each pipeline. one_more, one_less: with a machine more or less of each offer,
    best first; the latter are the runner-ups: the best fleets that leave out a machine of this one.
    is_whole: whether there was time for all.
    """

    bindings: tuple[Binding, ...]
    one_more: tuple[Change, ...]
    one_less: tuple[Change, ...]
    entry_prices: tuple[EntryPrice, ...]
    is_whole: bool


def explain(
    plan: Plan,
    offers: Sequence[Offer],
    estimator: Estimator,
    solve: Solve,
    *,
    time_limit_s: float = 60.0,
    now_s: Callable[[], float] = time.monotonic,
    on_progress: Callable[[str], None] = lambda line: None,
) -> Explanation:
    """Ask around a plan, for at most about `time_limit_s`.

    solve: what found the plan. now_s: a clock.
    """
    asker = _Asker(plan, list(offers), solve, now_s() + time_limit_s, now_s, on_progress)
    used = [num_used(plan, offer) for offer in offers]
    one_less = [
        asker.changed(index, count - 1, "one less") for index, count in enumerate(used) if count
    ]
    one_more = [
        asker.changed(index, offer.count + 1, "one more") for index, offer in enumerate(offers)
    ]
    prices = [
        asker.entry_price(index)
        for index, count in enumerate(used)
        if not count and plan.goal.objective != "throughput"
    ]
    return Explanation(
        bindings=tuple(binding(pipeline, estimator, plan.goal) for pipeline in plan.pipelines),
        one_more=_best_first(one_more),
        one_less=_best_first(one_less),
        entry_prices=tuple(price for price in prices if price is not None),
        is_whole=asker.is_in_time,
    )


def binding(pipeline: PlannedPipeline, estimator: Estimator, goal: Goal) -> Binding:
    """What holds a pipeline back."""
    stages, batch = pipeline.estimate.stages, pipeline.estimate.batch
    limit: Limit = "memory"
    if batch >= estimator.fidelity.max_batch:
        limit = "engine"
    elif batch < estimator.max_batch(pipeline.stages):
        limit = "slo" if _has_slo(goal) else "pace"
    order = range(len(stages))
    return Binding(
        batch_limit=limit,
        memory_stage=min(order, key=lambda i: _room(stages[i])),
        prefill_stage=max(order, key=lambda i: stages[i].prefill_s),
        decode_stage=max(order, key=lambda i: stages[i].decode_s),
    )


def num_used(plan: Plan, offer: Offer) -> int:
    """Machines of an offer that a plan rents."""
    wanted = replace(offer, count=0)
    rented = (one for pipeline in plan.pipelines for one in pipeline.offers)
    return sum(replace(one, count=0) == wanted for one in rented)


def _room(stage: StageEstimate) -> float:
    """Free memory of a stage in requests: which stage stops the batch from growing."""
    free = stage.available_bytes - stage.weights_bytes - stage.kv_bytes
    return float(free / stage.kv_bytes)


def _has_slo(goal: Goal) -> bool:
    return any((goal.slo_ttft_s, goal.slo_tpot_s, goal.slo_latency_s))


def _best_first(changes: Sequence[Change | None]) -> tuple[Change, ...]:
    return tuple(sorted((one for one in changes if one), key=lambda one: -one.gain))


@dataclass(slots=True)
class _Asker:
    plan: Plan
    offers: list[Offer]
    solve: Solve
    until_s: float
    now_s: Callable[[], float]
    on_progress: Callable[[str], None]
    is_in_time: bool = True

    def changed(self, index: int, count: int, what: str) -> Change | None:
        """The answer with `count` machines of one offer; None when time is up."""
        if self._is_late():
            return None
        offer = self.offers[index]
        self.on_progress(f"{what} {offer.label}")
        others = [one for place, one in enumerate(self.offers) if place != index]
        offers = list(self.offers)
        offers[index] = replace(offer, count=count)
        plan = self._answer(offers if count else others)
        return Change(offer=offer, plan=plan, gain=self._gain(plan))

    def entry_price(self, index: int) -> EntryPrice | None:
        """Between nearly nothing and its price, in halves; None when time is up."""
        offer = self.offers[index]
        self.on_progress(f"at which price {offer.label} would be rented")
        low, high = _NEARLY_FREE * offer.price_usd_per_hour, offer.price_usd_per_hour
        if self._is_late():
            return None
        if not self._is_rented_at(index, low):
            return EntryPrice(offer=offer, price_usd_per_hour=None)
        for _ in range(_PRICE_STEPS):
            if self._is_late():
                return None
            middle = (low + high) / 2
            if self._is_rented_at(index, middle):
                low = middle
            else:
                high = middle
        return EntryPrice(offer=offer, price_usd_per_hour=low)

    def _is_rented_at(self, index: int, price_usd_per_hour: float) -> bool:
        offers = list(self.offers)
        offers[index] = replace(offers[index], price_usd_per_hour=price_usd_per_hour)
        plan = self._answer(offers)
        return plan is not None and num_used(plan, offers[index]) > 0

    def _answer(self, offers: Sequence[Offer]) -> Plan | None:
        try:
            return self.solve(offers) if offers else None
        except Infeasible:
            return None

    def _gain(self, plan: Plan | None) -> float:
        if plan is None or not self.plan.value:
            return -1.0
        gain = plan.value / self.plan.value - 1
        return -gain if self.plan.goal.objective == "cost-for-load" else gain

    def _is_late(self) -> bool:
        self.is_in_time = self.is_in_time and self.now_s() < self.until_s
        return not self.is_in_time
