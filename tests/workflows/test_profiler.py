"""The profiler finds what calls cost, starts sane, forgets, survives a restart."""

from __future__ import annotations

import json
import random

import hypothesis
import pytest
from hypothesis import strategies as st

from workflows.profiler import Profiler
from workflows.scheduling.costs import Cost
from workflows.scheduling.messages import Size

TRUE = Cost(overhead_s=0.03, per_output_s=0.004, per_input_s=2e-5)


def taught(
    profiler: Profiler, cost: Cost, *, count: int = 200, noise: float = 0.05, unit: float = 1.0
) -> Profiler:
    rng = random.Random(1)
    for _ in range(count):
        size = Size(float(rng.randint(1, 32)), unit * rng.uniform(50, 4000))
        profiler.observe("embed:m", size, cost.of(size) * rng.gauss(1.0, noise))
    return profiler


def test_it_finds_the_overhead_and_the_rates() -> None:
    found = taught(Profiler(), TRUE).cost("embed:m")
    assert found.overhead_s == pytest.approx(TRUE.overhead_s, rel=0.25)
    assert found.per_output_s == pytest.approx(TRUE.per_output_s, rel=0.1)
    assert found.per_input_s == pytest.approx(TRUE.per_input_s, rel=0.1)


def test_before_the_first_call_there_is_a_prior_of_the_operator() -> None:
    profiler = Profiler({"embed": TRUE})
    assert profiler.cost("embed:anything") == TRUE
    assert profiler.cost("something:else").of(Size()) > 0


def test_a_few_calls_are_enough_to_be_near() -> None:
    slow = Cost(overhead_s=1.0, per_output_s=0.2)
    profiler = taught(Profiler(), slow, count=15)
    assert profiler.cost("embed:m").of(Size(16.0, 2000.0)) == pytest.approx(4.2, rel=0.25)


def test_it_follows_a_change() -> None:
    profiler = taught(Profiler(memory=50.0), TRUE)
    twice = Cost(overhead_s=0.06, per_output_s=0.008, per_input_s=4e-5)
    taught(profiler, twice, count=300)
    assert profiler.cost("embed:m").of(Size(8.0, 1000.0)) == pytest.approx(
        twice.of(Size(8.0, 1000.0)), rel=0.1
    )


def test_calls_that_are_all_alike_are_predicted_exactly_enough() -> None:
    profiler = Profiler()
    for _ in range(100):
        profiler.observe("rerank:m", Size(12.0, 1500.0), 0.5)
    assert profiler.cost("rerank:m").of(Size(12.0, 1500.0)) == pytest.approx(0.5, rel=0.05)
    assert profiler.cost("rerank:m").of(Size(24.0, 3000.0)) > 0.5


def test_one_hang_does_not_spoil_the_fit() -> None:
    profiler = taught(Profiler(), TRUE)
    before = profiler.cost("embed:m").of(Size(8.0, 1000.0))
    profiler.observe("embed:m", Size(8.0, 1000.0), 3600.0)
    assert profiler.cost("embed:m").of(Size(8.0, 1000.0)) < 1.2 * before


@hypothesis.given(
    st.lists(
        st.tuples(st.floats(0, 1e4), st.floats(0, 1e6), st.floats(0, 1e4)), min_size=1, max_size=30
    )
)
def test_costs_are_never_negative(calls: list[tuple[float, float, float]]) -> None:
    profiler = Profiler()
    for outputs, inputs, service_s in calls:
        profiler.observe("llm:m", Size(outputs, inputs), service_s)
    cost = profiler.cost("llm:m")
    assert min(cost.overhead_s, cost.per_output_s, cost.per_input_s) >= 0


def test_the_unit_of_size_does_not_matter() -> None:
    tokens = taught(Profiler({"embed": Cost(overhead_s=0.01, per_input_s=1e-5)}), TRUE)
    in_characters = Cost(overhead_s=0.03, per_output_s=0.004, per_input_s=2e-5 / 4)
    prior = {"embed": Cost(overhead_s=0.01, per_input_s=1e-5 / 4)}
    characters = taught(Profiler(prior), in_characters, unit=4.0)
    assert characters.cost("embed:m").of(Size(5.0, 4000.0)) == pytest.approx(
        tokens.cost("embed:m").of(Size(5.0, 1000.0))
    )


def test_answers_are_expected_to_be_as_long_as_they_were() -> None:
    profiler = Profiler()
    assert profiler.expected_outputs("llm:m", limit=16) == 16
    for _ in range(100):
        profiler.observe("llm:m", Size(80.0, 500.0), 2.0)
    assert profiler.expected_outputs("llm:m") == pytest.approx(80.0)
    assert profiler.expected_outputs("llm:m", limit=50) == 50


def test_it_goes_on_after_a_restart() -> None:
    profiler = taught(Profiler(), TRUE)
    again = Profiler()
    again.load(json.loads(json.dumps(profiler.to_dict())))
    assert again.cost("embed:m") == profiler.cost("embed:m")


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"format": 99, "profiles": {"embed:m": {}}},
        {"format": 1, "profiles": {"embed:m": {"products": [1], "targets": [], "num_observed": 1}}},
        {"format": 1, "profiles": {"embed:m": None}},
        {
            "format": 1,
            "profiles": {
                "embed:m": {
                    "products": [float("nan")] * 6,
                    "targets": [0.0] * 3,
                    "num_observed": 1,
                }
            },
        },
    ],
)
def test_a_state_that_cannot_be_read_is_left_out(state: dict[str, object]) -> None:
    profiler = Profiler({"embed": TRUE})
    profiler.load(state)
    assert profiler.cost("embed:m") == TRUE
