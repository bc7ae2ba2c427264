"""Why a model does not fit the machines that may be rented, and what would make it fit.

For one request in flight. A machine is cut in the way that holds most layers; embedding and LM head
go where they cost the fewest of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from placement.estimator import Estimator, StageKind
from placement.hardware import Offer, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Layers that one machine holds: in the middle of a pipeline, at one of its ends, at both."""

    middle: int
    end: int
    both: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """num_layers: how many find no room. missing_bytes: that they take, with one request's KV.

    additions: machines of each offer, one kind at a time, with which the model would fit; the
    smallest by price first. Empty if no number of machines of one kind is enough.
    """

    num_layers: int
    missing_bytes: float
    additions: tuple[Offer, ...]

    @property
    def message(self) -> str:
        text = f"{self.num_layers} layers do not fit: {self.missing_bytes / 1e9:.1f} GB are missing"
        if not self.additions:
            return f"{text}, and no number of these machines would hold a layer and a request"
        first = self.additions[0]
        return f"{text}; {first.count} more {first.label} would do"


def room(estimator: Estimator, shape: Shape) -> Room:
    """What one machine holds with one request in flight, at the best TP for each place."""
    tied = estimator.model.tie_word_embeddings
    middle = end = both = 0
    for tp in range(1, shape.num_gpus + 1):
        if not estimator.model.allows_tp(tp):
            continue
        memory = estimator.stage_memory(StageKind(shape=shape, tp=tp))
        layer = memory.layer_weights + memory.layer_kv_per_request
        num_stages = shape.num_gpus // tp

        def held(ends: float, free: float = memory.available, layer: float = layer) -> int:
            return max(0, math.floor((free - ends) / layer))

        plain, with_end = held(0.0), held(memory.vocabulary)
        middle = max(middle, num_stages * plain)
        end = max(end, (num_stages - 1) * plain + with_end if with_end else 0)
        alone = held(memory.vocabulary * (1 if tied else 2))
        if num_stages == 1:
            both = max(both, alone)
        else:
            both = max(both, (num_stages - 2) * plain + 2 * with_end if with_end else 0)
    return Room(middle=middle, end=end, both=both)


def shortage(offers: Sequence[Offer], estimator: Estimator) -> Shortage | None:
    """What is missing for one pipeline over all machines; None if the model fits them."""
    rooms = {offer.shape: room(estimator, offer.shape) for offer in offers}
    num_layers = estimator.model.num_layers
    missing = num_layers - _most_layers(offers, rooms)
    if missing <= 0:
        return None
    additions = [
        replace(offer, count=count)
        for offer in offers
        if (count := _num_needed(offers, offer, rooms, num_layers)) is not None
    ]
    return Shortage(
        num_layers=missing,
        missing_bytes=missing * _layer_bytes(estimator),
        additions=tuple(
            sorted(additions, key=lambda one: (one.count * one.price_usd_per_hour, one.count))
        ),
    )


def _layer_bytes(estimator: Estimator) -> float:
    workload, model = estimator.workload, estimator.model
    length = workload.input_tokens + workload.output_tokens
    return model.layer_weight_bytes() + model.kv_bytes_per_token() * model.cached_tokens(length)


def _most_layers(offers: Sequence[Offer], rooms: dict[Shape, Room]) -> int:
    """The most layers that all machines together hold, both ends placed."""
    total = sum(offer.count * rooms[offer.shape].middle for offer in offers)
    return max((total + cost for cost in _end_costs(offers, rooms)), default=0)


def _end_costs(offers: Sequence[Offer], rooms: dict[Shape, Room]) -> Iterator[int]:
    """Layers (mostly negative) that the two ends cost, for each pair of places."""
    counts: dict[Shape, int] = {}
    for offer in offers:
        counts[offer.shape] = counts.get(offer.shape, 0) + offer.count
    for first, num_first in counts.items():
        if num_first and rooms[first].both:
            yield rooms[first].both - rooms[first].middle
        for last, num_last in counts.items():
            is_enough = num_first >= 2 if first == last else num_first and num_last
            if is_enough and rooms[first].end and rooms[last].end:
                yield rooms[first].end - rooms[first].middle + rooms[last].end - rooms[last].middle


def _num_needed(
    offers: Sequence[Offer], offer: Offer, rooms: dict[Shape, Room], num_layers: int
) -> int | None:
    """How many more machines of an offer make the model fit; None if none ever do."""
    if not rooms[offer.shape].middle:
        return None
    most = math.ceil(num_layers / rooms[offer.shape].middle) + 2
    for count in range(1, most + 1):
        if _most_layers([*offers, replace(offer, count=count)], rooms) >= num_layers:
            return count
    return None
