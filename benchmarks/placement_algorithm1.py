"""ShuntServe's Algorithm 1, plainly: what the comparison of plans takes as the paper's planner.

DP[l][s] holds the k best partial placements of the first l layers on s stages. Each is extended by
one more stage, an instance of any type that is left with TP over all of its GPUs, of any number of
layers; its largest batch (equation 6) and throughput per dollar (equations 4, 5 and 7) are those of
the stages so far. The best whole pipeline is taken, its instances are gone, and the next one is
searched, until no pipeline holds the model any more.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.placement_baselines import Placement, largest_tp, place
from placement.estimator import Estimator, Stage, StageKind
from placement.hardware import Offer


def algorithm_1(offers: Sequence[Offer], estimator: Estimator, *, beam_width: int = 1) -> Placement:
    """The fleet for these offers. estimator: in reading `batch`."""
    counts = [offer.count for offer in offers]
    types = [_InstanceType(offer, estimator) for offer in offers]
    pipelines = []
    while (best := _best_pipeline(types, counts, estimator, beam_width)) is not None:
        pipelines.append(_stages(types, best))
        for index, _ in best.stages:
            counts[index] -= 1
    skipped = [
        f"{count} × {offer.shape.name}: no pipeline holds the model"
        for offer, count in zip(offers, counts, strict=True)
        if count
    ]
    return Placement(pipelines=tuple(pipelines), skipped=tuple(skipped))


class _InstanceType:
    """Tables of one instance type: seconds by batch, largest batch by layers."""

    def __init__(self, offer: Offer, estimator: Estimator) -> None:
        self.price = offer.price_usd_per_hour
        self.kind = StageKind(shape=offer.shape, tp=largest_tp(estimator, offer.shape))
        batch = np.maximum(np.arange(estimator.fidelity.max_batch + 1, dtype=np.float64), 1.0)
        prefill = estimator.prefill_times(self.kind, batch)
        decode = estimator.decode_times(self.kind, batch, 1)
        self.layer_s = [times.layer_s.tolist() for times in (prefill, decode)]
        self.logits_s = [times.logits_s.tolist() for times in (prefill, decode)]
        self.hop_s = [times.far_s.tolist() for times in (prefill, decode)]
        self.max_batch = {
            (is_first, is_last): [0] + [
                self._largest(estimator, count, is_first, is_last)
                for count in range(1, estimator.model.num_layers + 1)
            ]
            for is_first in (False, True)
            for is_last in (False, True)
        }  # fmt: skip

    def _largest(self, estimator: Estimator, count: int, is_first: bool, is_last: bool) -> int:
        memory = estimator.stage_memory(self.kind)
        free = memory.available - estimator.weight_bytes(
            self.kind, count, is_first=is_first, is_last=is_last
        )
        largest = int(free // (count * memory.layer_kv_per_request))
        return max(0, min(largest, estimator.fidelity.max_batch))


@dataclass(frozen=True, slots=True)
class _Partial:
    """stages: (instance type, layers) so far."""

    value: float
    batch: int
    price: float
    stages: tuple[tuple[int, int], ...]


def _best_pipeline(
    types: Sequence[_InstanceType], counts: Sequence[int], estimator: Estimator, beam_width: int
) -> _Partial | None:
    num_layers = estimator.model.num_layers
    start = _Partial(0.0, estimator.fidelity.max_batch, 0.0, ())
    table = {0: [start]}
    best: _Partial | None = None
    for _ in range(sum(counts)):
        found: dict[int, list[_Partial]] = {}
        for placed, partials in table.items():
            for partial in partials:
                for more in range(1, num_layers - placed + 1):
                    for index in range(len(types)):
                        extended = _extended(types, counts, partial, index, more, num_layers)
                        if extended is not None:
                            found.setdefault(placed + more, []).append(extended)
        table = {
            placed: heapq.nlargest(beam_width, partials, key=lambda one: one.value)
            for placed, partials in found.items()
        }
        for whole in table.pop(num_layers, []):
            if best is None or whole.value > best.value:
                best = whole
    return best


def _extended(
    types: Sequence[_InstanceType],
    counts: Sequence[int],
    partial: _Partial,
    index: int,
    more: int,
    num_layers: int,
) -> _Partial | None:
    """One more stage; None if there is no such instance left or no request fits."""
    if sum(one == index for one, _ in partial.stages) >= counts[index]:
        return None
    stages = (*partial.stages, (index, more))
    is_whole = sum(count for _, count in stages) == num_layers
    ends = (not partial.stages, is_whole)
    batch = min(partial.batch, types[index].max_batch[ends][more])
    if not batch:
        return None
    seconds = 0.0
    for phase in (0, 1):
        slowest = 0.0
        for place_, (one, count) in enumerate(stages):
            of = types[one]
            is_last = is_whole and place_ == len(stages) - 1
            rest = of.logits_s if is_last else of.hop_s
            slowest = max(slowest, count * of.layer_s[phase][batch] + rest[phase][batch])
        seconds += slowest
    price = partial.price + types[index].price
    return _Partial(batch / seconds / price, batch, price, stages)


def _stages(types: Sequence[_InstanceType], partial: _Partial) -> tuple[Stage, ...]:
    kinds = [types[index].kind for index, _ in partial.stages]
    return place(kinds, [count for _, count in partial.stages])
