"""The linear step time adds up its parts."""

from __future__ import annotations

import pytest

from placement.simulator.step_time import LinearStepTime, StepWork


def test_every_kind_of_work_counts() -> None:
    time = LinearStepTime(
        base_s=1.0, per_prefill_token_s=0.1, per_decode_seq_s=0.01, per_context_token_s=0.001
    )
    assert time.step_s(StepWork(3, 4, 2, 3)) == pytest.approx(1.345)


def test_negative_times_are_refused() -> None:
    with pytest.raises(ValueError, match="per_decode_seq_s must not be negative"):
        LinearStepTime(base_s=1.0, per_decode_seq_s=-1)
