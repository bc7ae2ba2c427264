"""The scripted engine keeps the engines' contract, and its seeded model means what it says."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from spot.engines.scripted import Faults, ScriptedEngine
from spot.errors import EngineFailed, EngineUnavailable, InvalidRequest, ShuntyardError
from spot.generation import Generation, SamplingParams, TokenDelta, TokenLogprobs

pytestmark = pytest.mark.anyio

EOS = 0


class Sink:
    """Remembers what it is told, and can be waited for."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.error: ShuntyardError | None = None
        self.started = anyio.Event()
        self._ended = anyio.Event()

    def on_delta(self, delta: TokenDelta) -> None:
        assert not self._ended.is_set(), "a delta after the end"
        self.deltas.append(delta)
        self.started.set()
        if delta.finish_reason is not None:
            self._ended.set()

    def on_error(self, error: ShuntyardError) -> None:
        assert not self._ended.is_set(), "an error after the end"
        self.error = error
        self._ended.set()

    async def ended(self) -> Sink:
        with anyio.fail_after(5):
            await self._ended.wait()
        return self

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [entry for delta in self.deltas for entry in delta.logprobs or []]


@asynccontextmanager
async def engine(**options: Any) -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(**{"vocab_size": 1000, "eos_token_id": EOS, **options}) as running:
        yield running


def generation(
    prompt: list[int], *, max_tokens: int = 8, name: str = "g", **sampling: Any
) -> Generation:
    return Generation(name, prompt, SamplingParams(max_tokens=max_tokens, **sampling))


async def run(running: ScriptedEngine, prompt: list[int], **options: Any) -> Sink:
    sink = Sink()
    running.submit(generation(prompt, **options), sink)
    return await sink.ended()


# Scripts and stops


async def test_a_script_is_said_to_the_end() -> None:
    async with engine(script=lambda g: [5, 6, 7]) as running:
        sink = await run(running, [1])
        assert sink.token_ids == [5, 6, 7, EOS]
        assert sink.deltas[-1].finish_reason == "stop"
        assert sink.deltas[-1].stop_token_id is None
        assert running.stats.running == 0


@pytest.mark.parametrize(
    ("sampling", "expected", "finish", "stop_token"),
    [
        ({"max_tokens": 2}, [5, 6], "length", None),
        ({"stop_token_ids": [6]}, [5, 6], "stop", 6),
        ({"stop_token_ids": [5], "min_tokens": 2}, [5, 6, 7, EOS], "stop", None),
        ({"ignore_eos": True, "max_tokens": 5}, [5, 6, 7, EOS, EOS], "length", None),
    ],
)
@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_generations_end_as_asked(
    sampling: dict[str, Any],
    expected: list[int],
    finish: str,
    stop_token: int | None,
    tokens_per_step: int,
) -> None:
    async with engine(script=lambda g: [5, 6, 7], tokens_per_step=tokens_per_step) as running:
        sink = await run(running, [1], **sampling)
        assert sink.token_ids == expected
        assert sink.deltas[-1].finish_reason == finish
        assert sink.deltas[-1].stop_token_id == stop_token


async def test_the_context_is_a_limit() -> None:
    async with engine(script=lambda g: [5] * 50, max_model_len=10) as running:
        sink = await run(running, [1, 2, 3], max_tokens=50)
        assert len(sink.token_ids) == 7
        assert sink.deltas[-1].finish_reason == "length"


# The seeded model


async def test_greedy_repeats_itself_and_depends_on_the_prompt() -> None:
    async with engine() as running:
        first = await run(running, [1, 2], temperature=0)
        again = await run(running, [1, 2], temperature=0)
        other = await run(running, [1, 3], temperature=0)
        assert first.token_ids == again.token_ids != other.token_ids


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}])
@pytest.mark.parametrize("cut", [1, 3, 7])
async def test_the_same_prefix_continues_alike_wherever_the_prompt_ends(
    sampling: dict[str, Any], cut: int
) -> None:
    async with engine() as running:
        whole = (await run(running, [1, 2], ignore_eos=True, **sampling)).token_ids
        rest = await run(
            running, [1, 2, *whole[:cut]], max_tokens=8 - cut, ignore_eos=True, **sampling
        )
        assert whole[:cut] + rest.token_ids == whole


async def test_seeds_repeat_and_no_seed_varies() -> None:
    async with engine() as running:
        seeded = [(await run(running, [1], seed=3)).token_ids for _ in range(2)]
        assert seeded[0] == seeded[1]
        other = await run(running, [1], seed=4)
        assert other.token_ids != seeded[0]
        free = [tuple((await run(running, [1])).token_ids) for _ in range(3)]
        assert len(set(free)) == 3


async def test_biases_and_allowed_tokens_rule() -> None:
    async with engine() as running:
        biased = await run(running, [1], temperature=0, logit_bias={42: 100.0})
        assert set(biased.token_ids) == {42}
        allowed = await run(running, [1], allowed_token_ids=[7, 8], max_tokens=20)
        assert set(allowed.token_ids) <= {7, 8}


async def test_penalties_drive_away_what_was_said() -> None:
    async with engine() as running:
        for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
            sampling = {"temperature": 0, "allowed_token_ids": [7, 8], "logit_bias": {7: 1.0}}
            plain = await run(running, [1], **sampling)
            penalized = await run(running, [1], **sampling, **penalty)
            assert len(set(penalized.token_ids)) > len(set(plain.token_ids[:1]))


