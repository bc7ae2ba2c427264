"""The fleet over scripted engines: whatever happens to pipelines, the output is the same."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from spot.engines.base import EngineStats
from spot.engines.scripted import Faults, ScriptedEngine
from spot.errors import EngineFailed, EngineUnavailable, GenerationFailed, InvalidRequest
from spot.failover_policy import FailoverPolicy
from spot.fleet import Fleet, PipelineSpec
from spot.fleet_records import Live
from spot.generation import Generation, SamplingParams, TokenDelta
from tests.sink import Sink

pytestmark = pytest.mark.anyio

NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
PROMPT = list(range(40))
CASES = {
    "greedy": GREEDY,
    "seeded": msgspec.structs.replace(GREEDY, seed=3, temperature=1.0),
    "penalties": msgspec.structs.replace(GREEDY, presence_penalty=1.0, frequency_penalty=0.5),
    "bias": msgspec.structs.replace(GREEDY, logit_bias={5: 3.0}),
    "logprobs": msgspec.structs.replace(GREEDY, logprobs=2, prompt_logprobs=1),
    "min_tokens": msgspec.structs.replace(GREEDY, ignore_eos=False, min_tokens=20),
}


def engine(**changes: Any) -> ScriptedEngine:
    return ScriptedEngine(**{"vocab_size": 64, "eos_token_id": 0, "max_num_seqs": 4} | changes)


@asynccontextmanager
async def fleet_of(
    *engines: ScriptedEngine, policy: FailoverPolicy | None = None, **options: Any
) -> AsyncIterator[Fleet]:
    specs = [PipelineSpec(f"p{index}", item) for index, item in enumerate(engines)]
    async with Fleet(specs, policy=policy, **options) as fleet:
        await fleet.wait_ready()
        yield fleet
        fleet.state.check_invariants()


async def generate(
    fleet: Fleet, sampling: SamplingParams, name: str = "g", **more: Any
) -> TokenDelta:
    sink = Sink()
    fleet.submit(Generation(name, PROMPT, sampling, **more), sink)
    return await sink.output()


async def uninterrupted(sampling: SamplingParams) -> TokenDelta:
    async with fleet_of(engine()) as fleet:
        return await generate(fleet, sampling)


def same(moved: TokenDelta, whole: TokenDelta) -> None:
    """Equal in all that a client can see."""
    assert moved.token_ids == whole.token_ids
    assert moved.finish_reason == whole.finish_reason
    assert moved.stop_token_id == whole.stop_token_id
    assert moved.logprobs == whole.logprobs
    assert moved.prompt_logprobs == whole.prompt_logprobs
    assert moved.num_cached_tokens == whole.num_cached_tokens


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cut", range(NUM_TOKENS))
async def test_a_crash_at_any_token_changes_nothing(name: str, cut: int) -> None:
    whole = await uninterrupted(CASES[name])
    if cut >= len(whole.token_ids):
        return
    dying = engine(faults=Faults(die_at_token=cut))
    async with fleet_of(dying, engine()) as fleet:
        moved = await generate(fleet, CASES[name])
        same(moved, whole)
        assert moved.num_migrations == 1
        assert fleet.num_live == 0


@pytest.mark.parametrize("cut", [0, 1, NUM_TOKENS - 1])
async def test_a_move_whose_target_failed_before_a_token_is_told_as_well(cut: int) -> None:
    whole = await uninterrupted(GREEDY)
    dying = engine(faults=Faults(die_at_token=cut))
    target = engine(faults=Faults(die_at_token=cut))  # of all output: before its own first token
    policy = FailoverPolicy(backoff_s=0.001)
    async with fleet_of(dying, target, engine(), policy=policy) as fleet:
        fleet.set_weight("p2", 1e-9)
        moved = await generate(fleet, GREEDY)
        same(moved, whole)
        assert moved.num_migrations == fleet.num_migrations == 2


@pytest.mark.parametrize("cut", range(NUM_TOKENS))
async def test_an_error_of_one_generation_changes_nothing(cut: int) -> None:
    whole = await uninterrupted(CASES["seeded"])
    async with fleet_of(engine(faults=Faults(fail_at_token=cut)), engine()) as fleet:
        same(await generate(fleet, CASES["seeded"]), whole)


async def test_a_stall_moves_the_generation_and_kills_the_pipeline() -> None:
    whole = await uninterrupted(GREEDY)
    stalling = engine(faults=Faults(stall_at_token=5))
    policy = FailoverPolicy(stall_base_s=0.2, slowest_prefill_tokens_per_s=1e6)
    async with fleet_of(stalling, engine(), policy=policy) as fleet:
        same(await generate(fleet, GREEDY), whole)
        assert stalling.status.state == "dead"
        assert "no token for" in fleet.describe()[0]["detail"]


async def test_it_waits_for_the_only_pipeline_to_come_back() -> None:
    whole = await uninterrupted(GREEDY)
    dying = engine(faults=Faults(die_at_token=7))
    async with fleet_of(dying) as fleet:
        sink = Sink()
        fleet.submit(Generation("g", PROMPT, GREEDY), sink)
        while dying.status.state == "ready":
            await anyio.lowlevel.checkpoint()
        with pytest.raises(EngineUnavailable, match="the engine is dead"):
            fleet.submit(Generation("new", PROMPT, GREEDY), Sink())
        dying.faults = Faults()
        dying.revive()
        same(await sink.output(), whole)


async def test_patience_has_an_end() -> None:
    policy = FailoverPolicy(no_capacity_timeout_s=0.3)
    async with fleet_of(engine(faults=Faults(die_at_token=7)), policy=policy) as fleet:
        sink = await _submitted(fleet, GREEDY).ended()
        assert isinstance(sink.error, EngineUnavailable)
        assert sink.total is not None
        assert len(sink.total.token_ids) == 7
        assert fleet.num_live == 0


def _submitted(fleet: Fleet, sampling: SamplingParams, name: str = "g", **more: Any) -> Sink:
    sink = Sink()
    fleet.submit(Generation(name, PROMPT, sampling, **more), sink)
    return sink


async def test_a_generation_that_ends_every_pipeline_is_given_up() -> None:
    engines = [engine(faults=Faults(die_at_token=0)) for _ in range(4)]
    async with fleet_of(*engines, policy=FailoverPolicy(backoff_s=0.01)) as fleet:
        sink = await _submitted(fleet, GREEDY).ended()
        assert isinstance(sink.error, EngineFailed)
        assert "3 pipelines in a row" in str(sink.error)
        assert sum(item.status.state == "ready" for item in engines) == 1


async def test_a_fault_that_every_engine_would_have_is_not_tried_again() -> None:
    engines = [engine(faults=Faults(fault_everywhere_at_token=0)) for _ in range(3)]
    async with fleet_of(*engines) as fleet:
        sink = await _submitted(fleet, GREEDY).ended()
        assert isinstance(sink.error, GenerationFailed)
        assert fleet.num_migrations == fleet.num_lost == 0
        assert all(item.status.state == "ready" for item in engines)
        assert fleet.num_live == 0


async def test_a_refusal_is_the_clients_and_moves_nothing() -> None:
    refusing, other = engine(faults=Faults(refuse="no such thing")), engine()
    async with fleet_of(refusing, other) as fleet:
        sink = await _submitted(fleet, GREEDY).ended()
        assert isinstance(sink.error, InvalidRequest)
        assert not other.submitted
        assert fleet.describe()[0]["state"] == "serving"


async def test_an_idle_pipeline_that_hangs_is_found_before_a_user_does() -> None:
    hanging, other = engine(faults=Faults(stall_at_token=0)), engine()
    policy = FailoverPolicy(canary_period_s=0.1, stall_base_s=0.1, slowest_prefill_tokens_per_s=1e6)
    async with fleet_of(hanging, other, policy=policy) as fleet:
        await _until(lambda: hanging.status.state == "dead")
        await anyio.sleep(0.3)
        assert [item["state"] for item in fleet.describe()] == ["starting", "serving"]
        assert fleet.num_live == 0
        assert not other.aborted


async def test_draining_lets_finish_and_admits_nothing() -> None:
    first, second = engine(step_time_s=0.01), engine(step_time_s=0.01)
    async with fleet_of(first, second) as fleet:
        sinks = [_submitted(fleet, GREEDY, f"g{index}") for index in range(4)]
        fleet.drain_pipeline("p0", deadline_s=60)
        later = [_submitted(fleet, GREEDY, f"h{index}") for index in range(2)]
        for sink in sinks + later:
            await sink.output()
        assert {g.id for g in first.submitted}.isdisjoint({"h0", "h1"})
        await _until(lambda: len(fleet.describe()) == 1)
        assert first.status.state == "stopped"
        assert fleet.num_migrations == 0


async def test_what_runs_at_the_deadline_of_a_drain_goes_on_elsewhere() -> None:
    whole = await uninterrupted(CASES["seeded"])
    slow = engine(step_time_s=0.05)
    async with fleet_of(slow, engine(), policy=FailoverPolicy(drain_margin_s=0.1)) as fleet:
        fleet.set_weight("p1", 0.001)
        sink = _submitted(fleet, CASES["seeded"])
        await sink.started.wait()
        fleet.drain_pipeline("p0", deadline_s=0.3, cause="notice")
        same(await sink.output(), whole)
        assert fleet.num_migrations == 1


async def test_removing_the_last_pipeline_leaves_generations_waiting_for_the_next() -> None:
    whole = await uninterrupted(GREEDY)
    async with fleet_of(engine(step_time_s=0.02)) as fleet:
        sink = _submitted(fleet, GREEDY)
        await sink.started.wait()
        fleet.remove_pipeline("p0")
        await _until(lambda: not fleet.describe())
        await fleet.add(PipelineSpec("late", engine()))
        same(await sink.output(), whole)


async def _until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110 - conditions have no events
            await anyio.sleep(0.01)


async def test_an_abort_while_it_waits_frees_everything() -> None:
    dying = engine(faults=Faults(die_at_token=3))
    async with fleet_of(dying) as fleet:
        sink = _submitted(fleet, GREEDY)
        await _until(lambda: dying.status.state == "dead")
        fleet.abort("g")
        fleet.abort("g")
        dying.revive()
        await anyio.sleep(0.6)
        assert sink.total is not None
        assert len(sink.total.token_ids) == 3
        assert sink.error is None
        assert fleet.num_live == 0


async def test_shutdown_ends_what_waits() -> None:
    dying = engine(faults=Faults(die_at_token=3))
    async with fleet_of(dying) as fleet:
        sink = _submitted(fleet, GREEDY)
        await _until(lambda: dying.status.state == "dead")
    await sink.ended()
    assert isinstance(sink.error, EngineFailed)


async def test_an_urgent_one_takes_a_seat_at_a_boundary_and_the_other_goes_on() -> None:
    whole = await uninterrupted(CASES["seeded"])
    policy = FailoverPolicy(subnode_tokens=4)
    async with fleet_of(engine(max_num_seqs=2, step_time_s=0.01), policy=policy) as fleet:
        slow = [
            _submitted(fleet, CASES["seeded"], f"slow{index}", priority=5) for index in range(3)
        ]
        await slow[0].started.wait()
        urgent = _submitted(fleet, msgspec.structs.replace(GREEDY, max_tokens=2), "urgent")
        await urgent.output()
        assert all(sink.total is None or sink.total.finish_reason is None for sink in slow)
        for sink in slow:
            same(await sink.output(), whole)
        assert fleet.num_preemptions >= 1
        assert fleet.num_migrations == 0


async def test_attained_service_is_told_after_each_sub_node() -> None:
    told: list[tuple[str, int]] = []
    policy = FailoverPolicy(subnode_tokens=8)
    async with fleet_of(
        engine(), policy=policy, on_subnode=lambda *heard: told.append(heard)
    ) as fleet:
        await generate(fleet, GREEDY)
    assert told[0] == ("g", 1)
    assert [tokens for _, tokens in told[1:]] == [8, 8, 7]


async def test_the_capacity_is_told_whenever_it_changes() -> None:
    told: list[int] = []
    first, second = engine(max_num_seqs=8), engine(max_num_seqs=16)
    async with fleet_of(first, second, on_capacity=told.append) as fleet:
        await _until(lambda: told[-1:] == [27])
        await generate(fleet, GREEDY)
        assert told[-1] == 27
        fleet.drain_pipeline("p0", deadline_s=None)
        assert told[-1] == 18
        second.die()
        await _until(lambda: told[-1] == 0)
        assert len(told) == len(set(told))


async def test_it_is_told_when_a_pipeline_begins_to_serve_or_is_gone() -> None:
    told: list[None] = []
    first = engine()
    async with fleet_of(first, engine(), on_pipelines=lambda: told.append(None)) as fleet:
        await _until(lambda: len(told) == 2)
        await generate(fleet, GREEDY)
        first.die()
        await _until(lambda: fleet.describe()[0]["state"] != "serving")
        first.revive()
        await _until(lambda: len(told) == 3)
        fleet.drain_pipeline("p1", deadline_s=None)
        await _until(lambda: "p1" not in fleet.statuses())
        assert len(told) == 4


async def test_what_is_ranked_anew_takes_the_seat_of_what_runs() -> None:
    policy = FailoverPolicy(subnode_tokens=4)
    whole = await uninterrupted(GREEDY)
    async with fleet_of(engine(max_num_seqs=1, step_time_s=0.01), policy=policy) as fleet:
        running = _submitted(fleet, GREEDY, "running", head_start_s=0.0)
        await running.started.wait()
        others = [_submitted(fleet, GREEDY, name, head_start_s=0.0) for name in ("b", "c")]
        fleet.reprioritise("c", 100.0)
        same(await others[1].output(), whole)
        assert running.total is None or running.total.finish_reason is None
        same(await running.output(), whole)
        same(await others[0].output(), whole)
        assert fleet.num_preemptions >= 1


async def test_500_streams_over_three_pipelines_that_die_all_the_time() -> None:
    samplings = [CASES[name] for name in ("greedy", "seeded", "penalties")]
    wholes = [await uninterrupted(sampling) for sampling in samplings]
    engines = [engine(max_num_seqs=16, step_time_s=0.002) for _ in range(3)]
    policy = FailoverPolicy(max_migrations=10_000, max_fruitless=1000, backoff_s=0.001)
    async with fleet_of(*engines, policy=policy) as fleet, anyio.create_task_group() as tasks:

        async def chaos() -> None:
            turn = 0
            while True:
                victim = engines[turn % 3]
                victim.die("preempted")
                await anyio.sleep(0.03)
                victim.revive()
                fleet.state.check_invariants()
                await anyio.sleep(0.05)
                turn += 1

        tasks.start_soon(chaos)
        sinks: list[Sink] = []
        for index in range(500):
            while True:
                try:
                    sinks.append(_submitted(fleet, samplings[index % 3], f"g{index}"))
                    break
                except EngineUnavailable:
                    await anyio.sleep(0.01)
        for index, sink in enumerate(sinks):
            same(await sink.output(), wholes[index % 3])
        tasks.cancel_scope.cancel()
        assert fleet.num_migrations > 50
        await anyio.sleep(0.1)
        assert all(item.stats == EngineStats() for item in engines)


async def test_nothing_grows_over_10_000_generations() -> None:
    engines = [engine(max_num_seqs=64) for _ in range(2)]
    sampling = msgspec.structs.replace(GREEDY, max_tokens=3)
    policy = FailoverPolicy(max_fruitless=1000, backoff_s=0.0)

    def num_objects() -> int:
        gc.collect()
        # By type: isinstance asks lazy modules for their class, which imports them.
        return sum(type(item) in (Live, Sink, Generation) for item in gc.get_objects())

    async with fleet_of(*engines, policy=policy) as fleet:
        await _until(lambda: all(item["state"] == "serving" for item in fleet.describe()))
        before = num_objects()
        for batch in range(100):
            sinks = []
            for index in range(100):
                name = f"g{batch}-{index}"
                sinks.append(_submitted(fleet, sampling, name, priority=index % 3))
                if index % 7 == 0:
                    fleet.abort(name)
            if batch % 10 == 0:
                victim = engines[batch // 10 % 2]
                victim.die()
                victim.revive()
            for index, sink in enumerate(sinks):
                if index % 7:
                    await sink.output()
            for item in engines:
                item.submitted.clear()
                item.aborted.clear()
        del sinks, sink
        assert fleet.num_live == 0
        # Each engine's loop still holds what it advanced last.
        assert num_objects() - before <= 3 * len(engines)
        assert all(item.stats == EngineStats() for item in engines)
