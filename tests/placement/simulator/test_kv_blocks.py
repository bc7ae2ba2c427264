"""KV blocks are counted right, shared by contents, and forgotten longest unused first."""

from __future__ import annotations

import pytest

from placement.simulator.kv_blocks import BlockTable, KvBlocks


def table(kv: KvBlocks, num_tokens: int, hashes: list[int]) -> BlockTable:
    held = BlockTable()
    found = kv.find(hashes)
    kv.share(held, found)
    assert kv.grow(held, num_tokens)
    kv.register(held, hashes[len(found) :])
    return held


def num_known(kv: KvBlocks, hashes: list[int]) -> int:
    return len(kv.find(hashes))


def test_space_is_given_in_whole_blocks_or_not_at_all() -> None:
    kv = KvBlocks(3, 4)
    first, second = BlockTable(), BlockTable()
    assert kv.grow(first, 5)
    assert (first.num_blocks, kv.num_free) == (2, 1)
    assert kv.grow(first, 8)
    assert first.num_blocks == 2
    assert not kv.grow(second, 5)
    assert (second.num_blocks, kv.num_free) == (0, 1)
    kv.free(first)
    assert (kv.num_free, kv.num_used) == (3, 0)
    kv.check_invariants([first, second])


def test_equal_contents_are_held_once() -> None:
    kv = KvBlocks(4, 4)
    first = table(kv, 8, [1, 2])
    second = table(kv, 12, [1, 2])
    assert kv.num_used == 3
    kv.free(first)
    assert kv.num_used == 3
    kv.check_invariants([second])


def test_what_nobody_holds_is_free_and_still_known() -> None:
    kv = KvBlocks(4, 4)
    kv.free(table(kv, 8, [1, 2]))
    assert kv.num_free == 4
    assert num_known(kv, [1, 2, 3]) == 2
    assert kv.can_hold(16, kv.find([1, 2]))
    assert not kv.can_hold(17, kv.find([1, 2]))


def test_the_longest_unused_goes_first_and_the_tail_before_the_head() -> None:
    kv = KvBlocks(4, 4)
    old, new = table(kv, 8, [1, 2]), table(kv, 8, [5, 6])
    kv.free(old)
    kv.free(new)
    assert kv.grow(BlockTable(), 4)
    assert (num_known(kv, [1, 2]), num_known(kv, [5, 6])) == (1, 2)


def test_a_shared_block_in_use_needs_no_space() -> None:
    kv = KvBlocks(2, 4)
    table(kv, 8, [1, 2])
    assert kv.can_hold(8, kv.find([1, 2]))
    assert not kv.can_hold(9, kv.find([1, 2]))
    assert not kv.can_hold(4)


def test_twins_stay_two() -> None:
    kv = KvBlocks(4, 4)
    first, second = BlockTable(), BlockTable()
    for held in (first, second):
        kv.grow(held, 4)
    for held in (first, second):
        kv.register(held, [1])
    assert kv.num_used == 2
    kv.check_invariants([first, second])
    kv.free(first)
    kv.free(second)
    assert kv.num_used == 0
    kv.check_invariants([])
    filler = BlockTable()
    assert kv.grow(filler, 12)
    assert num_known(kv, [1]) == 1
    assert kv.grow(filler, 16)
    assert num_known(kv, [1]) == 0


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (16, 0)])
def test_senseless_sizes_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KvBlocks(num_blocks, block_size)


def test_a_registration_can_be_taken_back() -> None:
    kv = KvBlocks(4, 4)
    held = table(kv, 12, [1, 2, 3])
    kv.unregister(held, 1)
    kv.check_invariants([held])
    assert (num_known(kv, [1]), num_known(kv, [2]), kv.num_used) == (1, 0, 3)
    kv.free(held)
    assert kv.num_used == 0
