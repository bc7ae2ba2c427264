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
from placement.optimizer.fastest import LATENCIES, shortest_s
from placement.plan import Goal, Plan

# A load that any pipeline serves: the fleet for it is the cheapest one.
_ANY_RPS = 1e-6
_DIGITS = 4
# Limits next to others are sought so often, or until they are near enough, as a factor.
_MAX_HALVINGS = 10
_CLOSE = 1.02
# Shares, each with the value that limits nothing.
_SHARES = {"on_demand_share": 0.0, "max_zone_share": 1.0}

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
    one cannot be met at all, without it. Where neither is what cannot be met, each latency and each
    share, next to the other ones. Only values that are not met already are told, rounded to the
    side on which they are met.
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
    values = asker.excluded(goal)
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

    def excluded(self, goal: Goal) -> dict[str, float]:
        """By name, what each limit of a latency or a share could be next to the other ones, where
        those are what cannot be met."""
        goal = replace(
            goal,
            objective="throughput" if goal.objective == "throughput" else "throughput-per-dollar",
            load_rps=None,
            max_price_usd_per_hour=None,
        )
        named: list[str] = [name for name in LATENCIES if getattr(goal, name) is not None]
        named += [name for name, none in _SHARES.items() if getattr(goal, name) != none]
        if not named or self._first(goal) is not None:
            return {}
        values = {name: self._next_to_others(goal, name) for name in named}
        return {name: value for name, value in values.items() if value is not None}

    def _next_to_others(self, goal: Goal, name: str) -> float | None:
        """About the nearest value of a limit that is met next to the other ones, by halving."""
        missed: float = getattr(goal, name)
        met: float | None = None
        value: dict[str, Any] = {name: _SHARES.get(name)}
        for _ in range(_MAX_HALVINGS):
            plan = self._first(replace(goal, **value))
            if plan is not None:
                met = value[name] if name in _SHARES else _longest_s(plan, name)
            elif met is None:
                return None
            else:
                missed = value[name]
            if abs(met - missed) <= (_CLOSE - 1) * max(met, missed):
                break
            value = {name: (met + missed) / 2 if name in _SHARES else math.sqrt(met * missed)}
        assert met is not None, "the loop has begun"
        return _rounded(met, ROUND_FLOOR if name == "on_demand_share" else ROUND_CEILING)

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


def _longest_s(plan: Plan, name: str) -> float:
    """The latency that all pipelines of a plan keep."""
    return max(float(getattr(one.estimate, name.removeprefix("slo_"))) for one in plan.pipelines)


def _rounded(value: float, rounding: str) -> float:
    """To few digits, to the side on which it is met; what adding up has added is no digit."""
    exact = Context(prec=12).create_decimal_from_float(value)
    return float(Context(prec=_DIGITS, rounding=rounding).create_decimal(exact))
