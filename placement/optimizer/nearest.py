"""What could be met of a goal that no fleet meets."""

from __future__ import annotations

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

# The best plan for a goal within so many seconds. Raises Infeasible.
SolveFor = Callable[[Goal, float], Plan]


def unmet(
    goal: Goal,
    offers: Sequence[Offer],
    estimator: Estimator,
    solve_for: SolveFor,
    *,
    time_limit_s: float,
    now_s: Callable[[], float] = time.monotonic,
) -> Unmet:
    """The error for a goal that no fleet meets, with the nearest values that can be met.

    Latencies that are below those of any pipeline: the shortest there is. Then, without those, the
    largest load within the other limits, and the lowest price that serves the load; where the other
    one cannot be met at all, without it. Only values that are not met already are told, rounded to
    the side on which they are met.
    solve_for: asked at most four times, for at most about `time_limit_s` in all by the clock now_s.
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
    return Unmet(_message(values), nearest=values)


def _message(values: Mapping[str, float]) -> str:
    text = "no fleet of these offers meets the goal"
    if not values:
        return text
    told = {name: f"{name} {value:.{_DIGITS}g}" for name, value in values.items()}
    latencies = [told[name] for name in LATENCIES if name in told]
    others = [one for name, one in told.items() if name not in LATENCIES]
    return f"{text}; what can be met: {', '.join([*latencies, ' or '.join(others)]).strip(', ')}"


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


def _rounded(value: float, rounding: str) -> float:
    """To few digits, to the side on which it is met; what adding up has added is no digit."""
    exact = Context(prec=12).create_decimal_from_float(value)
    return float(Context(prec=_DIGITS, rounding=rounding).create_decimal(exact))
