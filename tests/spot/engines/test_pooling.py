"""PoolingEngine and the pooling host, around a model that computes next to nothing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from spot.engines.codec import (
    Embed,
    Pooled,
    PoolingCard,
    PoolingReady,
    ScorePairs,
    TooLong,
    encode_frame,
    to_gateway_decoder,
    to_host_decoder,
)
from spot.engines.host_process import HostConfig
from spot.engines.pooling import InputTooLong, PoolingConfig, PoolingEngine, check_dimensions
from spot.errors import (
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    NotSupported,
    Overloaded,
    ShuntyardError,
)

pytestmark = pytest.mark.anyio

FAKE_HOST = Path(__file__).with_name("fake_pooling_host.py")


@asynccontextmanager
async def starting(**options: Any) -> AsyncIterator[PoolingEngine]:
    """An engine over a fake host; what neither config knows goes to the host."""
    config = PoolingConfig("fake", max_queue=options.pop("max_queue", 20_000))
    step_timeout_s = options.pop("step_timeout_s", 120.0)
    host = HostConfig(
        options,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        command=(sys.executable, str(FAKE_HOST)),
        step_timeout_s=step_timeout_s,
        stop_timeout_s=2.0,
        min_backoff_s=0.01,
    )
    async with PoolingEngine(config, host=host, on_line=print) as engine:
        yield engine


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[PoolingEngine]:
    async with starting(**options) as engine:
        with anyio.fail_after(30):
            await engine.wait_ready()
        yield engine


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.005)


async def first_column(engine: PoolingEngine, *texts: str) -> list[float]:
    return list((await engine.embed(texts)).vectors[:, 0])


async def test_vectors_come_in_the_order_of_the_inputs() -> None:
    async with running() as engine:
        result = await engine.embed(["a", "b c d", "e f"] * 10)
        assert result.vectors.dtype == np.float32
        assert list(result.vectors[:, 0]) == [1, 3, 2] * 10
        assert result.num_tokens == [1, 3, 2] * 10
        assert (await engine.embed([[1, 2, 3], [4]])).num_tokens == [3, 1]
        assert (await engine.embed([])).vectors.shape == (0, 3)


async def test_concurrent_calls_share_a_pass() -> None:
    async with running() as engine:
        widths: list[float] = []

        async def one() -> None:
            widths.append((await engine.embed(["slow"])).vectors[0, 2])

        async with anyio.create_task_group() as tasks:
            for _ in range(9):
                tasks.start_soon(one)
        assert max(widths) > 1
        assert max(widths) <= 4


async def test_a_small_call_does_not_wait_for_a_large_one() -> None:
    async with running() as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.embed, ["slow"] * 400)
        await until(lambda: engine.stats.waiting > 0)
        with anyio.fail_after(2):
            await engine.embed(["a"])
        tasks.cancel_scope.cancel()


async def test_a_cancelled_call_leaves_the_queue() -> None:
    async with running() as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.embed, ["slow"] * 400)
            await until(lambda: engine.stats.waiting > 0)
            tasks.cancel_scope.cancel()
        await until(lambda: engine.stats.waiting == engine.stats.running == 0)
        with anyio.fail_after(2):
            assert await first_column(engine, "a b") == [2]


async def test_a_long_input_is_refused_or_cut() -> None:
    async with running() as engine:
        with pytest.raises(InputTooLong, match="maximum context length is 8 tokens") as caught:
            await engine.embed(["a", "b", "x " * 9])
        assert caught.value.index == 2
        assert await first_column(engine, "a") == [1]
        assert (await engine.embed(["x " * 9], truncate_to=-1)).num_tokens == [8]
        assert (await engine.embed(["x " * 9], truncate_to=3)).num_tokens == [3]


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ([""], {}),
        ([[1, 100]], {}),
        (["a"], {"dimensions": 4}),
        (["a"], {"dimensions": 0}),
        (["a"], {"truncate_to": 9}),
        (["a"], {"truncate_to": 0}),
        (["\ud800"], {}),
    ],
    ids=ascii,
)
async def test_a_wrong_call_is_refused(inputs: Any, options: dict[str, int]) -> None:
    async with running() as engine:
        with pytest.raises(InvalidRequest):
            await engine.embed(inputs, **options)
        assert await first_column(engine, "a b") == [2]


async def test_shortened_vectors_have_length_one() -> None:
    async with running() as engine:
        result = await engine.embed(["a b c"], dimensions=2)
        assert result.vectors.shape == (1, 2)
        assert result.vectors[0].tolist() == pytest.approx([3 / 10**0.5, 1 / 10**0.5])


async def test_an_embedding_model_scores_by_cosine() -> None:
    async with running(max_batch=1) as engine:
        result = await engine.score([("a b c", "x y z"), ("a b c", "a")])
        assert result.scores == pytest.approx([1.0, 5 / (11 * 3) ** 0.5])
        assert result.num_tokens == 7
        with pytest.raises(InputTooLong) as caught:
            await engine.score([("a", "b"), ("a", "c"), ("a", "x " * 9)])
        assert caught.value.index == 2


async def test_a_cross_encoder_scores_pairs_and_gives_no_vectors() -> None:
    async with running(task="score") as engine:
        result = await engine.score([("a b", "c"), ("a", "d e f")])
        assert result.scores == [3.0, 4.0]
        assert result.num_tokens == 7
        with pytest.raises(NotSupported):
            await engine.embed(["a"])


@pytest.mark.parametrize("word", ["bad", "nan", "untokenizable"])
async def test_a_failing_pass_ends_its_calls_only(word: str) -> None:
    async with running() as engine:
        with pytest.raises(EngineFailed):
            await engine.embed([word])
        assert await first_column(engine, "a b") == [2]
        assert engine.status.num_restarts == 0


async def test_a_call_is_done_again_after_a_death(tmp_path: Path) -> None:
    async with running(marker=str(tmp_path / "crashed")) as engine:
        assert await first_column(engine, "crash-once a", "b") == [2, 1]
        assert engine.status.num_restarts == 1


@pytest.mark.parametrize("word", ["crash", "device-lost"])
async def test_a_call_that_kills_twice_fails(word: str) -> None:
    async with running() as engine:
        with anyio.fail_after(20), pytest.raises(EngineFailed):
            await engine.embed([word])
        await until(lambda: engine.status.state == "ready")
        assert await first_column(engine, "a") == [1]
        assert engine.status.num_restarts == 2


async def test_a_killed_host_is_replaced() -> None:
    async with running() as engine:
        (pid,) = engine.status.pids
        os.kill(pid, signal.SIGKILL)
        await until(lambda: engine.status.num_restarts == 1 and engine.status.state == "ready")
        assert engine.status.pids != [pid]
        assert await first_column(engine, "a") == [1]


async def test_a_model_that_does_nothing_is_taken_for_dead() -> None:
    async with running(step_timeout_s=0.4) as engine:
        with anyio.fail_after(20), pytest.raises(EngineFailed):
            await engine.embed(["stuck"])


async def test_too_many_waiting_inputs_are_refused() -> None:
    async with running(max_queue=10) as engine, anyio.create_task_group() as tasks:
        assert len(await first_column(engine, *["a"] * 11)) == 11
        tasks.start_soon(engine.embed, ["slow"] * 8)
        await until(lambda: engine.stats.running > 0)
        with pytest.raises(Overloaded):
            await engine.embed(["a"] * 3)
        await engine.embed(["a"] * 2)


async def test_nothing_is_taken_before_readiness() -> None:
    async with starting() as engine:
        with pytest.raises(EngineUnavailable, match="starting"):
            await engine.embed(["a"])
        await engine.wait_ready()


async def test_a_model_that_cannot_be_loaded_is_not_tried_again() -> None:
    async with starting(mode="fatal") as engine:
        with anyio.fail_after(20), pytest.raises(EngineFailed, match="no such model"):
            await engine.wait_ready()
        assert engine.status.state == "dead"


async def test_leaving_ends_calls_and_processes() -> None:
    async with anyio.create_task_group() as tasks:
        async with running() as engine:
            errors: list[ShuntyardError] = []

            async def one() -> None:
                try:
                    await engine.embed(["slow"] * 400)
                except ShuntyardError as error:
                    errors.append(error)

            tasks.start_soon(one)
            await until(lambda: engine.stats.running > 0)
            (pid,) = engine.status.pids
        assert not is_alive(pid)
    assert isinstance(errors[0], EngineUnavailable)


@pytest.mark.parametrize("dimensions", [None, 4, 8])
def test_listed_dimensions_are_allowed(dimensions: int | None) -> None:
    card = PoolingCard("embed", 8, 16, 100, matryoshka=True, matryoshka_dimensions=[2, 4])
    check_dimensions(card, dimensions)
    with pytest.raises(InvalidRequest, match="2, 4"):
        check_dimensions(card, 3)


def test_pooling_messages_survive_the_wire() -> None:
    for message in (Embed(1, ["a", [1, 2]], 3), ScorePairs(2, [("a", "b")])):
        assert to_host_decoder.decode(encode_frame(message)[4:]) == message
    card = PoolingCard("embed", 3, 8, 100, matryoshka_dimensions=[1])
    for answer in (PoolingReady(card, [7]), Pooled(1, b"\0\1", [3]), TooLong(1, 2, 3)):
        assert to_gateway_decoder.decode(encode_frame(answer)[4:]) == answer
