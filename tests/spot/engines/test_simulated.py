"""The simulated engine keeps the engines' contract, and takes the time that its model says."""

from __future__ import annotations

import itertools
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.simulator.run import SimulatedRequest, simulate
from placement.simulator.simulated_pipeline import SimulatedPipeline, simulated_pipeline
from placement.simulator.step_time import LinearStepTime, StepWork
from spot.engines.hash_model import HashModel, RollingModel, TokenModel
from spot.engines.simulated import SimulatedEngine, planned_engine
from spot.errors import ContextLengthExceeded, EngineFailed, EngineUnavailable
from spot.generation import Generation, SamplingParams, TokenDelta
from spot.virtual_time import VirtualLoop, run_virtual
from tests.placement.simulator import test_fleet
from tests.sink import Sink

pytestmark = pytest.mark.anyio

TIME = LinearStepTime(
    base_s=0.01, per_prefill_token_s=1e-4, per_decode_seq_s=1e-3, per_context_token_s=1e-6
)
FLAT = LinearStepTime(base_s=0.01)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Every test has a loop of its own, in virtual time from 0."""
    return "asyncio", {"loop_factory": VirtualLoop}


class TimedSink(Sink):
    """Remembers when each delta came, from when the generation was submitted."""

    def __init__(self) -> None:
        super().__init__()
        self._submitted_s = anyio.current_time()
        self.times_s: list[float] = []

    def on_delta(self, delta: TokenDelta) -> None:
        self.times_s.append(anyio.current_time() - self._submitted_s)
        super().on_delta(delta)

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.times_s)]

    @property
    def token_ids(self) -> list[int]:
        return [] if self.total is None else self.total.token_ids


def engine(*stages: LinearStepTime, **options: Any) -> SimulatedEngine:
    tokens = options.pop("tokens", None) or RollingModel(1000, 0)
    return SimulatedEngine(stages or (TIME,), tokens, **{"num_kv_blocks": 1000, **options})


def step_s(time: LinearStepTime, num_prefill: int, num_decode: int, context: int) -> float:
    return time.step_s(StepWork(num_prefill, num_decode, decode_context_tokens=context))


def generation(name: str, num_prompt: int, max_tokens: int, **options: Any) -> Generation:
    first = options.pop("first", 1)
    prompt = [first + index % 97 for index in range(num_prompt)]
    return Generation(name, prompt, SamplingParams(max_tokens=max_tokens), **options)


def submit(running: SimulatedEngine, *args: Any, **options: Any) -> TimedSink:
    sink = TimedSink()
    running.submit(generation(*args, **options), sink)
    return sink


def tokens_per_s(sinks: list[TimedSink]) -> float:
    """Over the time from the submission, which all share, to the last token."""
    num_tokens = sum(len(sink.token_ids) for sink in sinks)
    return num_tokens / max(sink.times_s[-1] for sink in sinks)


# Time


async def test_alone_a_request_takes_the_sum_of_its_steps() -> None:
    async with engine(max_num_batched_tokens=64) as running:
        sink = submit(running, "a", 100, 5)
        await sink.ended()
    prefill_s = step_s(TIME, 64, 0, 64) + step_s(TIME, 36, 0, 100)
    assert sink.times_s[0] == pytest.approx(prefill_s)
    decode_s = [step_s(TIME, 0, 1, 100 + index) for index in range(1, 5)]
    assert sink.gaps_s == pytest.approx(decode_s)


async def test_what_runs_together_shares_its_steps() -> None:
    async with engine() as running:
        sinks = [submit(running, str(index), 10, 5) for index in range(4)]
        for sink in sinks:
            await sink.ended()
    for sink in sinks:
        assert sink.times_s[0] == pytest.approx(step_s(TIME, 40, 0, 40))
        assert sink.gaps_s == pytest.approx(
            [step_s(TIME, 0, 4, 4 * (10 + index)) for index in range(1, 5)]
        )


async def test_at_saturation_the_throughput_is_seats_per_step() -> None:
    step = LinearStepTime(base_s=0.01, per_decode_seq_s=1e-3)
    async with engine(step, max_num_seqs=8) as running:
        sinks = [submit(running, str(index), 1, 100) for index in range(32)]
        await running.drain()
    assert tokens_per_s(sinks) == pytest.approx(8 / step_s(step, 0, 8, 0))


async def test_a_long_prompt_slows_what_decodes_while_it_is_computed() -> None:
    async with engine(max_num_batched_tokens=101) as running:
        sink = submit(running, "a", 10, 20)
        await sink.started.wait()
        other = submit(running, "b", 300, 1)
        await sink.ended()
    # One step had begun already.
    chunks_s = [step_s(TIME, 100, 1, 11 + index + 100 * index) for index in (1, 2, 3)]
    alone_s = [step_s(TIME, 0, 1, 11), step_s(TIME, 0, 1, 15)]
    assert sink.gaps_s[:5] == pytest.approx([alone_s[0], *chunks_s, alone_s[1]])
    assert other.times_s == pytest.approx([alone_s[0] + sum(chunks_s)])


async def test_waiting_for_a_seat_is_told() -> None:
    async with engine(FLAT, max_num_seqs=1) as running:
        first, second = submit(running, "a", 10, 5), submit(running, "b", 10, 5)
        await second.ended()
    assert first.total is not None
    assert second.total is not None
    assert first.total.queue_s == 0.0
    assert second.total.queue_s == pytest.approx(0.05)


async def test_speed_counts_from_the_next_step_on() -> None:
    async with engine(FLAT) as running:
        sink = submit(running, "a", 10, 6)
        await anyio.sleep(0.025)
        running.speed = 0.5
        await sink.ended()
    assert sink.times_s == pytest.approx([0.01, 0.02, 0.03, 0.05, 0.07, 0.09])
    with pytest.raises(ValueError, match="positive"):
        running.speed = 0.0


# Pipelines


async def pipeline(
    *stages: LinearStepTime, num_requests: int = 32, **options: Any
) -> list[TimedSink]:
    async with engine(*stages, **{"max_num_seqs": 16, **options}) as running:
        sinks = [submit(running, str(index), 1, 50) for index in range(num_requests)]
        await running.drain()
    return sinks


async def test_two_stages_have_twice_the_throughput_of_one_of_twice_the_time() -> None:
    """With as many sequences per step: the pipeline needs two steps' worth of them."""
    one = tokens_per_s(await pipeline(LinearStepTime(base_s=0.02), max_num_seqs=8))
    two = tokens_per_s(await pipeline(FLAT, FLAT, spread_over_stages=True))
    assert one == pytest.approx(8 / 0.02)
    assert two == pytest.approx(2 * one, rel=0.02)


