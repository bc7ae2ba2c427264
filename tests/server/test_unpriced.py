"""Offers without a price, for a solver that wants one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from placement.hardware import Offer
from placement.plan import Goal, Plan
from server.unpriced import without_prices
from tests import plans


def test_unknown_prices_are_lent_and_taken_back() -> None:
    known, unknown = plans.offer("g6.12xlarge"), plans.offer("g6e.12xlarge", price_usd_per_hour=0.0)
    estimates = plans.estimator()

    def solve(offers: Sequence[Offer], /) -> Plan:
        assert all(offer.price_usd_per_hour > 0 for offer in offers)
        pipelines = [plans.pipeline(estimates, (offer, 4, 64, 0)) for offer in offers]
        return plans.plan(*pipelines, goal=Goal(objective="throughput"))

    plan = without_prices(solve)([known, unknown])
    assert [one.offers for one in plan.pipelines] == [(known,), (unknown,)]
    assert plan.price_usd_per_hour == pytest.approx(known.price_usd_per_hour)
