"""Fits positive parameters to measurements: Nelder-Mead over their logarithms.

Deterministic and without derivatives, since the formulas to fit have maxima and steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Loss = Callable[[Vector], float]

# Parameters without effect on the loss must not run off: a factor of e^12 either way.
_REACH = 12.0


def fit_positive(
    loss: Loss,
    start: Sequence[float],
    *,
    most: Sequence[float] | None = None,
    num_restarts: int = 4,
    max_steps: int = 800,
) -> tuple[Vector, float]:
    """The parameters, all positive, of the least loss that is found from `start`, and that loss.

    most: what each may be at most (default: e^12 times its start; none is further below its start
    than that). Each restart begins a new simplex at the best point so far. Losses that are not
    finite count as infinite.
    """
    centre = np.log(np.asarray(start, dtype=np.float64))
    low, high = centre - _REACH, centre + _REACH
    if most is not None:
        high = np.minimum(high, np.log(np.asarray(most, dtype=np.float64)))

    def at(point: Vector) -> float:
        with np.errstate(all="ignore"):
            value = loss(np.exp(np.clip(point, low, high)))
        return value if np.isfinite(value) else np.inf

    best = centre
    for _ in range(num_restarts):
        best = _nelder_mead(at, best, max_steps)
    return np.exp(np.clip(best, low, high)), at(best)


def mean_log_error(estimate: Vector, measured: Vector) -> float:
    """Mean of |log(estimate / measured)|: a half and a double of what was measured are as bad."""
    return float(np.mean(np.abs(np.log(estimate / measured))))


def _nelder_mead(at: Loss, start: Vector, max_steps: int) -> Vector:
    """Source: Gao and Han 2012 (coefficients that adapt to the number of parameters)."""
    size = len(start)
    expand, contract, shrink = 1 + 2 / size, 0.75 - 1 / (2 * size), 1 - 1 / size
    if size == 1:
        contract, shrink = 0.5, 0.5
    simplex = np.vstack([start, start + 0.25 * np.eye(size)])
    losses = np.array([at(point) for point in simplex])
    for _ in range(max_steps):
        order = np.argsort(losses, kind="stable")
        simplex, losses = simplex[order], losses[order]
        if losses[-1] - losses[0] < 1e-7 and np.ptp(simplex, axis=0).max() < 1e-4:
            break
        centre = simplex[:-1].mean(axis=0)
        away = centre - simplex[-1]
        reflected = centre + away
        value = at(reflected)
        if value < losses[0]:
            further = centre + expand * away
            further_value = at(further)
            if further_value < value:
                reflected, value = further, further_value
        elif value >= losses[-2]:
            side = contract if value < losses[-1] else -contract
            near = centre + side * away
            near_value = at(near)
            if near_value >= min(value, losses[-1]):
                simplex[1:] = simplex[0] + shrink * (simplex[1:] - simplex[0])
                losses[1:] = [at(point) for point in simplex[1:]]
                continue
            reflected, value = near, near_value
        simplex[-1], losses[-1] = reflected, value
    best: Vector = simplex[np.argmin(losses)]
    return best
