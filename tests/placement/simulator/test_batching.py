"""The batcher shares out budget, seats and blocks as vLLM's scheduler does, and loses nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.simulator.batching import BatchedSequence, ContinuousBatcher, Phase, Step
from placement.simulator.step_time import StepWork


class Bench:
    """A batcher, driven step by step; every token is 7, every sequence ends at its length."""

    def __init__(self, **options: Any) -> None:
        limits = {
            "num_blocks": 100,
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
        }
        self.batcher = ContinuousBatcher(**{**limits, **options})
        self.ends: dict[BatchedSequence, int] = {}

    def add(
        self, name: str, num_prompt: int, num_output: int = 5, *, first: int = 1, **options: Any
    ) -> BatchedSequence:
        prompt = list(range(first, first + num_prompt))
        sequence = self.batcher.add(name, prompt, **options)
        self.ends[sequence] = num_prompt + num_output
        return sequence

    def plan(self) -> Step | None:
        step = self.batcher.plan(now_s=0.0)
        self.batcher.check_invariants()
        return step

    def complete(self, step: Step) -> None:
        for sequence in self.batcher.complete(step):
            if len(sequence.token_ids) + 1 == self.ends[sequence]:
                self.batcher.finish(sequence)
            else:
                self.batcher.append(sequence, 7)
        self.batcher.check_invariants()

    def step(self) -> dict[str, int]:
        """One step at a time: who took part, with how many new tokens."""
        step = self.plan()
        if step is None:
            return {}
        self.complete(step)
        return {sequence.id: num for sequence, num in step.num_new_tokens.items()}

    def steps(self) -> Iterator[dict[str, int]]:
        while taken := self.step():
            yield taken


def test_a_long_prompt_is_computed_in_chunks_beside_what_decodes() -> None:
    bench = Bench()
    bench.add("a", 3)
    assert bench.step() == {"a": 3}
    bench.add("b", 70)
    assert bench.step() == {"a": 1, "b": 31}
    assert bench.step() == {"a": 1, "b": 31}
    bench.add("c", 40)
    assert bench.step() == {"a": 1, "b": 8, "c": 23}
    assert bench.step() == {"a": 1, "b": 1, "c": 17}


def test_a_step_says_what_it_takes() -> None:
    bench = Bench()
    bench.add("a", 3)
    bench.step()
    bench.add("b", 10)
    step = bench.plan()
    assert step is not None
    # Pairs: each of b's ten tokens sees those before it and itself.
    assert step.work == StepWork(10, 1, 10, 4, prefill_pairs=55, num_seqs=2)
    assert [sequence.id for sequence in step.sampling] == ["a", "b"]


def test_seats_are_limited() -> None:
    bench = Bench(max_num_seqs=2)
    for name in "abc":
        bench.add(name, 2, 2)
    assert list(bench.steps()) == [{"a": 2, "b": 2}, {"a": 1, "b": 1}, {"c": 2}, {"c": 1}]


def test_the_queue_is_by_priority_then_arrival() -> None:
    bench = Bench(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", -1)):
        bench.add(name, 2, 1, priority=priority)
    assert [next(iter(taken)) for taken in bench.steps()] == ["d", "b", "c", "a"]


def test_the_youngest_is_preempted_and_computed_again_with_its_output() -> None:
    bench = Bench(num_blocks=4)
    bench.add("a", 7, 5)
    b = bench.add("b", 7, 5)
    taken = list(bench.steps())
    assert bench.batcher.num_preemptions == 1
    # Both hold two blocks; at the ninth token a takes one of b's, and b starts over with 9 tokens.
    assert taken[:3] == [{"a": 7, "b": 7}, {"a": 1, "b": 1}, {"a": 1}]
    assert {"b": 9} in taken
    assert b.phase is Phase.ENDED
    assert b.token_ids == [*range(1, 8), 7, 7, 7, 7]
    assert bench.batcher.kv.num_used == 0


def test_the_least_urgent_is_preempted_even_if_it_is_already_planned() -> None:
    bench = Bench(num_blocks=4)
    bench.add("idle", 8, 5, priority=1)
    bench.step()
    bench.add("urgent", 4, 8, priority=0)
    assert bench.step() == {"idle": 1, "urgent": 4}
    # All four blocks are held, idle is planned first, and urgent's fifth token needs a block.
    assert list(bench.steps()) == [{"urgent": 1}] * 7 + [{"idle": 10}, {"idle": 1}, {"idle": 1}]
    assert bench.batcher.num_preemptions == 1


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    bench = Bench(num_blocks=10, max_num_batched_tokens=8)
    bench.add("a", 8, 5)
    bench.step()
    bench.add("b", 40, 1)
    for _ in range(4):
        assert list(bench.step()) == ["a"]
    assert list(bench.step()) == ["b"]


def test_a_sequence_that_can_never_run_is_refused() -> None:
    with pytest.raises(ValueError, match="401 tokens cannot run"):
        Bench().add("a", 401)
    with pytest.raises(ValueError, match="0 tokens"):
        Bench().add("a", 0)


def test_steps_under_way_share_no_sequence_that_waits_for_its_token() -> None:
    bench = Bench(max_seqs_per_step=2)
    for name in "abcd":
        bench.add(name, 2, 9)
    first, second = bench.plan(), bench.plan()
    assert first is not None
    assert second is not None
    assert [s.id for s in first.num_new_tokens] == ["a", "b"]
    assert [s.id for s in second.num_new_tokens] == ["c", "d"]
    assert bench.plan() is None
    bench.complete(first)
    third = bench.plan()
    assert third is not None
    assert [s.id for s in third.num_new_tokens] == ["a", "b"]


def test_chunks_of_one_prompt_may_be_under_way_together() -> None:
    bench = Bench()
    a = bench.add("a", 50)
    first, second = bench.plan(), bench.plan()
    assert first is not None
    assert second is not None
    assert (first.num_new_tokens, first.sampling) == ({a: 32}, [])
    assert (second.num_new_tokens, second.sampling) == ({a: 18}, [a])


def test_a_token_under_way_at_the_preemption_is_neither_lost_nor_doubled() -> None:
    bench = Bench(num_blocks=4, max_seqs_per_step=1)
    bench.add("a", 8, 4)
    b = bench.add("b", 7, 4)
    first, second = bench.plan(), bench.plan()
    assert first is not None
    assert second is not None
    bench.complete(first)
    third = bench.plan()
    assert third is not None
    assert b.phase is Phase.WAITING
    assert b.num_under_way == 1
    assert bench.plan() is None
    bench.complete(second)
    assert b.token_ids == [*range(1, 8), 7]
    bench.complete(third)
    list(bench.steps())
    assert b.token_ids == [*range(1, 8), 7, 7, 7]


def test_a_preempted_sequence_waits_for_its_token_even_if_there_is_space() -> None:
    bench = Bench(num_blocks=4, max_seqs_per_step=1)
    a, b = bench.add("a", 8, 4), bench.add("b", 7, 4)
    first, second = bench.plan(), bench.plan()
    assert first is not None
    assert second is not None
    bench.complete(first)
    assert bench.plan() is not None
    bench.batcher.finish(a)
    assert b.phase is Phase.WAITING
    assert bench.plan() is None
    bench.complete(second)
    assert bench.step() == {"b": 8}


def test_what_was_planned_for_the_preempted_goes_to_the_others() -> None:
    bench = Bench(num_blocks=4, max_num_batched_tokens=3)
    bench.add("idle", 3, 9, priority=1)
    assert bench.step() == {"idle": 3}
    bench.add("urgent", 3, 9)
    bench.add("late", 4, 3)
    assert bench.step() == {"idle": 1, "urgent": 2}
    assert bench.step() == {"idle": 1, "urgent": 1, "late": 1}
    assert bench.step() == {"idle": 1, "urgent": 1, "late": 1}
    # idle is planned, then preempted for urgent's block; late gets what idle would have had.
    assert bench.step() == {"urgent": 1, "late": 2}


def test_ending_frees_seat_and_blocks_at_once_even_under_way() -> None:
    bench = Bench()
    a, b = bench.add("a", 5), bench.add("b", 5)
    step = bench.plan()
    assert step is not None
    bench.batcher.finish(a)
    bench.batcher.finish(a)
    assert (len(bench.batcher.running), bench.batcher.kv.num_used) == (1, 2)
    bench.complete(step)
    assert (len(a.token_ids), len(b.token_ids)) == (5, 6)
    c = bench.add("c", 5)
    bench.batcher.finish(c)
    assert bench.batcher.num_waiting == 0
    assert bench.step() == {"b": 1}


def test_the_cache_saves_full_blocks_but_never_the_last_token() -> None:
    bench = Bench(enable_prefix_caching=True)
    bench.add("a", 16, 1)
    assert bench.step() == {"a": 16}
    again = bench.add("again", 16, 1)
    longer = bench.add("longer", 18, 1)
    other = bench.add("other", 16, 1, first=2)
    salted = bench.add("salted", 16, 1, cache_root=1)
    assert bench.step() == {"again": 4, "longer": 2, "other": 16, "salted": 10}
    assert [s.num_cached for s in (again, longer, other, salted)] == [12, 16, 0, 0]
    assert bench.batcher.prefix_cache_queries == 16 + 16 + 18 + 16 + 16
    assert bench.batcher.prefix_cache_hits == 28


def test_output_is_cached_too() -> None:
    bench = Bench(enable_prefix_caching=True)
    a = bench.add("a", 6, 7)
    list(bench.steps())
    resumed = bench.batcher.add("resumed", list(a.token_ids))
    assert bench.plan() is not None
    assert resumed.num_cached == 8


@pytest.mark.parametrize(
    "option", ["max_num_seqs", "max_num_batched_tokens", "max_seqs_per_step", "num_blocks"]
)
def test_senseless_limits_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Bench(**{option: -1})


@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 2), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    depth=st.integers(1, 3),
    max_num_seqs=st.integers(1, 5),
    num_blocks=st.integers(8, 14),
    enable_prefix_caching=st.booleans(),
    chance=st.randoms(use_true_random=False),
)
def test_whatever_comes_everything_ends_within_the_limits(
    jobs: list[tuple[int, int, int, bool]],
    depth: int,
    max_num_seqs: int,
    num_blocks: int,
    enable_prefix_caching: bool,
    chance: random.Random,
) -> None:
    bench = Bench(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=9,
        max_seqs_per_step=-(-max_num_seqs // depth),
        enable_prefix_caching=enable_prefix_caching,
    )
    pending = list(enumerate(jobs))
    added: list[tuple[BatchedSequence, bool]] = []
    under_way: list[Step] = []
    while pending or bench.batcher.running or bench.batcher.num_waiting or under_way:
        if pending and chance.random() < 0.5:
            index, (num_prompt, num_output, priority, aborts) = pending.pop()
            sequence = bench.add(str(index), num_prompt, num_output, priority=priority)
            added.append((sequence, aborts))
        for sequence, aborts in added:
            if aborts and chance.random() < 0.1:
                bench.batcher.finish(sequence)
                bench.batcher.check_invariants()
        if len(under_way) < depth and (step := bench.plan()) is not None:
            under_way.append(step)
        elif under_way:
            bench.complete(under_way.pop(0))
        else:
            assert pending or not (bench.batcher.running or bench.batcher.num_waiting)
    assert all(sequence.phase is Phase.ENDED for sequence, _ in added)
    for sequence, aborts in added:
        assert aborts or len(sequence.token_ids) == bench.ends[sequence] - 1
    assert bench.batcher.kv.num_used == 0
