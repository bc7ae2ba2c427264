"""HostedEngine against a host that speaks the codec and does what it is told."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from spot.engines.base import EngineCard
from spot.engines.hosted import HostConfig, HostedEngine
from spot.errors import (
    EngineFailed,
    EngineMisconfigured,
    EngineUnavailable,
    GenerationFailed,
    InvalidRequest,
    ShuntyardError,
)
from spot.generation import Generation, SamplingParams, TokenDelta

pytestmark = pytest.mark.anyio

FAKE_HOST = Path(__file__).with_name("fake_host.py")
CARD = EngineCard(max_model_len=64, vocab_size=100, engine="fake")


class Sink:
    """Remembers what it is told, and can be waited for."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.error: ShuntyardError | None = None
        self._ended = anyio.Event()

    def on_delta(self, delta: TokenDelta) -> None:
        assert not self._ended.is_set(), "a delta after the end"
        self.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self._ended.set()

    def on_error(self, error: ShuntyardError) -> None:
        assert not self._ended.is_set(), "an error after the end"
        self.error = error
        self._ended.set()

    async def ended(self) -> Sink:
        with anyio.fail_after(10):
            await self._ended.wait()
        return self


@asynccontextmanager
async def engine(mode: str, **options: Any) -> AsyncIterator[HostedEngine]:
    """A hosted engine over a fake host; `args` go to the host, the rest to HostConfig."""
    args, label = options.pop("args", {}), options.pop("label", "")
    config = HostConfig(
        {"mode": mode, **args},
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        command=(sys.executable, str(FAKE_HOST)),
        **{"min_backoff_s": 0.01, "stop_timeout_s": 2.0, **options},
    )
    async with HostedEngine(config, label=label) as hosted:
        yield hosted


def generation(name: str = "g", tokens: tuple[int, ...] = (1, 2, 3)) -> Generation:
    return Generation(name, list(tokens), SamplingParams(max_tokens=8))


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.005)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] not in "ZX"
    except OSError:
        return False


async def ready(hosted: HostedEngine) -> HostedEngine:
    with anyio.fail_after(20):
        await hosted.wait_ready()
    return hosted


async def test_tokens_arrive_in_order_and_once() -> None:
    async with engine("echo") as hosted:
        assert await hosted.wait_ready() == CARD
        sinks = [Sink() for _ in range(20)]
        for number, sink in enumerate(sinks):
            hosted.submit(generation(f"g{number}", (number, 7, 9)), sink)
        for number, sink in enumerate(sinks):
            assert (await sink.ended()).token_ids == [number, 7, 9]
            assert sink.finish_reason == "length"
        assert hosted.num_live == 0


async def test_nothing_is_submitted_before_readiness() -> None:
    async with engine("never_ready") as hosted:
        with pytest.raises(EngineUnavailable, match="starting"):
            hosted.submit(generation(), Sink())


async def test_progress_shows_in_the_status() -> None:
    async with engine("never_ready") as hosted:
        await until(lambda: hosted.status.detail == "warming up the fake")
        assert hosted.status.state == "starting"


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("crash_on_submit", "closed its connection"),  # known before the exit code is
        ("close_on_submit", "closed its connection"),
        ("dead_on_submit", "the engine core died"),
    ],
)
async def test_every_live_generation_fails_when_the_host_dies(mode: str, reason: str) -> None:
    async with engine(mode) as hosted:
        await ready(hosted)
        sinks = [Sink(), Sink()]
        hosted.submit(generation("a"), sinks[0])
        hosted.submit(generation("b"), sinks[1])
        for sink in sinks:
            assert isinstance((await sink.ended()).error, EngineFailed)
            assert reason in str(sink.error)


@pytest.mark.parametrize(
    ("mode", "expected"), [("fail", EngineFailed), ("fail_everywhere", GenerationFailed)]
)
async def test_a_failure_tells_whether_another_engine_would_do_better(
    mode: str, expected: type[ShuntyardError]
) -> None:
    async with engine(mode) as hosted:
        await ready(hosted)
        sink = Sink()
        hosted.submit(generation(), sink)
        assert type((await sink.ended()).error) is expected
        assert hosted.status.state == "ready"


async def test_a_dead_host_is_started_again_and_serves(tmp_path: Path) -> None:
    async with engine("crash_once", args={"marker": str(tmp_path / "crashed")}) as hosted:
        await ready(hosted)
        lost = Sink()
        hosted.submit(generation(), lost)
        assert isinstance((await lost.ended()).error, EngineFailed)
        await until(lambda: hosted.status.state == "ready" and hosted.status.num_restarts == 1)
        served = Sink()
        hosted.submit(generation(), served)
        assert (await served.ended()).token_ids == [1, 2, 3]


