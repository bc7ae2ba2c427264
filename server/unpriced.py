"""Plans of machines whose price nobody knows, for goals that count no dollars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from placement.explanation import Solve
from placement.hardware import Offer
from placement.plan import Plan, PlannedPipeline

_STAND_IN_USD_PER_HOUR = 1.0


def without_prices(solve: Solve) -> Solve:
    """`solve` for offers at a price of 0, which it would refuse: they have another meanwhile."""

    def answer(offers: Sequence[Offer], /) -> Plan:
        stand_ins = [
            offer
            if offer.price_usd_per_hour
            else replace(offer, price_usd_per_hour=_STAND_IN_USD_PER_HOUR)
            for offer in offers
        ]
        unpriced = {
            replace(stand_in, count=0)
            for offer, stand_in in zip(offers, stand_ins, strict=True)
            if not offer.price_usd_per_hour
        }

        def restored(pipeline: PlannedPipeline) -> PlannedPipeline:
            rented = tuple(
                replace(one, price_usd_per_hour=0.0) if replace(one, count=0) in unpriced else one
                for one in pipeline.offers
            )
            return replace(pipeline, offers=rented)

        plan = solve(stand_ins)
        return replace(plan, pipelines=tuple(map(restored, plan.pipelines)))

    return answer
