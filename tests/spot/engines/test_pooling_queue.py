"""Which inputs are taken together, and in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spot.engines.pooling_queue import PoolingQueue, Slot, similar

lengths = st.lists(st.integers(1, 50), max_size=12)


def test_requests_give_in_turn() -> None:
    queue = PoolingQueue(max_batch=4, max_batch_tokens=100)
    queue.add(1, [5] * 10)
    queue.add(2, [5])
    assert [slot.handle for slot in queue.take()] == [1, 2, 1, 1]
    assert queue.num_waiting == 7


def test_a_full_batch_does_not_put_a_request_last_for_ever() -> None:
    queue = PoolingQueue(max_batch=1, max_batch_tokens=100)
    for handle in (1, 2, 3):
        queue.add(handle, [1, 1])
    assert [queue.take()[0].handle for _ in range(6)] == [1, 2, 3, 1, 2, 3]


def test_an_input_longer_than_a_batch_goes_alone() -> None:
    queue = PoolingQueue(max_batch=4, max_batch_tokens=10)
    queue.add(1, [30, 2, 2])
    assert queue.take() == [Slot(1, 0, 30)]
    assert [slot.num_tokens for slot in queue.take()] == [2, 2]
    assert queue.take() == []


def test_a_dropped_request_is_not_taken() -> None:
    queue = PoolingQueue(max_batch=4, max_batch_tokens=10)
    queue.add(1, [1])
    queue.add(2, [1])
    queue.drop(1)
    queue.drop(1)
    assert [slot.handle for slot in queue.take()] == [2]
    assert not queue


@given(st.lists(lengths, max_size=5), st.integers(1, 8), st.integers(1, 80))
def test_every_input_is_taken_once_within_the_limits(
    requests: list[list[int]], max_batch: int, max_batch_tokens: int
) -> None:
    queue = PoolingQueue(max_batch=max_batch, max_batch_tokens=max_batch_tokens)
    for handle, request in enumerate(requests):
        queue.add(handle, request)
    taken: list[Slot] = []
    while queue:
        batch = queue.take()
        assert 0 < len(batch) <= max_batch
        num_tokens = sum(slot.num_tokens for slot in batch)
        assert len(batch) == 1 or num_tokens <= max_batch_tokens
        taken += batch
    expected = {
        (handle, index, length)
        for handle, request in enumerate(requests)
        for index, length in enumerate(request)
    }
    assert {(slot.handle, slot.index, slot.num_tokens) for slot in taken} == expected
    assert len(taken) == len(expected)


@given(lengths)
def test_a_group_has_similar_lengths_and_nothing_is_lost(request: list[int]) -> None:
    batch = [Slot(1, index, length) for index, length in enumerate(request)]
    groups = list(similar(batch))
    assert sorted(s.index for group in groups for s in group) == list(range(len(batch)))
    for group in groups:
        assert group[-1].num_tokens <= 2 * group[0].num_tokens + 16
