"""Real engines that are killed, frozen and drained while hundreds of streams run on them."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import pytest
from anyio.abc import TaskGroup

from spot.engines.hosted import HostConfig, HostedEngine
from spot.errors import EngineUnavailable
from spot.failover_policy import FailoverPolicy
from spot.fleet import Fleet, PipelineSpec
from spot.generation import Generation, SamplingParams, StructuredOutput, TokenDelta
from tests.sink import Sink
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(600)]

NUM_STREAMS = 500
PROMPTS = [list(range(start, start + 24)) for start in (100, 200, 300, 400)]
SAMPLINGS = [
    SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=150, seed=7, temperature=0.8, top_k=40, ignore_eos=True),
    SamplingParams(max_tokens=110, temperature=0.0, frequency_penalty=1.5, logprobs=1),
    SamplingParams(
        max_tokens=100,
        temperature=0.0,
        structured=StructuredOutput(regex="([a-f]{3} ){20}[0-9]{30}"),
    ),
]
_run_ids = itertools.count()


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
def host_config(tmp_path_factory: pytest.TempPathFactory) -> HostConfig:
    return HostConfig(
        {
            "model": str(make_tiny_model(tmp_path_factory.mktemp("tiny"))),
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 32,
            "skip_tokenizer_init": False,
        },
        start_timeout_s=250,
        min_backoff_s=0.1,
        max_backoff_s=0.5,
    )


@pytest.fixture(scope="module")
async def fleet(host_config: HostConfig) -> AsyncIterator[Fleet]:
    policy = FailoverPolicy(
        stall_base_s=4.0, no_capacity_timeout_s=240, max_fruitless=50, max_migrations=200
    )
    specs = [new_pipeline(host_config) for _ in range(2)]
    async with Fleet(specs, policy=policy) as running:
        await running.wait_ready()
        await both_serve(running)
        yield running


_pipeline_ids = (f"pipeline-{number}" for number in itertools.count(1))


def new_pipeline(config: HostConfig) -> PipelineSpec:
    return PipelineSpec(next(_pipeline_ids), HostedEngine(config, on_line=print))


async def until(
    condition: Callable[[], bool], *, within_s: float = 240.0, every_s: float = 0.05
) -> None:
    with anyio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 - conditions have no events
            await anyio.sleep(every_s)


def serving(fleet: Fleet) -> list[str]:
    return [p["id"] for p in fleet.describe() if p["state"] == "serving"]


async def both_serve(fleet: Fleet) -> None:
    await until(lambda: len(serving(fleet)) == 2)


async def are_noticed(fleet: Fleet, victims: Sequence[str]) -> None:
    await until(lambda: not set(victims) & set(serving(fleet)))


async def nothing_is_left(fleet: Fleet) -> None:
    """No generation in the fleet, and none in an engine that serves."""
    await until(lambda: fleet.num_live == 0 and fleet.state.num_waiting == 0)
    await until(lambda: all(fleet.engine(name).stats.running == 0 for name in serving(fleet)))


def workload(index: int) -> Generation:
    return Generation(
        f"g{index}-{next(_run_ids)}",
        PROMPTS[index % 4],
        SAMPLINGS[(index // 4) % 4],
        cache_salt=str(index) if index % 16 > 8 else None,
    )


@pytest.fixture(scope="module")
async def expected(fleet: Fleet) -> list[TokenDelta]:
    """What each kind of stream gives when nothing happens."""
    return [await stream.sink.output() for stream in start_streams(fleet, 16)]


@dataclass(slots=True, eq=False)
class Stream:
    """One client: what it asked for, and what it has got."""

    generation: Generation
    index: int
    sink: Sink = field(default_factory=Sink)

    def where(self, fleet: Fleet) -> str | None:
        """The pipeline on which it runs now."""
        live = fleet.state.lives.get(self.generation.id)
        return None if live is None else live.pipeline_id

    def is_taken_over(self, fleet: Fleet) -> bool:
        """Whether a pipeline has it after another was lost, and has made no token of it yet."""
        live = fleet.state.lives.get(self.generation.id)
        if live is None or live.pipeline_id is None:
            return False
        return live.num_migrations > 0 and not live.num_leg_tokens

    async def check(self, expected: Sequence[TokenDelta], within_s: float = 240.0) -> None:
        """That it ends as if nothing had happened: no token lost, none twice, the same finish."""
        await self.sink.ended(within_s)
        whole, total = expected[self.index % 16], self.sink.total
        assert self.sink.error is None, self.sink.error
        assert total is not None
        assert total.token_ids == whole.token_ids
        assert total.finish_reason == whole.finish_reason
        if whole.logprobs is not None:
            assert total.logprobs is not None
            assert [entry.token_ids[0] for entry in total.logprobs] == whole.token_ids


def start_streams(fleet: Fleet, count: int) -> list[Stream]:
    streams = [Stream(workload(index), index) for index in range(count)]
    for stream in streams:
        fleet.submit(stream.generation, stream.sink)
    return streams


class Trigger(Sink):
    """A sink that does something as soon as so many tokens have come."""

    def __init__(self, num_tokens: int, action: Callable[[], None]) -> None:
        super().__init__()
        self._num_tokens = num_tokens
        self._action: Callable[[], None] | None = action

    def on_delta(self, delta: TokenDelta) -> None:
        super().on_delta(delta)
        assert self.total is not None
        if self._action and len(self.total.token_ids) >= self._num_tokens:
            action, self._action = self._action, None
            action()


def strike(fleet: Fleet, name: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal every process of one pipeline."""
    for pid in fleet.engine(name).status.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