async def test_with_the_same_seats_a_pipeline_gains_what_depends_on_the_batch() -> None:
    """Steps of half the sequences take half the time only as far as time is per sequence."""
    whole = LinearStepTime(base_s=0.0, per_decode_seq_s=0.002)
    half = LinearStepTime(base_s=0.0, per_decode_seq_s=0.001)
    one = tokens_per_s(await pipeline(whole))
    two = tokens_per_s(await pipeline(half, half, spread_over_stages=True))
    assert two == pytest.approx(2 * one, rel=0.02)
    flat = tokens_per_s(await pipeline(LinearStepTime(base_s=0.02)))
    split = tokens_per_s(await pipeline(FLAT, FLAT, spread_over_stages=True))
    assert split == pytest.approx(flat, rel=0.02)


async def test_alone_two_stages_have_the_latency_of_one_of_twice_the_time() -> None:
    whole = LinearStepTime(base_s=0.02)
    (one,) = await pipeline(whole, num_requests=1)
    (two,) = await pipeline(FLAT, FLAT, num_requests=1)
    assert two.times_s == pytest.approx(one.times_s)


async def test_the_slowest_stage_sets_the_pace() -> None:
    slow = LinearStepTime(base_s=0.03)
    sinks = await pipeline(FLAT, slow, spread_over_stages=True)
    assert tokens_per_s(sinks) == pytest.approx(8 / 0.03, rel=0.02)


async def test_those_that_came_together_stay_together_and_leave_stages_idle() -> None:
    sinks = await pipeline(FLAT, FLAT)
    assert tokens_per_s(sinks) == pytest.approx(16 / 0.02, rel=0.02)
    assert sinks[0].gaps_s == pytest.approx([0.02] * 49)


