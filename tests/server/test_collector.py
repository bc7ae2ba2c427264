"""Deltas wait, merged, for the task that answers; leaving aborts what is open."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.collector import Collector
from spot.errors import EngineFailed, EngineUnavailable
from spot.generation import Generation, SamplingParams, TokenDelta, TokenLogprobs
from tests.fakes import HandEngine

pytestmark = pytest.mark.anyio


def generations(count: int) -> list[Generation]:
    return [
        Generation(f"g-{index}", [1, 2], SamplingParams(max_tokens=9)) for index in range(count)
    ]


def collecting(engine: HandEngine, count: int = 1, *, stream_interval: int = 1) -> Collector:
    return Collector(engine, generations(count), stream_interval=stream_interval)


async def received(collector: Collector) -> list[tuple[int, list[int]]]:
    with anyio.fail_after(2):
        return [(index, delta.token_ids) for index, delta in await collector.receive()]


async def test_deltas_are_handed_on_as_they_come() -> None:
    engine = HandEngine()
    with collecting(engine) as collector:
        engine.push(0, 5)
        assert await received(collector) == [(0, [5])]
        engine.push(0, 6, finish="stop")
        assert not collector.is_done
        assert await received(collector) == [(0, [6])]
        assert collector.is_done
    assert engine.aborted == []


async def test_receive_waits_for_the_first_delta() -> None:
    engine = HandEngine()
    with collecting(engine) as collector:
        async with anyio.create_task_group() as group:
            group.start_soon(self_push, engine)
            assert await received(collector) == [(0, [5])]


async def self_push(engine: HandEngine) -> None:
    await anyio.wait_all_tasks_blocked()
    engine.push(0, 5)


async def test_what_comes_while_nobody_looks_is_merged() -> None:
    engine = HandEngine()
    with collecting(engine, 2) as collector:
        engine.push(0, 5)
        engine.push(1, 9)
        engine.push(0, 6, 7)
        engine.push(0, 8, finish="length")
        (index, delta), (other, _) = await collector.receive()
        assert (index, other) == (0, 1)
        assert delta.token_ids == [5, 6, 7, 8]
        assert delta.finish_reason == "length"
        assert not collector.is_done, "the other one is open"


async def test_leaving_aborts_what_is_open_only() -> None:
    engine = HandEngine()
    with collecting(engine, 3):
        engine.push(1, 5, finish="stop")
    assert engine.aborted == ["g-0", "g-2"]


async def test_an_aborted_generation_is_dropped() -> None:
    engine = HandEngine()
    with collecting(engine, 2) as collector:
        engine.push(0, 5)
        collector.abort([0])
        engine.push(0, 6)
        engine.push(1, 7, finish="stop")
        assert await received(collector) == [(1, [7])]
        assert collector.is_done
    assert engine.aborted == ["g-0"]


async def test_an_error_comes_after_what_came_before_it() -> None:
    engine = HandEngine()
    with collecting(engine, 2) as collector:
        engine.push(0, 5)
        engine.fail(1, EngineFailed("broken"))
        engine.fail(1, EngineFailed("a second time"))
        assert await received(collector) == [(0, [5])]
        with pytest.raises(EngineFailed, match="broken"):
            await received(collector)
    assert "g-0" in engine.aborted


async def test_an_error_wakes_the_reader() -> None:
    engine = HandEngine()
    with collecting(engine) as collector:

        async def fail() -> None:
            await anyio.wait_all_tasks_blocked()
            collector.fail(EngineFailed("from outside"))

        async with anyio.create_task_group() as group:
            group.start_soon(fail)
            with pytest.raises(EngineFailed, match="from outside"):
                await received(collector)


async def test_a_poke_returns_empty_once() -> None:
    engine = HandEngine()
    with collecting(engine) as collector:
        collector.poke()
        collector.poke()
        assert await received(collector) == []
        engine.push(0, 5)
        assert await received(collector) == [(0, [5])]


async def test_a_poke_wakes_the_reader() -> None:
    engine = HandEngine()
    with collecting(engine) as collector:

        async def poke() -> None:
            await anyio.wait_all_tasks_blocked()
            collector.poke()

        async with anyio.create_task_group() as group:
            group.start_soon(poke)
            assert await received(collector) == []


async def test_a_poke_does_not_hide_tokens() -> None:
    engine = HandEngine()
    with collecting(engine) as collector:
        engine.push(0, 5)
        collector.poke()
        assert await received(collector) == [(0, [5])]


async def test_a_stream_interval_gathers_but_never_holds_the_first_or_last() -> None:
    engine = HandEngine()
    with collecting(engine, stream_interval=3) as collector:
        engine.push(0, 1)
        assert await received(collector) == [(0, [1])]
        engine.push(0, 2)
        engine.push(0, 3)
        collector.poke()
        assert await received(collector) == []
        engine.push(0, 4)
        assert await received(collector) == [(0, [2, 3, 4])]
        engine.push(0, 5, finish="stop")
        assert await received(collector) == [(0, [5])]


async def test_an_error_lets_go_of_gathered_tokens() -> None:
    engine = HandEngine()
    with collecting(engine, stream_interval=9) as collector:
        engine.push(0, 1)
        await received(collector)
        engine.push(0, 2)
        engine.fail(0, EngineFailed("broken"))
        assert await received(collector) == [(0, [2])]
        with pytest.raises(EngineFailed):
            await received(collector)


def test_a_refused_submission_takes_back_the_others() -> None:
    engine = HandEngine()
    engine.refuse_after = 2
    with pytest.raises(EngineUnavailable), collecting(engine, 3):
        raise AssertionError("not entered")
    assert engine.aborted == ["g-0", "g-1", "g-2"]


@given(
    st.lists(st.lists(st.integers(0, 99), max_size=3), min_size=1, max_size=8),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.booleans(),
)
def test_merging_loses_nothing(
    pushed: list[list[int]], looks: list[bool], with_logprobs: bool
) -> None:
    engine = HandEngine()
    deltas: list[TokenDelta] = []

    def look(collector: Collector) -> None:
        collector.poke()  # so that it never waits
        waiting = collector.receive()
        try:
            waiting.send(None)
        except StopIteration as done:
            deltas.extend(delta for _, delta in done.value)

    with collecting(engine) as collector:
        for position, (token_ids, looks_now) in enumerate(zip(pushed, looks, strict=False)):
            last = position == len(pushed) - 1
            logprobs = [TokenLogprobs([t], [-1.0], 1) for t in token_ids] if with_logprobs else None
            finish = "stop" if last else None
            engine.push(0, *token_ids, finish=finish, logprobs=logprobs, num_cached_tokens=position)
            if looks_now or last:
                look(collector)
    token_ids = [token_id for part in pushed for token_id in part]
    assert [token_id for delta in deltas for token_id in delta.token_ids] == token_ids
    entries = [entry.token_ids[0] for delta in deltas for entry in delta.logprobs or []]
    assert entries == (token_ids if with_logprobs else [])
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].num_cached_tokens == len(pushed) - 1
