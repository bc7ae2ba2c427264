"""What could be met of a goal that no fleet meets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any

from placement.errors import Infeasible, Unmet
from placement.estimator import Estimator
from placement.hardware import Offer
from placement.optimizer.fastest import LATENCIES, Latency, shortest_s
from placement.plan import Goal, Plan, PlannedPipeline

# A load that any pipeline serves: the fleet for it is the cheapest one.
_ANY_RPS = 1e-6
_DIGITS = 4
# Latencies next to others are sought so often, or as long as they could be shorter by more.
_MAX_HALVINGS = 10
_CLOSE = 1.02

# The best plan for a goal within so many seconds. Raises Infeasible.
SolveFor = Callable[[Goal, float], Plan]


def unmet(
    goal: Goal,
    offers: Sequence[Offer],
    estimator: Estimator,
    solve_for: SolveFor,
    *,
    time_limit_s: float,
    is_proven: bool = True,
    now_s: Callable[[], float] = time.monotonic,
) -> Unmet:
    """The error for a goal that no fleet meets, with the nearest values that can be met.

    Latencies that are below those of any pipeline: the shortest there is. Then, without those, the
    largest load within the other limits, and the lowest price that serves the load; where the other
    one cannot be met at all, without it. Where neither is what cannot be met, each latency, next to
    the other ones. Only values that are not met already are told, rounded to the side on which they
    are met.
    solve_for: asked for at most about `time_limit_s` in all by the clock now_s. is_proven: that no
    fleet meets the goal.
    """
    asker = _Asker(solve_for, now_s() + time_limit_s, now_s)
    values: dict[str, float] = {}
    for name in LATENCIES:
        limit_s = getattr(goal, name)
        if limit_s is not None:
            least_s = _rounded(shortest_s(offers, estimator, name), ROUND_CEILING)
            if least_s > limit_s:
                values[name] = least_s
    without: dict[str, Any] = dict.fromkeys(values)
    goal = replace(goal, **without)
    if goal.load_rps is not None:
        load = asker.largest_load(goal)
        if load is not None and load < goal.load_rps:
            values["load_rps"] = load
    if goal.max_price_usd_per_hour is not None:
        price = asker.lowest_price(goal)
        if price is not None and price > goal.max_price_usd_per_hour:
            values["max_price_usd_per_hour"] = price
    if values:
        return Unmet(is_proven=is_proven, nearest=values, told=_told(values))
    values = asker.latencies(goal)
    told = " or ".join(f"{name} {value:.{_DIGITS}g}" for name, value in values.items())
    return Unmet(is_proven=is_proven, nearest=values, told=told)


def _told(values: Mapping[str, float]) -> str:
    told = {name: f"{name} {value:.{_DIGITS}g}" for name, value in values.items()}
    latencies = [told[name] for name in LATENCIES if name in told]
    others = [one for name, one in told.items() if name not in LATENCIES]
    return ", ".join([*latencies, " or ".join(others)]).strip(", ")


@dataclass(slots=True)
class _Asker:
    solve_for: SolveFor
    until_s: float
    now_s: Callable[[], float]

    def largest_load(self, goal: Goal) -> float | None:
        goal = replace(goal, objective="throughput", load_rps=None)
        plan = self._first(goal, replace(goal, max_price_usd_per_hour=None))
        return None if plan is None else _rounded(plan.value, ROUND_FLOOR)

    def lowest_price(self, goal: Goal) -> float | None:
        goal = replace(
            goal,
            objective="cost-for-load",
            load_rps=goal.load_rps or _ANY_RPS,
            max_price_usd_per_hour=None,
        )
        plan = self._first(goal, replace(goal, load_rps=_ANY_RPS))
        return None if plan is None else _rounded(plan.value, ROUND_CEILING)

    def latencies(self, goal: Goal) -> dict[str, float]:
        """By name, what each limit of a latency could be next to the others, where those are what
        cannot be met."""
        goal = replace(
            goal,
            objective="throughput" if goal.objective == "throughput" else "throughput-per-dollar",
            load_rps=None,
            max_price_usd_per_hour=None,
            on_demand_share=0.0,
            max_zone_share=1.0,
        )
        limited = [name for name in LATENCIES if getattr(goal, name) is not None]
        if len(limited) < 2 or self._first(goal) is not None:
            return {}
        values = {name: self._shortest_s(goal, name) for name in limited}
        return {name: value for name, value in values.items() if value is not None}

    def _shortest_s(self, goal: Goal, name: Latency) -> float | None:
        """About the shortest limit of a latency next to the other ones, by halving."""
        short_s, long_s = getattr(goal, name), math.inf
        limit: dict[str, Any] = {name: None}
        for _ in range(_MAX_HALVINGS):
            plan = self._first(replace(goal, **limit))
            if plan is not None:
                long_s = min(long_s, *(_latency_s(one, name) for one in plan.pipelines))
            elif math.isinf(long_s):
                return None
            else:
                short_s = limit[name]
            if long_s <= short_s * _CLOSE:
                break
            limit = {name: math.sqrt(short_s * long_s)}
        return _rounded(long_s, ROUND_CEILING)

    def _first(self, *goals: Goal) -> Plan | None:
        """The plan for the first of these goals that is met in time."""
        for goal in dict.fromkeys(goals):
            left_s = self.until_s - self.now_s()
            try:
                if left_s > 0:
                    return self.solve_for(goal, left_s)
            except Infeasible:
                continue
        return None


def _latency_s(pipeline: PlannedPipeline, name: Latency) -> float:
    return float(getattr(pipeline.estimate, name.removeprefix("slo_")))


def _rounded(value: float, rounding: str) -> float:
    """To few digits, to the side on which it is met; what adding up has added is no digit."""
    exact = Context(prec=12).create_decimal_from_float(value)
    return float(Context(prec=_DIGITS, rounding=rounding).create_decimal(exact))