@pytest.mark.parametrize(
    ("mode", "cause"),
    [("complain_and_crash", "exited with code 3"), ("dead_with_words", "was killed by SIGKILL")],
)
async def test_the_log_tells_why_an_engine_died_and_when_it_is_back(
    mode: str, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine(mode) as hosted:
        await ready(hosted)
        hosted.submit(generation(), Sink())
        await until(lambda: "ready again" in caplog.text)
    died, back = caplog.messages
    assert cause in died
    assert died.endswith("it wrote last:\nRuntimeError: out of pages")
    assert back.startswith("engine is ready again, ")


async def test_the_log_tells_which_of_several_engines_died(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with engine("complain_and_crash", label="local-2") as hosted:
        await ready(hosted)
        hosted.submit(generation(), Sink())
        await until(lambda: "ready again" in caplog.text)
    assert [message.partition(" ")[0] for message in caplog.messages] == ["local-2:", "local-2:"]


async def test_a_frozen_host_gets_no_new_work_until_it_speaks_again() -> None:
    async with engine("echo", heartbeat_interval_s=0.05, max_silence_s=0.5) as hosted:
        await ready(hosted)
        (pid,) = hosted.status.pids
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: hosted.status.state == "stalled")
        with pytest.raises(EngineUnavailable, match="no sign of life"):
            hosted.submit(generation(), Sink())
        os.kill(pid, signal.SIGCONT)
        await until(lambda: hosted.status.state == "ready")
        sink = Sink()
        hosted.submit(generation(), sink)
        assert (await sink.ended()).token_ids == [1, 2, 3]
        assert hosted.status.num_restarts == 0


async def test_a_pause_of_the_gateway_is_not_the_hosts_silence() -> None:
    async with engine("echo", heartbeat_interval_s=0.05, stall_timeout_s=0.5) as hosted:
        await ready(hosted)
        time.sleep(1.0)  # noqa: ASYNC251 - the event loop stands still
        await anyio.sleep(0.2)
        assert (hosted.status.state, hosted.status.num_restarts) == ("ready", 0)


async def test_a_host_that_falls_silent_is_killed_and_restarted() -> None:
    async with engine("silent", heartbeat_interval_s=0.05, stall_timeout_s=1.5) as hosted:
        await ready(hosted)
        pid = hosted.status.pids[0]
        sink = Sink()
        hosted.submit(generation(), sink)
        assert "silent" in str((await sink.ended()).error)
        await until(lambda: not is_alive(pid))
        await until(lambda: hosted.status.num_restarts >= 1)


async def test_an_engine_without_steps_is_taken_for_dead() -> None:
    async with engine("hold", step_timeout_s=0.2) as hosted:
        await ready(hosted)
        sink = Sink()
        hosted.submit(generation(), sink)
        assert "no step" in str((await sink.ended()).error)


async def test_children_of_a_dead_host_are_killed() -> None:
    async with engine("with_child") as hosted:
        await ready(hosted)
        pids = list(hosted.status.pids)
        assert len(pids) == 2
        sink = Sink()
        hosted.submit(generation(), sink)
        await sink.ended()
        await until(lambda: not any(map(is_alive, pids)))


async def test_leaving_stops_every_process() -> None:
    async with engine("with_child") as hosted:
        await ready(hosted)
        pids = list(hosted.status.pids)
        assert all(map(is_alive, pids))
    assert not any(map(is_alive, pids))
    assert hosted.status.state == "stopped"


async def test_leaving_while_starting_does_not_wait() -> None:
    with anyio.fail_after(5):
        async with engine("never_ready") as hosted:
            await until(lambda: hosted.status.detail == "warming up the fake")


async def test_a_start_that_is_no_use_is_not_repeated() -> None:
    async with engine("fatal") as hosted:
        with anyio.fail_after(10), pytest.raises(EngineFailed, match="--frobnicate"):
            await hosted.wait_ready()
        assert hosted.status.state == "dead"
        assert hosted.status.num_restarts == 0


async def test_settings_that_the_engine_refuses_are_told_from_other_faults() -> None:
    async with engine("misconfigured") as hosted:
        with anyio.fail_after(10), pytest.raises(EngineMisconfigured, match="--block-size"):
            await hosted.wait_ready()


async def test_failing_starts_are_given_up_and_say_why() -> None:
    async with engine("crash_at_start", max_start_attempts=2) as hosted:
        with anyio.fail_after(10), pytest.raises(EngineFailed, match="model folder is empty"):
            await hosted.wait_ready()
        assert hosted.status.num_restarts == 1


async def test_a_start_that_takes_too_long_fails() -> None:
    async with engine("never_ready", start_timeout_s=0.3, max_start_attempts=1) as hosted:
        with anyio.fail_after(10), pytest.raises(EngineFailed, match="not ready within"):
            await hosted.wait_ready()


async def test_a_command_that_does_not_exist_is_reported() -> None:
    config = HostConfig({}, command=("/nonexistent/host",), max_start_attempts=1)
    async with HostedEngine(config) as hosted:
        with anyio.fail_after(10), pytest.raises(EngineFailed, match="cannot be run"):
            await hosted.wait_ready()


async def test_a_host_that_talks_nonsense_is_dead() -> None:
    async with engine("garbage", max_start_attempts=1) as hosted:
        with anyio.fail_after(10), pytest.raises(EngineFailed, match="impossible message"):
            await hosted.wait_ready()


async def test_a_refusal_is_the_requests_fault_and_the_engine_lives() -> None:
    async with engine("refuse") as hosted:
        await ready(hosted)
        sink = Sink()
        hosted.submit(generation(), sink)
        error = (await sink.ended()).error
        assert isinstance(error, InvalidRequest)
        assert (error.message, error.param) == ("bad regex", "structured")
        assert hosted.status.state == "ready"
        assert hosted.num_live == 0


async def test_a_failed_generation_is_the_engines_fault_and_the_engine_lives() -> None:
    async with engine("fail") as hosted:
        await ready(hosted)
        sink = Sink()
        hosted.submit(generation(), sink)
        assert isinstance((await sink.ended()).error, EngineFailed)
        assert hosted.status.state == "ready"


async def test_numbers_that_fit_no_message_are_refused_at_once() -> None:
    async with engine("echo") as hosted:
        await ready(hosted)
        huge = Generation("g", [1], SamplingParams(max_tokens=1, seed=2**70))
        with pytest.raises(InvalidRequest):
            hosted.submit(huge, Sink())
        assert hosted.num_live == 0


async def test_aborted_generations_are_forgotten_on_both_sides() -> None:
    async with engine("hold") as hosted:
        await ready(hosted)
        sinks = {name: Sink() for name in "abc"}
        for name, sink in sinks.items():
            hosted.submit(generation(name), sink)
        await until(lambda: hosted.stats.running == 3)
        hosted.abort("a")
        hosted.abort("b")
        hosted.abort("a")
        hosted.abort("never heard of")
        assert hosted.num_live == 1
        await until(lambda: hosted.stats.running == 1)
    assert sinks["a"].error is None
    assert isinstance(sinks["c"].error, EngineFailed)


async def test_an_id_may_be_used_again_after_its_abort() -> None:
    async with engine("echo") as hosted:
        await ready(hosted)
        aborted, second = Sink(), Sink()
        hosted.submit(generation("same"), aborted)
        hosted.abort("same")
        hosted.submit(generation("same", (4, 5)), second)
        assert (await second.ended()).token_ids == [4, 5]
        assert aborted.token_ids == []


async def test_a_broken_sink_harms_no_other() -> None:
    class Broken(Sink):
        def on_delta(self, delta: TokenDelta) -> None:
            raise RuntimeError("a bug")

    async with engine("echo") as hosted:
        await ready(hosted)
        good = Sink()
        hosted.submit(generation("bad"), Broken())
        hosted.submit(generation("good"), good)
        assert (await good.ended()).token_ids == [1, 2, 3]
        assert hosted.num_live == 0


async def test_draining_takes_nothing_new_and_waits_for_what_runs() -> None:
    async with engine("hold") as hosted:
        await ready(hosted)
        hosted.submit(generation("running"), Sink())
        async with anyio.create_task_group() as tasks:
            drained = anyio.Event()

            async def drain() -> None:
                await hosted.drain()
                drained.set()

            tasks.start_soon(drain)
            await until(lambda: hosted.status.state == "draining")
            with pytest.raises(EngineUnavailable, match="draining"):
                hosted.submit(generation("new"), Sink())
            assert not drained.is_set()
            hosted.abort("running")
            with anyio.fail_after(5):
                await drained.wait()


async def test_log_lines_reach_their_reader() -> None:
    lines: list[str] = []
    config = HostConfig(
        {"mode": "crash_at_start"},
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        command=(sys.executable, str(FAKE_HOST)),
        max_start_attempts=1,
    )
    async with HostedEngine(config, on_line=lines.append) as hosted:
        with pytest.raises(EngineFailed):
            await hosted.wait_ready()
    assert "ValueError: the model folder is empty" in lines