async def test_prompts_that_fill_steps_fill_the_pipeline() -> None:
    async with engine(FLAT, FLAT, max_num_batched_tokens=64) as running:
        sinks = [submit(running, str(index), 64, 20) for index in range(2)]
        await running.drain()
    assert sinks[0].times_s[0] == pytest.approx(0.02)
    assert sinks[1].times_s[0] == pytest.approx(0.03)
    assert sinks[1].gaps_s == pytest.approx([0.02] * 19)


# Space and order


async def test_when_the_cache_is_full_the_youngest_starts_over_and_nothing_is_lost() -> None:
    async with engine(num_kv_blocks=12, block_size=4, max_model_len=48) as running:
        sinks = [submit(running, str(index), 9, 30, first=index) for index in range(4)]
        await anyio.sleep(0.05)
        assert 0 < running.stats.kv_cache_usage <= 1
        await running.drain()
        stats = running.stats
    assert stats.num_preemptions > 0
    assert (stats.running, stats.waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    async with engine() as roomy:
        alone = [submit(roomy, str(index), 9, 30, first=index) for index in range(4)]
        await roomy.drain()
    assert [sink.token_ids for sink in sinks] == [sink.token_ids for sink in alone]
    assert all(sink.num_deltas == 30 for sink in sinks)


async def test_the_more_urgent_goes_first() -> None:
    async with engine(max_num_seqs=1) as running:
        sinks = {
            name: submit(running, name, 10, 3, priority=priority)
            for name, priority in (("a", 2), ("b", 1), ("c", 0), ("d", 1))
        }
        await running.drain()
    assert sorted(sinks, key=lambda name: sinks[name].times_s[0]) == ["c", "b", "d", "a"]


async def test_abort_frees_at_once_and_is_heard_of_no_more() -> None:
    async with engine(max_num_seqs=1) as running:
        sink, waiting = submit(running, "a", 10, 50), submit(running, "b", 10, 3)
        await sink.started.wait()
        running.abort("a")
        running.abort("a")
        running.abort("never seen")
        assert (running.stats.running, running.stats.kv_cache_usage) == (0, 0.0)
        await waiting.ended()
        assert sink.num_deltas == 1
        submit(running, "c", 10, 3)
        running.abort("c")
        assert running.stats.waiting == 0


async def test_a_cached_prefix_is_not_computed_again() -> None:
    async with engine(enable_prefix_caching=True) as running:
        first = submit(running, "a", 160, 33)
        await first.ended()
        output = first.token_ids[:20]
        resumed = submit(running, "b", 160, 33, output_token_ids=output)
        await resumed.ended()
        assert output + resumed.token_ids == first.token_ids
        assert resumed.total is not None
        # 180 tokens, of which 11 blocks are known; only the prompt's are told of.
        assert resumed.total.num_cached_tokens == 160
        assert resumed.times_s[0] == pytest.approx(step_s(TIME, 4, 0, 180))
        assert running.stats.prefix_cache_queries == 160 + 180
        assert running.stats.prefix_cache_hits == 176


# Going on


@pytest.mark.parametrize("tokens", [RollingModel(1000, 0), HashModel(1000, 0)])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 7, "presence_penalty": 1.0}])
async def test_resumed_at_any_cut_the_output_is_the_same(
    tokens: TokenModel, sampling: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=12, min_tokens=12, logprobs=1, **sampling)
    start = Generation("whole", [5, 6, 7], params)
    async with engine(tokens=tokens) as running:
        sink = Sink()
        running.submit(start, sink)
        whole = await sink.output()
        assert len(whole.logprobs or []) == 12
        for cut in range(1, 12):
            rest = msgspec.structs.replace(start, output_token_ids=whole.token_ids[:cut])
            sink = Sink()
            running.submit(rest, sink)
            output = await sink.output()
            assert whole.token_ids[:cut] + output.token_ids == whole.token_ids
            assert (whole.logprobs or [])[cut:] == output.logprobs
            assert output.finish_reason == whole.finish_reason


