"""What could be met of a goal that no fleet meets."""

from __future__ import annotations

import contextlib
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

    Latencies that are below those of any pipeline: the shortest there is, or, of a single one, the
    shortest of a fleet that serves the load. Then, without those, the largest load within the other
    limits, and the lowest price that serves the load; where neither will do alone, both. Where
    those are not what cannot be met, each latency and each share, next to the other ones. Only
    values that are not met already are told, rounded to the side on which they are met.
    solve_for: asked for at most about `time_limit_s` in all by the clock now_s. is_proven: that no
    fleet meets the goal.
    """
    asker = _Asker(solve_for, now_s() + time_limit_s, now_s)
    latencies: dict[str, float] = {}
    for name in LATENCIES:
        limit_s = getattr(goal, name)
        if limit_s is not None:
            least_s = _rounded(shortest_s(offers, estimator, name), ROUND_CEILING)
            if least_s > limit_s:
                latencies[name] = least_s
    without: dict[str, Any] = dict.fromkeys(latencies)
    others, word = asker.load_and_price(replace(goal, **without))
    if latencies and not others and goal.load_rps is not None:
        latencies = asker.under_load(goal, latencies)
    if not latencies and not others:
        others, word = asker.excluded(goal), "or"
    told = ", ".join(filter(None, [_told(latencies, ","), _told(others, f" {word}")]))
    return Unmet(is_proven=is_proven, nearest=latencies | others, told=told)


def _told(values: Mapping[str, float], word: str) -> str:
    return f"{word} ".join(f"{name} {value:.{_DIGITS}g}" for name, value in values.items())


@dataclass(slots=True)
class _Asker:
    solve_for: SolveFor
    until_s: float
    now_s: Callable[[], float]

    def load_and_price(self, goal: Goal) -> tuple[dict[str, float], str]:
        """What the load and the price could be, and whether one ("or") or both ("and") have to."""
        load_rps, limit = goal.load_rps, goal.max_price_usd_per_hour
        load = None if load_rps is None else self._largest_load(goal)
        price = None if limit is None else self._lowest_price(goal)
        word = "or"
        if load is None and price is None and load_rps is not None and limit is not None:
            load, word = self._largest_load(replace(goal, max_price_usd_per_hour=None)), "and"
            if load is not None and load < load_rps:
                price = self._lowest_price(replace(goal, load_rps=load))
        values: dict[str, float] = {}
        if load is not None and load_rps is not None and load < load_rps:
            values["load_rps"] = load
        if price is not None and limit is not None and price > limit:
            values["max_price_usd_per_hour"] = price
        return values, word

    def _largest_load(self, goal: Goal) -> float | None:
        plan = self._met(replace(goal, objective="throughput", load_rps=None))
        return None if plan is None else _rounded(plan.value, ROUND_FLOOR)

    def _lowest_price(self, goal: Goal) -> float | None:
        load_rps = goal.load_rps or _ANY_RPS
        plan = self._met(
            replace(goal, objective="cost-for-load", load_rps=load_rps, max_price_usd_per_hour=None)
        )
        return None if plan is None else _rounded(plan.value, ROUND_CEILING)

    def under_load(self, goal: Goal, shortest: Mapping[str, float]) -> dict[str, float]:
        """The latencies that can be met by a fleet that serves the load, if only one is missed;
        else the shortest ones."""
        at_shortest: dict[str, Any] = dict(shortest)
        goal = replace(goal, **at_shortest)
        if len(shortest) > 1 or self._met(goal) is not None:
            return dict(shortest)
        (name,) = shortest
        value = self._next_to_others(goal, name)
        return {name: shortest[name] if value is None else value}

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
        if not named or self._met(goal) is not None:
            return {}
        values = {name: self._next_to_others(goal, name) for name in named}
        return {name: value for name, value in values.items() if value is not None}

    def _next_to_others(self, goal: Goal, name: str) -> float | None:
        """About the nearest value of a limit that is met next to the other ones, by halving."""
        missed: float = getattr(goal, name)
        met: float | None = None
        value: dict[str, Any] = {name: _SHARES.get(name)}
        for _ in range(_MAX_HALVINGS):
            plan = self._met(replace(goal, **value))
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

    def _met(self, goal: Goal) -> Plan | None:
        """A plan for this goal, if it is met in time."""
        left_s = self.until_s - self.now_s()
        if left_s <= 0:
            return None
        with contextlib.suppress(Infeasible):
            return self.solve_for(goal, left_s)
        return None


def _longest_s(plan: Plan, name: str) -> float:
    """The latency that all pipelines of a plan keep."""
    return max(float(getattr(one.estimate, name.removeprefix("slo_"))) for one in plan.pipelines)


def _rounded(value: float, rounding: str) -> float:
    """To few digits, to the side on which it is met; what adding up has added is no digit."""
    exact = Context(prec=12).create_decimal_from_float(value)
    return float(Context(prec=_DIGITS, rounding=rounding).create_decimal(exact))
