"""Nelder-Mead finds what made the numbers."""

from __future__ import annotations

import numpy as np
import pytest

from placement.fit import Vector, fit_positive, mean_log_error


def test_parameters_are_recovered() -> None:
    x = np.array([1.0, 10.0, 100.0, 1000.0])
    truth = 3.0 + x / 7.0

    def loss(values: Vector) -> float:
        return mean_log_error(values[0] + x / values[1], truth)

    values, error = fit_positive(loss, [1.0, 1.0])
    assert values == pytest.approx([3.0, 7.0], rel=1e-3)
    assert error < 1e-4


def test_the_same_start_gives_the_same_answer() -> None:
    def loss(values: Vector) -> float:
        return float(np.abs(np.log(values) - [1.0, 2.0, 3.0]).sum())

    one, _ = fit_positive(loss, [1.0, 1.0, 1.0])
    other, _ = fit_positive(loss, [1.0, 1.0, 1.0])
    assert list(one) == list(other)
    assert np.log(one) == pytest.approx([1.0, 2.0, 3.0], abs=1e-2)


def test_a_parameter_without_effect_stays_in_reach() -> None:
    values, _ = fit_positive(lambda values: abs(float(values[0]) - 2.0), [1.0, 1.0])
    assert np.all(np.abs(np.log(values)) <= 12.0 + 1e-9)


def test_a_bound_is_kept_where_more_would_fit_better() -> None:
    values, _ = fit_positive(lambda values: abs(float(values[0]) - 5.0), [1.0], most=[2.0])
    assert values == pytest.approx([2.0])


def test_losses_that_are_no_numbers_are_avoided() -> None:
    def loss(values: Vector) -> float:
        return float("nan") if values[0] > 5.0 else abs(float(values[0]) - 4.0)

    values, _ = fit_positive(loss, [1.0])
    assert values[0] == pytest.approx(4.0, rel=1e-3)


def test_errors_of_half_and_double_weigh_the_same() -> None:
    assert mean_log_error(np.array([2.0]), np.array([1.0])) == pytest.approx(
        mean_log_error(np.array([1.0]), np.array([2.0]))
    )
