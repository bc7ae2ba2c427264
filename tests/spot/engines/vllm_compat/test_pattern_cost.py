"""What a pattern is reckoned to cost."""

from __future__ import annotations

import pytest

from spot.engines.vllm_compat.pattern_cost import MAX_UNROLLED_MASKS, pattern_cost


@pytest.mark.parametrize("body", [".", "[a-z]", "(.)", "(?:[^x])", "^.", "\\w"])
def test_a_counted_repetition_of_a_class_costs_as_often_as_it_is_unrolled(body: str) -> None:
    once = pattern_cost(body).compile_ms
    assert pattern_cost(f"(?:{body}){{100}}").compile_ms == pytest.approx(100 * once)


def test_what_may_be_missing_costs_more_and_no_more_than_is_unrolled() -> None:
    fixed, variable, long = (
        pattern_cost(f".{{{count}}}").compile_ms for count in ("100", "1,100", "1,100000")
    )
    assert fixed < variable < long
    assert long < pattern_cost(".").compile_ms * 3 * MAX_UNROLLED_MASKS


def test_repetitions_add_up() -> None:
    once = pattern_cost("[a-z]{1,130}").compile_ms
    assert pattern_cost("[a-z]{1,130}x[a-z]{1,130}").compile_ms > 1.99 * once


def test_a_group_is_shared_however_often_it_comes() -> None:
    assert pattern_cost("([a-z]x){100}").compile_ms == pattern_cost("([a-z]x){5}").compile_ms
