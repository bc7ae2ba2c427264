"""Why a plan is as it is, and what would change it.

Everything is asked of the optimizer itself: the same question with one machine more, one less, or
at another price. A `Solve` may be exact or a heuristic; the answers are as good as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from placement.errors import Infeasible, OutOfTime
from placement.estimator import Estimator, StageEstimate
from placement.hardware import Offer
from placement.plan import Goal, Plan, PlannedPipeline

Limit = Literal["memory", "engine", "slo", "pace"]
_PRICE_STEPS = 12
_SAME_PRICE = 1e-4
_NEARLY_FREE = 1e-3


class Solve(Protocol):
    """The best plan of some offers within a time. Raises Infeasible, OutOfTime among them."""

    def __call__(self, offers: Sequence[Offer], /, *, time_limit_s: float) -> Plan: ...


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
    """Up to which price, in dollars per hour, an unused offer would be rented; None: not even for
    nearly nothing."""

    offer: Offer
    price_usd_per_hour: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """bindings: of each pipeline. one_more, one_less: with a machine more or less of each offer,
    best first; the latter are the runner-ups: the best fleets that leave out a machine of this one.
    left_out: offers that there was no time for, by the name of their field.
    """

    bindings: tuple[Binding, ...]
    one_more: tuple[Change, ...]
    one_less: tuple[Change, ...]
    entry_prices: tuple[EntryPrice, ...]
    left_out: Mapping[str, tuple[Offer, ...]]

    @property
    def is_whole(self) -> bool:
        return not any(self.left_out.values())


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

    Each of the three kinds of questions has the same share of the time, and what those before left
    of theirs. An answer that took longer is none: its search may have been cut off.
    solve: what found the plan. now_s: a clock.
    """
    asker = _Asker(plan, list(offers), solve, now_s, on_progress)
    used = [num_used(plan, offer) for offer in offers]
    is_priced = plan.goal.objective != "throughput"
    indices = {
        "one_less": [index for index, count in enumerate(used) if count],
        "one_more": list(range(len(offers))),
        "entry_prices": [index for index, count in enumerate(used) if not count and is_priced],
    }
    until_s = _deadlines([name for name in indices if indices[name]], now_s(), time_limit_s)
    one_less = [
        asker.changed(index, used[index] - 1, "one less", until_s["one_less"])
        for index in indices["one_less"]
    ]
    one_more = [
        asker.changed(index, offers[index].count + 1, "one more", until_s["one_more"])
        for index in indices["one_more"]
    ]
    prices = [
        asker.entry_price(index, until_s["entry_prices"]) for index in indices["entry_prices"]
    ]
    answers: dict[str, Sequence[object]] = {
        "one_less": one_less,
        "one_more": one_more,
        "entry_prices": prices,
    }
    return Explanation(
        bindings=tuple(binding(pipeline, estimator, plan.goal) for pipeline in plan.pipelines),
        one_more=_best_first(one_more),
        one_less=_best_first(one_less),
        entry_prices=tuple(price for price in prices if price is not None),
        left_out={
            name: tuple(
                offers[index]
                for index, answer in zip(those, answers[name], strict=True)
                if answer is None
            )
            for name, those in indices.items()
        },
    )


def _deadlines(names: Sequence[str], start_s: float, time_limit_s: float) -> dict[str, float]:
    """One after another, at equal distances."""
    share_s = time_limit_s / max(1, len(names))
    return {name: start_s + number * share_s for number, name in enumerate(names, start=1)}


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
    now_s: Callable[[], float]
    on_progress: Callable[[str], None]

    def changed(self, index: int, count: int, what: str, until_s: float) -> Change | None:
        """The answer with `count` machines of one offer; None when time is up."""
        offer = self.offers[index]
        self.on_progress(f"{what} {offer.label}")
        others = [one for place, one in enumerate(self.offers) if place != index]
        offers = list(self.offers)
        offers[index] = replace(offer, count=count)
        try:
            plan = self._answer(offers if count else others, until_s)
        except OutOfTime:
            return None
        return Change(offer=offer, plan=plan, gain=self._gain(plan))

    def entry_price(self, index: int, until_s: float) -> EntryPrice | None:
        """Where the best fleet with the offer is worth as much as the plan; None when time is up.

        The best fleet at a price below is as good as the plan up to a higher one. Above that price
        another may still be better, and so on upwards: Dinkelbach's method (1967).
        """
        offer = self.offers[index]
        self.on_progress(f"at which price {offer.label} would be rented")
        price, found = _NEARLY_FREE * offer.price_usd_per_hour, None
        try:
            for _ in range(_PRICE_STEPS):
                higher = self._worth_renting_to(index, price, until_s)
                if higher is None:
                    break
                found = max(higher, price)
                price = found * (1 + _SAME_PRICE)
        except OutOfTime:
            return None
        return EntryPrice(offer=offer, price_usd_per_hour=found)

    def _worth_renting_to(
        self, index: int, price_usd_per_hour: float, until_s: float
    ) -> float | None:
        """The price of an offer's machines up to which the fleet that rents them at this one is as
        good as the plan, and within the goal's price; None if the best fleet rents none."""
        offers = list(self.offers)
        offers[index] = replace(offers[index], price_usd_per_hour=price_usd_per_hour)
        plan = self._answer(offers, until_s)
        count = 0 if plan is None else num_used(plan, offers[index])
        if plan is None or not count:
            return None
        goal, price = self.plan.goal, plan.price_usd_per_hour
        if goal.objective == "cost-for-load":
            room = self.plan.value - plan.value
        else:
            room = price * (plan.value / self.plan.value - 1)
        if goal.max_price_usd_per_hour is not None:
            room = min(room, goal.max_price_usd_per_hour - price)
        return min(price_usd_per_hour + room / count, self.offers[index].price_usd_per_hour)

    def _answer(self, offers: Sequence[Offer], until_s: float) -> Plan | None:
        """None where nothing fits. Raises OutOfTime."""
        left_s = until_s - self.now_s()
        if left_s <= 0:
            raise OutOfTime("there is no time left")
        try:
            plan = self.solve(offers, time_limit_s=left_s) if offers else None
        except OutOfTime:
            raise
        except Infeasible:
            plan = None
        if self.now_s() > until_s:
            raise OutOfTime("it took too long")
        return plan

    def _gain(self, plan: Plan | None) -> float:
        if plan is None or not self.plan.value:
            return -1.0
        gain = plan.value / self.plan.value - 1
        return -gain if self.plan.goal.objective == "cost-for-load" else gain
