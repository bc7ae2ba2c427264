"""Real engines that are killed, frozen and drained while hundreds of streams run on them."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest

from spot.engines.hosted import HostConfig, HostedEngine
from spot.errors import EngineUnavailable
from spot.fleet import Fleet, PipelineSpec
from spot.fleet_state import FailoverPolicy
from spot.generation import Generation, SamplingParams, StructuredOutput, TokenDelta
from tests.sink import Sink
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(600)]

NUM_STREAMS = 500
NUM_FAULTS = 6
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


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    model = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    config = HostConfig(
        {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 32,
            "skip_tokenizer_init": False,
        },
        start_timeout_s=250,
        min_backoff_s=0.1,
    )
    specs = [PipelineSpec(name, HostedEngine(config, on_line=print)) for name in ("a", "b")]
    policy = FailoverPolicy(
        stall_base_s=4.0, no_capacity_timeout_s=240, max_fruitless=50, max_migrations=200
    )
    async with Fleet(specs, policy=policy) as running:
        await running.wait_ready()
        await both_serve(running)
        yield running


async def until(condition: Callable[[], bool], within_s: float = 240.0) -> None:
    with anyio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 - conditions have no events
            await anyio.sleep(0.05)


async def both_serve(fleet: Fleet) -> None:
    await until(lambda: [p["state"] for p in fleet.describe()] == ["serving", "serving"])


def workload(index: int) -> Generation:
    return Generation(
        f"g{index}",
        PROMPTS[index % 4],
        SAMPLINGS[(index // 4) % 4],
        cache_salt=str(index) if index % 16 > 8 else None,
    )


@pytest.fixture(scope="module")
async def expected(fleet: Fleet) -> list[TokenDelta]:
    """What each kind of stream gives when nothing happens."""
    sinks = []
    for index in range(16):
        sink = Sink()
        generation = workload(index)
        generation.id = f"whole{index}"
        fleet.submit(generation, sink)
        sinks.append(sink)
    return [await sink.output() for sink in sinks]


def check(sink: Sink, whole: TokenDelta) -> None:
    assert sink.error is None, sink.error
    assert sink.total is not None
    assert sink.total.token_ids == whole.token_ids
    assert sink.total.finish_reason == whole.finish_reason
    if whole.logprobs is not None:
        assert sink.total.logprobs is not None
        assert [entry.token_ids[0] for entry in sink.total.logprobs] == whole.token_ids


def strike(fleet: Fleet, name: str, number: signal.Signals) -> None:
    """Signal every process of one pipeline."""
    for pid in fleet.engine(name).status.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def test_500_streams_survive_kills_and_freezes(
    fleet: Fleet, expected: list[TokenDelta]
) -> None:
    rng = random.Random(5)
    sinks: list[Sink] = []
    faults: list[str] = []

    async def trouble() -> None:
        """Kill, freeze and end pipelines; sometimes both at once, sometimes the target as well."""
        while len(faults) < NUM_FAULTS:
            await anyio.sleep(rng.uniform(0.2, 1.0))
            number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
            victims = [p["id"] for p in fleet.describe() if p["state"] == "serving"]
            if rng.random() < 0.7:
                victims = victims[:1] if rng.random() < 0.5 else victims[-1:]
            for name in victims:
                strike(fleet, name, number)
                faults.append(f"{number.name} {name}")
            await until(lambda: any(p["state"] == "serving" for p in fleet.describe()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(trouble)
        for index in range(NUM_STREAMS):
            sink = Sink()
            while True:
                try:
                    fleet.submit(workload(index), sink)
                    break
                except EngineUnavailable:
                    await anyio.sleep(0.2)
            sinks.append(sink)
            if index % 32 == 31:
                await sinks[index - 31].ended(400)
    for index, sink in enumerate(sinks):
        await sink.ended(400)
        check(sink, expected[index % 16])
    print(faults, f"{fleet.num_migrations} migrations")
    assert fleet.num_migrations > 20
    assert fleet.num_lost == 0
    await until(lambda: all(fleet.engine(n).stats.running == 0 for n in ("a", "b")))
    assert fleet.num_live == 0


async def test_a_frozen_pipeline_is_noticed_long_before_vllm_would(
    fleet: Fleet, expected: list[TokenDelta]
) -> None:
    await both_serve(fleet)
    sinks = []
    for index in range(16):
        sinks.append(Sink())
        fleet.submit(workload(index), sinks[-1])
    await sinks[0].started.wait()
    strike(fleet, "a", signal.SIGSTOP)
    with anyio.fail_after(60):
        for index, sink in enumerate(sinks):
            await sink.ended()
            check(sink, expected[index])


async def test_a_notice_moves_what_runs_and_the_pipeline_leaves(
    fleet: Fleet, expected: list[TokenDelta]
) -> None:
    await both_serve(fleet)
    sinks = []
    for index in range(16):
        sinks.append(Sink())
        fleet.submit(workload(index), sinks[-1])
    await sinks[0].started.wait()
    pids = fleet.engine("b").status.pids
    fleet.drain_pipeline("b", deadline_s=0.5, cause="notice")
    for index, sink in enumerate(sinks):
        await sink.ended()
        check(sink, expected[index])
    await until(lambda: [p["id"] for p in fleet.describe()] == ["a"])
    await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
