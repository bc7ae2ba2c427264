"""The best fleet by trying all of them: slow, and simple enough to be seen to be right."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from placement.estimator import Estimator, PhaseTimes, Stage, StageKind
from placement.hardware import Offer, Shape
from placement.plan import Goal
from placement.roofline import Array

Counts = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CachedEstimator(Estimator):
    """An estimator that computes the times of a kind of stage once for each batch and depth."""

    _times: dict[Any, PhaseTimes] = field(default_factory=dict, repr=False, compare=False)

    def prefill_times(self, kind: StageKind, batch: Array) -> PhaseTimes:
        key = (id(kind.shape), kind.tp, batch.tobytes())
        if key not in self._times:
            self._times[key] = super().prefill_times(kind, batch)
        return self._times[key]

    def decode_times(self, kind: StageKind, batch: Array, depth: int) -> PhaseTimes:
        key = (id(kind.shape), kind.tp, batch.tobytes(), depth)
        if key not in self._times:
            self._times[key] = super().decode_times(kind, batch, depth)
        return self._times[key]


@dataclass(frozen=True)
class Best:
    rps: float
    price: float
    has_spot: bool
    zones: frozenset[str]


def best_value(offers: Sequence[Offer], estimator: Estimator, goal: Goal) -> float | None:
    """The value of the best fleet; None where none meets the goal."""
    pipelines = best_pipelines(offers, estimator, goal)
    limits = tuple(offer.count for offer in offers)
    values = [
        value
        for fleet in fleets(limits, list(pipelines))
        if fleet and (value := fleet_value([pipelines[one] for one in fleet], goal)) is not None
    ]
    if not values:
        return None
    return min(values) if goal.objective == "cost-for-load" else max(values)


def fleet_value(fleet: Sequence[Best], goal: Goal) -> float | None:
    rps, price = sum(one.rps for one in fleet), sum(one.price for one in fleet)
    on_demand = sum(one.rps for one in fleet if not one.has_spot)
    zones = {zone for one in fleet for zone in one.zones}
    by_zone = [sum(one.rps for one in fleet if zone in one.zones) for zone in zones]
    close = 1e-9 * rps
    is_bad = (
        (goal.load_rps is not None and rps < goal.load_rps - close)
        or (goal.max_price_usd_per_hour is not None and price > goal.max_price_usd_per_hour + 1e-9)
        or on_demand < goal.on_demand_share * rps - close
        or max(by_zone) > goal.max_zone_share * rps + close
    )
    if is_bad:
        return None
    return {
        "throughput": rps,
        "cost-for-load": price,
        "throughput-per-dollar": rps / price,
    }[goal.objective]


def fleets(limits: Counts, pipelines: Sequence[Counts]) -> Iterator[list[Counts]]:
    """All multisets of pipelines that the machines allow."""
    yield []
    for index, one in enumerate(pipelines):
        left = tuple(a - b for a, b in zip(limits, one, strict=True))
        if min(left) >= 0:
            for rest in fleets(left, pipelines[index:]):
                yield [one, *rest]


def best_pipelines(offers: Sequence[Offer], estimator: Estimator, goal: Goal) -> dict[Counts, Best]:
    """The best effective throughput on each set of machines that fewer of them do not reach."""
    best: dict[Counts, float] = {}
    for counts in itertools.product(*(range(offer.count + 1) for offer in offers)):
        machines = [i for i, count in enumerate(counts) for _ in range(count)]
        if not 0 < len(machines) <= estimator.model.num_layers:
            continue
        rps = max(
            (
                goal.effective_rps(estimate, [offers[i] for i in machines])
                for order in set(itertools.permutations(machines))
                for stages in placements([offers[i].shape for i in order], estimator)
                for batch in range(1, estimator.max_batch(stages) + 1)
                for estimate in [estimator.evaluate(stages, batch)]
            ),
            default=0.0,
        )
        fewer = [
            best[other] for other in best if all(a <= b for a, b in zip(other, counts, strict=True))
        ]
        if rps > max(fewer, default=0.0):
            best[counts] = rps
    return {counts: _describe(offers, counts, rps) for counts, rps in best.items()}


def _describe(offers: Sequence[Offer], counts: Counts, rps: float) -> Best:
    used = [(offer, count) for offer, count in zip(offers, counts, strict=True) if count]
    return Best(
        rps=rps,
        price=sum(count * offer.price_usd_per_hour for offer, count in used),
        has_spot=any(offer.market == "spot" for offer, _ in used),
        zones=frozenset(offer.zone for offer, _ in used),
    )


def placements(shapes: Sequence[Shape], estimator: Estimator) -> Iterator[list[Stage]]:
    """All ways to lay the model over machines in this order, each machine used."""
    num_layers = estimator.model.num_layers
    for cuts in itertools.product(*(splits(shape.num_gpus, estimator) for shape in shapes)):
        groups = [(node, tp) for node, cut in enumerate(cuts) for tp in cut]
        for layers in compositions(num_layers, len(groups)):
            yield [
                Stage(shape=shapes[node], tp=tp, num_layers=num, node=node)
                for (node, tp), num in zip(groups, layers, strict=True)
            ]


def splits(num_gpus: int, estimator: Estimator) -> list[tuple[int, ...]]:
    """Ordered TP groups on at most so many GPUs."""
    tps = [tp for tp in range(1, num_gpus + 1) if estimator.model.allows_tp(tp)]
    return [
        cut
        for size in range(1, num_gpus + 1)
        for cut in itertools.product(tps, repeat=size)
        if sum(cut) <= num_gpus
    ]


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ways to write `total` as a sum of positive numbers, in order."""
    for bars in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *bars, total)
        yield tuple(b - a for a, b in itertools.pairwise(edges))