async def test_prompt_logprobs_come_once() -> None:
    params = SamplingParams(max_tokens=3, prompt_logprobs=1)
    async with engine(tokens=HashModel(1000, 0)) as running:
        first, resumed = Sink(), Sink()
        running.submit(Generation("a", [5, 6], params), first)
        running.submit(Generation("b", [5, 6], params, output_token_ids=[7]), resumed)
        assert len((await first.output()).prompt_logprobs or []) == 2
        assert (await resumed.output()).prompt_logprobs is None


# Faults and ends


async def test_frozen_nothing_comes_until_the_thaw() -> None:
    async with engine(FLAT) as running:
        sink = submit(running, "a", 10, 4)
        await anyio.sleep(0.015)
        running.freeze()
        late = submit(running, "b", 10, 1)
        await anyio.sleep(1)
        assert (sink.num_deltas, late.num_deltas) == (1, 0)
        running.thaw()
        await late.ended()
        await sink.ended()
    assert sink.times_s == pytest.approx([0.01, 1.015, 1.025, 1.035])
    assert late.times_s == pytest.approx([1.01])


async def test_a_dead_engine_takes_everything_with_it_until_revived() -> None:
    async with engine(FLAT, max_num_seqs=1, enable_prefix_caching=True) as running:
        sinks = [submit(running, str(index), 32, 50) for index in range(2)]
        await anyio.sleep(0.025)
        running.die()
        assert [type(sink.error) for sink in sinks] == [EngineFailed] * 2
        assert sinks[0].num_deltas == 2
        assert (running.stats.running, running.stats.waiting) == (0, 0)
        with pytest.raises(EngineUnavailable, match="dead"):
            submit(running, "x", 10, 1)
        running.revive()
        again = submit(running, "0", 32, 2)
        await again.ended()
        assert again.times_s == pytest.approx([0.01, 0.02])
        assert running.stats.prefix_cache_hits == 0


async def test_a_sink_may_abort_kill_and_submit() -> None:
    class Meddler(TimedSink):
        def on_delta(self, delta: TokenDelta) -> None:
            super().on_delta(delta)
            running.abort("other")
            running.die()
            running.revive()
            self.again = submit(running, "other", 10, 1)

    async with engine(FLAT) as running:
        meddler = Meddler()
        running.submit(generation("meddler", 10, 1), meddler)
        other = submit(running, "other", 10, 5)
        await meddler.ended()
        await meddler.again.ended()
        assert other.num_deltas == 0
        assert other.error is None
        assert meddler.again.times_s == pytest.approx([0.01])


async def test_draining_finishes_what_runs_and_takes_no_more() -> None:
    async with engine() as running:
        sink = submit(running, "a", 10, 20)
        await running.drain()
        assert len(sink.token_ids) == 20
        assert running.status.state == "draining"
        with pytest.raises(EngineUnavailable, match="draining"):
            submit(running, "b", 10, 1)


async def test_leaving_ends_what_runs_with_an_error() -> None:
    async with engine() as running:
        sink = submit(running, "a", 10, 20)
        await anyio.sleep(0.03)
    assert isinstance(sink.error, EngineFailed)
    assert running.status.state == "stopped"


async def test_without_step_times_no_time_passes_but_others_have_their_turn() -> None:
    async with engine(LinearStepTime(base_s=0.0)) as running:
        sink = submit(running, "a", 10, 20)
        await sink.started.wait()
        assert sink.num_deltas < 20
        await sink.ended()
        assert anyio.current_time() == 0.0


async def test_a_prompt_that_fills_the_context_is_refused() -> None:
    async with engine(max_model_len=20) as running:
        assert isinstance(submit(running, "a", 20, 5).error, ContextLengthExceeded)
        sink = submit(running, "b", 15, 50)
        assert len((await sink.output()).token_ids) == 5


async def test_the_card_says_what_it_is() -> None:
    async with engine(block_size=8, max_num_seqs=4) as running:
        card = await running.wait_ready()
        assert (card.engine, card.resume) == ("simulated", "exact")
        assert (card.block_size, card.num_kv_blocks, card.max_num_seqs) == (8, 1000, 4)


