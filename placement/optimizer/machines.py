"""Machines that are alike for the search: same shape, same price, same risk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from placement.errors import InvalidInput
from placement.hardware import Offer, Shape
from placement.plan import Goal


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineClass:
    """Machines that no objective or constraint of the goal tells apart.

    offers: what they are rented as, the cheapest first. price_usd_per_hour: of one machine, on
    average where the goal counts no dollars. interruptions_per_hour: of one machine.
    interruptions_per_hour, is_spot, zone: 0, False and "" where the goal does not ask.
    """

    shape: Shape
    offers: tuple[Offer, ...]
    price_usd_per_hour: float
    interruptions_per_hour: float
    is_spot: bool
    zone: str

    @property
    def cost(self) -> float:
        """What ranks machines where no dollars count: the price, or, not known, a dollar a GPU."""
        return self.price_usd_per_hour or float(self.shape.num_gpus)

    @property
    def count(self) -> int:
        return sum(offer.count for offer in self.offers)

    def rent(self, taken: Sequence[Offer] = ()) -> Iterator[Offer]:
        """An offer for each machine, one after another, but for those that are taken."""
        others = list(taken)
        for offer in self.offers:
            for _ in range(offer.count):
                if offer in others:
                    others.remove(offer)
                else:
                    yield offer


def check_offers(offers: Sequence[Offer], goal: Goal) -> None:
    """Raises InvalidInput, naming the offer, for counts and prices that mean nothing.

    A price of 0, not known, does for goals that count no dollars.
    """
    if not any(offer.count > 0 for offer in offers):
        raise InvalidInput("offers", "there is no machine among them")
    for index, offer in enumerate(offers):
        if offer.count < 0:
            raise InvalidInput(f"offers.{index}.count", "must not be negative")
        price = f"offers.{index}.price_usd_per_hour"
        if not offer.price_usd_per_hour >= 0:
            raise InvalidInput(price, "must not be negative")
        if goal.counts_dollars and not offer.price_usd_per_hour:
            raise InvalidInput(price, "must be above 0 for a goal that counts dollars")
        if not offer.interruptions_per_hour >= 0:
            raise InvalidInput(f"offers.{index}.interruptions_per_hour", "must not be negative")
        if offer.market not in ("spot", "on_demand"):
            raise InvalidInput(f"offers.{index}.market", "must be spot or on_demand")


def merge_offers(offers: Sequence[Offer], goal: Goal) -> list[MachineClass]:
    """Classes of machines, in the order in which the offers first name them."""
    has_market, has_zones = goal.on_demand_share > 0, goal.max_zone_share < 1
    groups: dict[tuple[Shape, float, float, bool, str], list[Offer]] = {}
    for offer in offers:
        if offer.count > 0:
            key = (
                offer.shape,
                offer.price_usd_per_hour if goal.counts_dollars else 0.0,
                offer.interruptions_per_hour if goal.recovery_s else 0.0,
                has_market and offer.market == "spot",
                offer.zone if has_zones else "",
            )
            groups.setdefault(key, []).append(offer)
    return [
        MachineClass(
            shape=shape,
            offers=tuple(sorted(group, key=lambda one: one.price_usd_per_hour or math.inf)),
            price_usd_per_hour=_mean_price(group),
            interruptions_per_hour=rate,
            is_spot=is_spot,
            zone=zone,
        )
        for (shape, _, rate, is_spot, zone), group in groups.items()
    ]


def _mean_price(offers: Sequence[Offer]) -> float:
    """Of one machine, of those whose price is known; 0 where none is."""
    priced = [offer for offer in offers if offer.price_usd_per_hour]
    if len({offer.price_usd_per_hour for offer in priced}) == 1:
        return priced[0].price_usd_per_hour
    num = sum(offer.count for offer in priced)
    return sum(offer.count * offer.price_usd_per_hour for offer in priced) / max(num, 1)
