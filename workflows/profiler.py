"""How long work takes: T̄ by profile, learnt from what was observed, kept as a dictionary.

A profile is an operator with its model (`embed:bge-large`, `llm:llama-3-8b`). Its time is linear,
T = overhead + outputs · per_output + inputs · per_input (eq. 13 for a whole batch), fitted by least
squares over observations that fade: each counts 1 − 1/`memory` of the next one. A prior stands in
for what was never seen, and weighs as much as `prior_weight` observations of typical size; so a
profile whose calls are all alike keeps the prior's proportions, and one wild first observation
moves little. Coefficients are never negative.

The tokens that an answer will have are not known before: `expected_outputs` is the faded mean of
what the profile has made, at most the request's limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from workflows.scheduling.costs import Cost
from workflows.scheduling.messages import Size

FORMAT = 1

# What is believed before the first observation, by the part of a profile before its colon. Orders
# of magnitude of small models on a GPU; the first dozen calls correct them.
PRIORS: dict[str, Cost] = {
    # 0.1 s to the first token, 25 ms a token, 5,000 prompt tokens a second.
    "llm": Cost(overhead_s=0.1, per_output_s=0.025, per_input_s=2e-4),
    # 5 ms a call; a text of 128 tokens takes some 2.5 ms.
    "embed": Cost(overhead_s=0.005, per_output_s=5e-4, per_input_s=1.5e-5),
    "rerank": Cost(overhead_s=0.005, per_output_s=5e-4, per_input_s=1.5e-5),
    "search": Cost(overhead_s=0.01),
    "ingest": Cost(overhead_s=0.01, per_output_s=1e-3),
    # Other people's servers.
    "web_search": Cost(overhead_s=0.7),
    "http": Cost(overhead_s=0.3),
}
_UNKNOWN = Cost(overhead_s=0.1)
# Output tokens of an answer of which nothing is known.
_FIRST_OUTPUTS = 200.0
_TINY = 1e-12


@dataclass(slots=True)
class _Fit:
    """Moments of one profile, faded. products: of the features (1, outputs, inputs), upper
    triangle by rows. targets: of the features with the time."""

    products: list[float] = field(default_factory=lambda: [0.0] * 6)
    targets: list[float] = field(default_factory=lambda: [0.0] * 3)
    num_observed: int = 0

    def add(self, size: Size, service_s: float, keep: float) -> None:
        features = (1.0, size.outputs, size.inputs)
        index = 0
        for i, one in enumerate(features):
            self.targets[i] = keep * self.targets[i] + one * service_s
            for other in features[i:]:
                self.products[index] = keep * self.products[index] + one * other
                index += 1
        self.num_observed += 1

    @property
    def mean_outputs(self) -> float:
        return self.products[1] / self.products[0]

    def matrix(self) -> list[list[float]]:
        a, b, c, d, e, f = self.products
        return [[a, b, c], [b, d, e], [c, e, f]]


class Profiler:
    """A `CostModel` that learns. memory: observations after which an old one counts for a third.

    outlier: an observation is cut to so many times its prediction, once there are a few.
    """

    def __init__(
        self,
        priors: Mapping[str, Cost] | None = None,
        *,
        memory: float = 200.0,
        prior_weight: float = 3.0,
        outlier: float = 10.0,
    ) -> None:
        self._priors = PRIORS if priors is None else priors
        self._keep = 1 - 1 / memory
        self._prior_weight = prior_weight
        self._outlier = outlier
        self._fits: dict[str, _Fit] = {}
        self._solved: dict[str, Cost] = {}

    def prior(self, profile: str) -> Cost:
        """Of the whole profile's name, else of its operator."""
        found = self._priors.get(profile) or self._priors.get(profile.partition(":")[0])
        return found or _UNKNOWN

    def cost(self, profile: str) -> Cost:
        """The present fit, or the prior."""
        solved = self._solved.get(profile)
        if solved is None:
            fit, prior = self._fits.get(profile), self.prior(profile)
            solved = prior if fit is None else _solve(fit, prior, self._prior_weight)
            self._solved[profile] = solved
        return solved

    def observe(self, profile: str, size: Size, service_s: float) -> None:
        """A dispatch took so long."""
        fit = self._fits.setdefault(profile, _Fit())
        if fit.num_observed >= self._prior_weight:
            service_s = min(service_s, self._outlier * max(_TINY, self.cost(profile).of(size)))
        fit.add(size, max(0.0, service_s), self._keep)
        self._solved.pop(profile, None)

    def expected_outputs(self, profile: str, *, limit: float | None = None) -> float:
        """Tokens that an answer will probably have. limit: `max_tokens`."""
        fit = self._fits.get(profile)
        expected = _FIRST_OUTPUTS if fit is None else fit.mean_outputs
        return expected if limit is None else min(expected, limit)

    def to_dict(self) -> dict[str, Any]:
        """What it has learnt, as JSON takes it."""
        return {
            "format": FORMAT,
            "profiles": {name: asdict(fit) for name, fit in self._fits.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `to_dict`. What cannot be read is left out: it is learnt again."""
        if state.get("format") != FORMAT:
            return
        for name, values in state.get("profiles", {}).items():
            fit = _read(values)
            if fit is not None:
                self._fits[name] = fit
                self._solved.pop(name, None)


def _read(values: Any) -> _Fit | None:
    try:
        fit = _Fit(
            products=[float(value) for value in values["products"]],
            targets=[float(value) for value in values["targets"]],
            num_observed=int(values["num_observed"]),
        )
    except (KeyError, TypeError, ValueError):
        return None
    is_whole = len(fit.products) == 6 and len(fit.targets) == 3 and fit.products[0] > 0
    numbers = (*fit.products, *fit.targets)
    return fit if is_whole and all(0 <= value < float("inf") for value in numbers) else None


def _solve(fit: _Fit, prior: Cost, weight: float) -> Cost:
    """Ridge regression towards the prior: (X'X + wD)·θ = X'y + wD·θ₀, with θ ≥ 0.

    D holds each feature's mean square, so that the unit of sizes does not matter. A feature whose
    coefficient comes out negative is dropped, the most negative first.
    """
    products = fit.matrix()
    ridge = [weight * products[i][i] / products[0][0] for i in range(3)]
    before = (prior.overhead_s, prior.per_output_s, prior.per_input_s)
    active = [i for i in range(3) if products[i][i] > 0]
    theta = [0.0, 0.0, 0.0]
    while active:
        matrix = [[products[i][j] + ridge[i] * (i == j) for j in active] for i in active]
        vector = [fit.targets[i] + ridge[i] * before[i] for i in active]
        solution = _gauss(matrix, vector)
        scaled = [value * products[i][i] ** 0.5 for i, value in zip(active, solution, strict=True)]
        worst = min(range(len(active)), key=scaled.__getitem__)
        if solution[worst] >= 0:
            for i, value in zip(active, solution, strict=True):
                theta[i] = value
            break
        del active[worst]
    for i in range(3):
        if products[i][i] <= 0:
            theta[i] = before[i]
    return Cost(overhead_s=theta[0], per_output_s=theta[1], per_input_s=theta[2])


def _gauss(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """The solution of a small positive definite system, which the ridge makes it."""
    size = len(vector)
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