async def test_it_takes_the_times_of_the_runner_without_an_event_loop() -> None:
    requests = [
        SimulatedRequest(0.03 * index * (index % 3), 5 + 37 * index % 90, 1 + 11 * index % 40)
        for index in range(40)
    ]
    limits = {"num_kv_blocks": 30, "max_num_seqs": 6, "max_num_batched_tokens": 64}
    pure = simulate(SimulatedPipeline(stages=(TIME, FLAT, TIME), **limits), requests)
    async with engine(TIME, FLAT, TIME, max_model_len=480, **limits) as running:
        sinks: dict[SimulatedRequest, TimedSink] = {}
        for index, request in sorted(enumerate(requests), key=lambda pair: pair[1].arrival_s):
            if request.arrival_s > anyio.current_time():
                await anyio.sleep_until(request.arrival_s)
            name, lengths = str(index), (request.input_tokens, request.output_tokens)
            sinks[request] = submit(running, name, *lengths)
        for sink in sinks.values():
            await sink.ended()
        assert pure.num_preemptions == running.stats.num_preemptions > 0
    for times in pure.requests:
        sink = sinks[times.request]
        assert sink.times_s[0] == pytest.approx(times.ttft_s)
        assert sink.times_s[-1] == pytest.approx(times.latency_s)


async def test_a_planned_pipeline_has_the_memory_and_the_times_of_its_estimate() -> None:
    estimator = test_fleet.JUDGE
    stages = test_fleet.TWO.stages
    async with planned_engine(estimator, stages, RollingModel(1000, 0)) as running:
        card = running.card
        assert card.max_num_seqs == estimator.max_batch(stages)
        sink = submit(running, "a", 100, 20)
        await sink.ended()
    expected = simulate(
        simulated_pipeline(estimator, stages), [SimulatedRequest(0.0, 100, 20)]
    ).requests[0]
    assert sink.times_s[0] == pytest.approx(expected.ttft_s)
    assert sink.times_s[-1] == pytest.approx(expected.latency_s)


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        engine(num_kv_blocks=2, block_size=16, max_model_len=33)
    with pytest.raises(ValueError, match="stages"):
        SimulatedEngine([], RollingModel(10, 0), num_kv_blocks=1000)


# Whatever happens

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 30), st.integers(1, 20), st.integers(0, 2)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("sleep"), st.integers(0, 200)),
        st.tuples(st.sampled_from(["freeze", "thaw", "die", "slower", "faster"])),
    ),
    max_size=40,
)


async def live(events: list[tuple[Any, ...]], num_stages: int, enable_prefix_caching: bool) -> None:
    options = {"num_kv_blocks": 13, "block_size": 4, "max_model_len": 51, "max_num_seqs": 3}
    sinks: list[TimedSink] = []
    expected: list[int | None] = []
    async with engine(
        *[TIME] * num_stages,
        enable_prefix_caching=enable_prefix_caching,
        max_num_batched_tokens=16,
        **options,
    ) as running:
        for kind, *args in events:
            match kind:
                case "submit":
                    num_prompt, max_tokens, priority = args
                    name = str(len(sinks))
                    sinks.append(submit(running, name, num_prompt, max_tokens, priority=priority))
                    expected.append(max_tokens)
                case "abort":
                    running.abort(str(args[0]))
                    if args[0] < len(sinks) and not is_over(sinks[args[0]]):
                        expected[args[0]] = None
                case "sleep":
                    await anyio.sleep(args[0] / 1000)
                case "die":
                    running.die()
                    running.revive()
                case "slower" | "faster":
                    running.speed = 0.5 if kind == "slower" else 2.0
                case _:
                    getattr(running, kind)()
            running.check_invariants()
        running.thaw()
        await running.drain()
        running.check_invariants()
        stats = running.stats
    assert (stats.running, stats.waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    for sink, num_tokens in zip(sinks, expected, strict=True):
        assert is_over(sink) != (num_tokens is None)
        if num_tokens is not None and sink.error is None:
            assert len(sink.token_ids) == num_tokens


def is_over(sink: TimedSink) -> bool:
    return sink.error is not None or (sink.total is not None and bool(sink.total.finish_reason))


@given(events=EVENTS, num_stages=st.integers(1, 3), enable_prefix_caching=st.booleans())
def test_everything_ends_or_is_aborted_and_all_is_given_back(
    events: list[tuple[Any, ...]], num_stages: int, enable_prefix_caching: bool
) -> None:
    run_virtual(live, events, num_stages, enable_prefix_caching)