Fault = Literal["SIGKILL", "SIGTERM", "SIGSTOP", "both", "target", "notice"]
# Each strikes into streams that run, the last one into the last streams.
FAULTS: list[Fault] = [
    *["SIGKILL"] * 3,
    *["SIGTERM", "SIGSTOP", "both", "target", "notice"],
]


def is_taking_over(fleet: Fleet, name: str) -> bool:
    """Whether a pipeline reads what another has lost, and has made no token of it yet."""
    legs = fleet.state.pipelines[name].legs.values()
    return any(live.num_migrations and not live.num_leg_tokens for live in legs)


async def strike_the_target(fleet: Fleet, first: str, second: str) -> None:
    """Kill a pipeline, then the one that takes over what it did, while it takes over."""
    strike(fleet, first)
    await until(lambda: is_taking_over(fleet, second), every_s=0.001)
    strike(fleet, second)


class Trouble:
    """500 streams in as many groups as there are faults: each fault strikes into running streams.

    Half a group begins when both pipelines serve and little of the groups before is left, the other
    half right after the fault.
    struck_at: for each fault, how many streams had ended when it struck.
    """

    def __init__(self, fleet: Fleet, config: HostConfig, expected: Sequence[TokenDelta]) -> None:
        self.struck_at: list[int] = []
        self.num_ended = 0
        self._num_begun = 0
        self._fleet = fleet
        self._config = config
        self._expected = expected
        self._rng = random.Random(5)
        self.faults = self._rng.sample(FAULTS, len(FAULTS))

    async def run(self) -> None:
        half = NUM_STREAMS / len(self.faults) / 2
        async with anyio.create_task_group() as clients:
            for number, fault in enumerate(self.faults):
                await both_serve(self._fleet)
                await until(lambda: self._num_begun - self.num_ended <= half)
                self._begin(clients, round((2 * number + 1) * half))
                await anyio.sleep(self._rng.uniform(0.1, 0.8))
                assert self._fleet.num_live > 0
                self.struck_at.append(self.num_ended)
                victims = await self._strike(fault)
                self._begin(clients, round((2 * number + 2) * half))
                await are_noticed(self._fleet, victims)

    def _begin(self, clients: TaskGroup, end: int) -> None:
        """Let as many streams have begun as that."""
        for index in range(self._num_begun, end):
            clients.start_soon(self._client, index)
        self._num_begun = end

    async def _client(self, index: int) -> None:
        stream = Stream(workload(index), index)
        while True:
            try:
                self._fleet.submit(stream.generation, stream.sink)
                break
            except EngineUnavailable:
                await anyio.sleep(0.2)
        await stream.check(self._expected)
        self.num_ended += 1

    async def _strike(self, fault: Fault) -> list[str]:
        fleet = self._fleet
        victims = first, second = self._rng.sample(serving(fleet), 2)
        match fault:
            case "both":
                strike(fleet, first)
                strike(fleet, second)
            case "target":
                await strike_the_target(fleet, first, second)
            case "notice":
                fleet.drain_pipeline(first, deadline_s=0.5, cause="notice")
                await fleet.add(new_pipeline(self._config))
            case _:
                strike(fleet, first, signal.Signals[fault])
        return victims if fault in ("both", "target") else [first]


