"""Weighted round robin and prefix affinity."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot.routing import PrefixMap, Router, SmoothWeightedRoundRobin

WEIGHTS = st.dictionaries(
    st.sampled_from("abcdef"), st.integers(1, 20).map(float), min_size=1, max_size=6
)


@given(WEIGHTS, st.integers(1, 200))
def test_every_share_differs_from_its_due_by_less_than_a_turn_per_candidate(
    weights: dict[str, float], num_turns: int
) -> None:
    turns = SmoothWeightedRoundRobin()
    picked = Counter(turns.pick(weights) for _ in range(num_turns))
    total = sum(weights.values())
    for name, weight in weights.items():
        assert abs(picked[name] - num_turns * weight / total) < len(weights)


@given(WEIGHTS)
def test_a_whole_cycle_is_exact(weights: dict[str, float]) -> None:
    turns = SmoothWeightedRoundRobin()
    picked = Counter(turns.pick(weights) for _ in range(int(sum(weights.values()))))
    assert picked == weights


def test_turns_are_spread_out() -> None:
    turns = SmoothWeightedRoundRobin()
    assert "".join(turns.pick({"a": 5.0, "b": 1.0, "c": 1.0}) for _ in range(7)) == "aabacaa"


def test_nobody_floods_after_it_was_away() -> None:
    turns = SmoothWeightedRoundRobin()
    for _ in range(1000):
        turns.pick({"a": 1.0})
    for _ in range(1000):
        turns.charge("a", {"a": 1.0, "b": 1.0})
    picked = Counter(turns.pick({"a": 1.0, "b": 1.0}) for _ in range(20))
    assert picked["a"] >= 5


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0, "b": 1.0}])
def test_weights_must_be_positive(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        SmoothWeightedRoundRobin().pick(weights)


def test_the_longest_known_prefix_decides() -> None:
    prefixes = PrefixMap(block_size=4)
    system = list(range(8))
    prefixes.remember(prefixes.keys(system), "a")
    prefixes.remember(prefixes.keys([*system, 90, 91, 92, 93]), "b")
    assert prefixes.find(prefixes.keys([*system, 90, 91, 92, 93, 1])) == "b"
    assert prefixes.find(prefixes.keys([0, 1, 2, 3, 9, 9, 9, 9])) == "b"
    assert prefixes.find(prefixes.keys([7, 7, 7, 7])) is None
    assert prefixes.find(prefixes.keys(system, salt="other tenant")) is None


def test_the_map_stays_bounded_and_forgets_who_is_gone() -> None:
    prefixes = PrefixMap(block_size=1, capacity=10)
    prefixes.remember(prefixes.keys(list(range(100))), "a")
    keys = prefixes.keys(list(range(100)))
    assert prefixes.find(keys[:90]) is None
    assert prefixes.find(keys) == "a"
    prefixes.forget("a")
    assert prefixes.find(keys) is None


def test_equal_prefixes_go_to_one_pipeline_until_it_is_too_full() -> None:
    router = Router()
    prompt = list(range(200))
    weights = {"a": 1.0, "b": 1.0}
    home = router.pick(prompt, weights=weights, loads={"a": 0.0, "b": 0.0})
    other = "b" if home == "a" else "a"
    for _ in range(5):
        assert router.pick(prompt, weights=weights, loads={"a": 0.1, "b": 0.1}) == home
    chosen = {router.pick(prompt, weights=weights, loads={home: 1.0, other: 0.1}) for _ in range(2)}
    assert other in chosen


def test_unlike_prompts_are_shared_out_by_weight() -> None:
    router = Router()
    rng = random.Random(1)
    picked = Counter(
        router.pick(
            [rng.randrange(1000) for _ in range(100)],
            weights={"a": 5.0, "b": 3.0, "c": 1.0},
            loads={"a": 0.5, "b": 0.5, "c": 0.5},
        )
        for _ in range(900)
    )
    assert picked == {"a": 500, "b": 300, "c": 100}