async def test_min_tokens_keeps_the_end_away() -> None:
    async with engine() as running:
        sampling = {"temperature": 0, "logit_bias": {EOS: 100.0}}
        assert (await run(running, [1], **sampling)).token_ids == [EOS]
        longer = await run(running, [1], **sampling, min_tokens=4)
        assert len(longer.token_ids) == 5
        assert longer.token_ids[-1] == EOS


async def test_logprobs_are_of_the_chosen_token_and_the_best() -> None:
    async with engine() as running:
        sink = await run(running, [1], logprobs=3, seed=1)
        assert len(sink.logprobs) == len(sink.token_ids)
        for token_id, entry in zip(sink.token_ids, sink.logprobs, strict=True):
            assert entry.token_ids[0] == token_id
            assert len(entry.token_ids) == 4
            assert entry.logprobs[1:] == sorted(entry.logprobs[1:], reverse=True)
            if entry.rank <= 3:
                assert entry.token_ids[entry.rank] == token_id
        everything = await run(running, [1], logprobs=-1, max_tokens=1)
        (entry,) = everything.logprobs
        assert math.isclose(sum(map(math.exp, entry.logprobs[1:])), 1.0)


async def test_prompt_logprobs_come_with_the_first_delta() -> None:
    async with engine() as running:
        sink = await run(running, [1, 2, 3], prompt_logprobs=2)
        first, *later = sink.deltas
        assert first.prompt_logprobs is not None
        assert first.prompt_logprobs[0] is None
        assert [e.token_ids[0] for e in first.prompt_logprobs[1:] if e is not None] == [2, 3]
        assert all(delta.prompt_logprobs is None for delta in later)
        assert first.num_cached_tokens == 0


# Seats, aborts, ends


async def test_only_so_many_run_at_once() -> None:
    async with engine(max_num_seqs=2, faults=Faults(stall_at_token=0)) as running:
        for name in "abc":
            running.submit(generation([1], name=name), Sink())
        await anyio.sleep(0.01)
        assert (running.stats.running, running.stats.waiting) == (2, 1)
        running.abort("a")
        await anyio.sleep(0.01)
        assert (running.stats.running, running.stats.waiting) == (2, 0)


async def test_an_aborted_generation_is_heard_of_no_more() -> None:
    async with engine(faults=Faults(stall_at_token=1)) as running:
        sink = Sink()
        running.submit(generation([1]), sink)
        await sink.started.wait()
        running.abort("g")
        running.abort("g")
        running.abort("never seen")
        running.faults = Faults()
        await anyio.sleep(0.01)
        assert len(sink.deltas) == 1
        assert running.aborted == ["g"]


async def test_draining_finishes_what_runs_and_takes_no_more() -> None:
    async with engine(script=lambda g: [5] * 20, step_time_s=0.001) as running:
        sink = Sink()
        running.submit(generation([1], max_tokens=20), sink)
        with anyio.fail_after(5):
            await running.drain()
        assert len(sink.token_ids) == 20
        assert running.status.state == "draining"
        with pytest.raises(EngineUnavailable, match="draining"):
            running.submit(generation([1]), Sink())


async def test_leaving_ends_what_runs_with_an_error() -> None:
    async with engine(faults=Faults(stall_at_token=0)) as running:
        sink = Sink()
        running.submit(generation([1]), sink)
        await anyio.lowlevel.checkpoint()
    assert isinstance(sink.error, EngineFailed)
    assert running.status.state == "stopped"
    with pytest.raises(EngineUnavailable, match="stopped"):
        running.submit(generation([1]), Sink())


# Faults


async def test_one_generation_fails_alone() -> None:
    async with engine(script=lambda g: [5] * 5, faults=Faults(fail_at_token=2)) as running:
        sink = await run(running, [1])
        assert isinstance(sink.error, EngineFailed)
        assert sink.token_ids == [5, 5]
        running.faults = Faults()
        assert (await run(running, [1])).error is None


async def test_a_dead_engine_takes_everything_with_it_until_revived() -> None:
    async with engine(script=lambda g: [5] * 5, step_time_s=0.001) as running:
        other = Sink()
        running.submit(generation([1], name="other", max_tokens=100, ignore_eos=True), other)
        running.faults = Faults(die_at_token=3)
        sink = await run(running, [1], name="mine")
        assert isinstance(sink.error, EngineFailed)
        assert isinstance((await other.ended()).error, EngineFailed)
        assert running.status.state == "dead"
        with pytest.raises(EngineUnavailable, match="dead"):
            running.submit(generation([1]), Sink())
        running.faults = Faults()
        running.revive()
        assert (await run(running, [1])).token_ids == [5] * 5 + [EOS]


async def test_a_refusal_is_about_the_request() -> None:
    async with engine(faults=Faults(refuse="bad regex")) as running:
        sink = await run(running, [1])
        assert isinstance(sink.error, InvalidRequest)
        assert sink.error.message == "bad regex"


async def test_a_stall_can_be_lifted() -> None:
    async with engine(script=lambda g: [5, 6], faults=Faults(stall_at_token=1)) as running:
        sink = Sink()
        running.submit(generation([1]), sink)
        await sink.started.wait()
        await anyio.sleep(0.01)
        assert sink.token_ids == [5]
        running.faults = Faults()
        assert (await sink.ended()).token_ids == [5, 6, EOS]