async def test_500_streams_survive_faults_all_along(
    fleet: Fleet, host_config: HostConfig, expected: list[TokenDelta]
) -> None:
    trouble = Trouble(fleet, host_config, expected)
    await trouble.run()
    print(list(zip(trouble.faults, trouble.struck_at, strict=True)))
    print(f"{trouble.num_ended} streams, {fleet.num_migrations} migrations")
    assert trouble.num_ended == NUM_STREAMS
    quarters = {at * 4 // NUM_STREAMS for at in trouble.struck_at}
    assert quarters == {0, 1, 2, 3}, trouble.struck_at
    assert NUM_STREAMS - trouble.struck_at[-1] <= 2 * NUM_STREAMS / len(trouble.faults)
    assert fleet.num_migrations > 50
    assert fleet.num_lost == 0
    await nothing_is_left(fleet)


async def test_a_pipeline_lost_before_the_first_token_costs_nothing(
    fleet: Fleet, expected: list[TokenDelta]
) -> None:
    await both_serve(fleet)
    streams = start_streams(fleet, 32)
    victim = serving(fleet)[0]
    on_victim = [stream for stream in streams if stream.where(fleet) == victim]
    strike(fleet, victim)  # nothing ran in between: no token can have come
    assert on_victim
    assert all(stream.sink.total is None for stream in on_victim)
    for stream in streams:
        await stream.check(expected)
    assert all(moves(stream) == 1 for stream in on_victim)
    await nothing_is_left(fleet)


async def test_the_target_may_fail_while_it_takes_over(
    fleet: Fleet, expected: list[TokenDelta]
) -> None:
    await both_serve(fleet)
    streams = start_streams(fleet, 32)
    await streams[0].sink.started.wait()
    await strike_the_target(fleet, *serving(fleet))
    for stream in streams:
        await stream.check(expected)
    assert max(moves(stream) for stream in streams) >= 2
    await nothing_is_left(fleet)


async def test_clients_may_leave_while_their_work_moves_and_while_it_waits(
    fleet: Fleet, expected: list[TokenDelta]
) -> None:
    await both_serve(fleet)
    streams = start_streams(fleet, 32)
    first, second = serving(fleet)
    await streams[0].sink.started.wait()
    strike(fleet, first)
    await until(lambda: is_taking_over(fleet, second), every_s=0.001)
    moving = [stream for stream in streams if stream.is_taken_over(fleet)]
    gone = leave(fleet, moving[::2])
    assert gone
    strike(fleet, second)
    await until(lambda: fleet.state.num_waiting == fleet.num_live, every_s=0.001)
    waiting = [stream for stream in streams if stream.generation.id in fleet.state.lives]
    assert waiting
    gone |= leave(fleet, waiting[::2])
    fleet.state.check_invariants()
    for stream in streams:
        if stream not in gone:
            await stream.check(expected)
    await nothing_is_left(fleet)
    for stream, num_deltas in gone.items():
        assert stream.sink.num_deltas == num_deltas, "something came after the client had left"
        assert stream.sink.error is None


def leave(fleet: Fleet, streams: list[Stream]) -> dict[Stream, int]:
    """Let clients hang up. Returns how many deltas each has had."""
    for stream in streams:
        fleet.abort(stream.generation.id)
    return {stream: stream.sink.num_deltas for stream in streams}


def moves(stream: Stream) -> int:
    assert stream.sink.total is not None
    return stream.sink.total.num_migrations


@pytest.mark.parametrize("num_missing", [1, 0], ids=["one before the last", "the last"])
async def test_a_loss_at_the_last_token_neither_repeats_nor_loses_it(
    fleet: Fleet, expected: list[TokenDelta], num_missing: int
) -> None:
    """Killed in the instant in which a token arrives: the last one may be on its way by then."""
    await both_serve(fleet)
    first = Stream(workload(0), 0)
    where: list[str] = []

    def kill() -> None:
        strike(fleet, where[0])

    first.sink = Trigger(len(expected[0].token_ids) - num_missing, kill)
    fleet.submit(first.generation, first.sink)
    where.append(str(first.where(fleet)))
    others = start_streams(fleet, 16)
    for stream in [first, *others]:
        await stream.check(expected)
    if not num_missing:
        assert moves(first) == 0
    await are_noticed(fleet, where)
    await nothing_is_left(fleet)


async def test_a_finished_answer_does_not_mind_what_happens_to_its_pipeline(
    fleet: Fleet, expected: list[TokenDelta]
) -> None:
    await both_serve(fleet)
    streams = start_streams(fleet, 16)
    places = {stream.where(fleet) for stream in streams}
    for stream in streams:
        await stream.check(expected)
    num_migrations, num_deltas = fleet.num_migrations, [s.sink.num_deltas for s in streams]
    victim = serving(fleet)[0]
    assert victim in places
    strike(fleet, victim)
    await are_noticed(fleet, [victim])
    for stream in streams:
        await stream.check(expected)
    assert fleet.num_migrations == num_migrations
    assert [stream.sink.num_deltas for stream in streams] == num_deltas
    await nothing_is_left(fleet)


async def test_a_frozen_pipeline_is_noticed_long_before_vllm_would(
    fleet: Fleet, expected: list[TokenDelta]
) -> None:
    await both_serve(fleet)
    streams = start_streams(fleet, 16)
    await streams[0].sink.started.wait()
    strike(fleet, serving(fleet)[0], signal.SIGSTOP)
    with anyio.fail_after(60):
        for stream in streams:
            await stream.check(expected)


async def test_a_notice_moves_what_runs_and_the_pipeline_leaves(
    fleet: Fleet, expected: list[TokenDelta]
) -> None:
    await both_serve(fleet)
    streams = start_streams(fleet, 16)
    await streams[0].sink.started.wait()
    leaving, staying = serving(fleet)
    pids = fleet.engine(leaving).status.pids
    fleet.drain_pipeline(leaving, deadline_s=0.5, cause="notice")
    for stream in streams:
        await stream.check(expected)
    await until(lambda: [p["id"] for p in fleet.describe()] == [staying])
    await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
