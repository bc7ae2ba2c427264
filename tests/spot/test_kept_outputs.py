"""Outputs are kept whole, for a time, within bounds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot.generation import TokenDelta, TokenLogprobs
from spot.kept_outputs import KeptOutputs

LOGPROBS = TokenLogprobs([5, 6], [-0.5, float("-inf")], 1)


def output(*token_ids: int, **fields: Any) -> TokenDelta:
    return TokenDelta(list(token_ids), "stop", **fields)


def keep(kept: KeptOutputs, key: bytes, one: TokenDelta, *, now_s: float = 0.0) -> None:
    kept.keep(key, one, epoch=kept.epoch, now_s=now_s)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop_token_id": 7},
        {"logprobs": [LOGPROBS], "prompt_logprobs": [None, LOGPROBS]},
        {"num_cached_tokens": 16},
    ],
)
def test_what_is_found_is_what_was_kept(fields: dict[str, Any]) -> None:
    kept = KeptOutputs(ttl_s=1, max_bytes=10_000)
    keep(kept, b"k", output(5, **fields))
    assert kept.find(b"k", now_s=0.0) == output(5, **fields)
    assert kept.find(b"other", now_s=0.0) is None


def test_what_it_took_to_make_it_is_not_kept() -> None:
    kept = KeptOutputs(ttl_s=1, max_bytes=10_000)
    keep(kept, b"k", output(5, queue_s=3.0, num_migrations=2))
    assert kept.find(b"k", now_s=0.0) == output(5)


def test_each_taker_has_its_own() -> None:
    kept = KeptOutputs(ttl_s=1, max_bytes=10_000)
    one = output(5)
    keep(kept, b"k", one)
    one.merge(output(6))
    first = kept.find(b"k", now_s=0.0)
    assert first is not None
    first.merge(output(7))
    assert kept.find(b"k", now_s=0.0) == output(5)


def test_after_its_time_it_is_gone() -> None:
    kept = KeptOutputs(ttl_s=10, max_bytes=10_000)
    keep(kept, b"k", output(5), now_s=100.0)
    assert kept.find(b"k", now_s=110.0) is not None
    assert kept.find(b"k", now_s=110.1) is None
    assert (len(kept), kept.num_bytes) == (0, 0)


def test_being_used_does_not_make_it_younger() -> None:
    kept = KeptOutputs(ttl_s=10, max_bytes=10_000)
    keep(kept, b"k", output(5), now_s=0.0)
    assert kept.find(b"k", now_s=9.0) is not None
    assert kept.find(b"k", now_s=11.0) is None


def test_those_used_longest_ago_go_first() -> None:
    kept = KeptOutputs(ttl_s=10, max_bytes=700)
    for key in (b"a", b"b"):
        keep(kept, key, output(5))
    assert kept.find(b"a", now_s=0.0) is not None
    keep(kept, b"c", output(5))
    assert [kept.find(key, now_s=0.0) is not None for key in (b"a", b"b", b"c")] == [
        True,
        False,
        True,
    ]


def test_what_is_larger_than_all_room_is_not_kept_and_moves_nothing() -> None:
    kept = KeptOutputs(ttl_s=10, max_bytes=1000)
    keep(kept, b"a", output(5))
    keep(kept, b"b", output(*range(1000)))
    assert kept.find(b"a", now_s=0.0) is not None
    assert len(kept) == 1


def test_what_was_begun_before_all_was_forgotten_is_not_kept() -> None:
    kept = KeptOutputs(ttl_s=10, max_bytes=1000)
    keep(kept, b"a", output(5))
    epoch = kept.epoch
    kept.clear()
    kept.keep(b"b", output(6), epoch=epoch, now_s=0.0)
    assert (len(kept), kept.num_bytes) == (0, 0)
    keep(kept, b"b", output(7))
    assert kept.find(b"b", now_s=0.0) == output(7)


@given(
    st.lists(
        st.tuples(st.sampled_from(["keep", "find", "clear"]), st.integers(0, 5), st.integers(0, 90))
    )
)
def test_it_never_holds_more_than_it_may(steps: list[tuple[str, int, int]]) -> None:
    kept = KeptOutputs(ttl_s=3, max_bytes=1500)
    for now_s, (action, number, size) in enumerate(steps):
        key = bytes([number])
        if action == "keep":
            keep(kept, key, output(*range(1000, 1000 + size)), now_s=now_s)
            assert kept.find(key, now_s=now_s) is not None
        elif action == "find":
            kept.find(key, now_s=now_s)
        else:
            kept.clear()
        assert 0 <= kept.num_bytes <= 1500
        assert (kept.num_bytes == 0) == (len(kept) == 0)
    for number in range(6):
        kept.find(bytes([number]), now_s=1e9)
    assert (len(kept), kept.num_bytes) == (0, 0)
