"""How long a generation that fails without a token waits, and when it is suspected."""

from __future__ import annotations

from spot.failover_policy import FailoverPolicy


def test_the_first_retry_is_at_once_and_the_next_wait_ever_longer() -> None:
    policy = FailoverPolicy(backoff_s=0.25, max_backoff_s=1.0)
    assert [policy.retry_delay_s(number) for number in range(6)] == [0, 0, 0.25, 0.5, 1.0, 1.0]


def test_a_suspect_is_one_loss_away_from_being_the_cause() -> None:
    policy = FailoverPolicy(max_fruitless=3)
    assert [policy.is_suspect(number) for number in range(4)] == [False, False, True, True]
