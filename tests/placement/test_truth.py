"""The shipped corrections reach what `docs/estimator.md` says, on what their fit has not seen."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.placement_truth import Subject, subjects
from benchmarks.profiles import gemms
from placement.kernel_corrections import shipped_corrections

SUBJECTS = subjects()


def error(subject: Subject) -> float:
    data = subject.data.only(subject.data.is_held_out & subject.data.is_serving)
    estimate = subject.corrected(data, shipped_corrections()[subject.gpu])
    return float(np.abs(estimate / data.seconds - 1).mean())


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_unseen_measurements_are_met_within_a_tenth(subject: Subject) -> None:
    assert error(subject) <= 0.10


def test_unseen_layers_are_met_better_than_the_paper_meets_its_own() -> None:
    layers = [error(one) for one in SUBJECTS if one.kind.startswith("layer")]
    assert np.mean(layers) <= 0.066


def test_whole_sizes_are_held_out() -> None:
    data = gemms("L40S")
    seen = data.only(~data.is_held_out)
    assert not np.isin(data["n"][data.is_held_out], seen["n"]).all()
    assert 5120 not in seen["n"]
    assert 5120 not in seen["k"]
