"""One life of a host process, from the outside: what it leaves behind, and what is said of it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from spot.engines import host_process
from spot.engines.codec import ToGateway
from spot.engines.host_process import HostConfig, HostProcess

pytestmark = pytest.mark.anyio


SLEEPS = ("bash", "-c", "exec sleep 600")


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def host(*command: str, **options: Any) -> HostProcess:
    def on_message(message: ToGateway) -> None:
        raise AssertionError(f"nobody speaks here: {message}")

    return HostProcess(
        HostConfig(options.pop("engine_args", {}), command=command, **options),
        on_message=on_message,
        on_line=print,
    )


async def test_a_cancelled_spawn_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    open_process = anyio.open_process
    spawned = anyio.Event()
    pids: list[int] = []

    async def slow_open_process(*args: Any, **options: Any) -> Any:
        process = await open_process(*args, **options)
        pids.append(process.pid)
        spawned.set()
        await anyio.lowlevel.checkpoint()
        return process

    monkeypatch.setattr(anyio, "open_process", slow_open_process)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(host(*SLEEPS).run)
        await spawned.wait()
        tasks.cancel_scope.cancel()
    (pid,) = pids
    was_left = is_there(pid)
    if was_left:
        os.kill(pid, signal.SIGKILL)  # or closing the event loop would wait for it
    assert not was_left


async def test_an_exit_before_the_arguments_are_read_is_told_as_it_is() -> None:
    exits = "import os; os.close(0); raise OSError('no libtorch')"
    much = {"text": "x" * 1_000_000}
    with anyio.fail_after(10):
        death = await host(sys.executable, "-c", exits, engine_args=much).run()
    assert death.message == "the engine host exited with code 1 (OSError: no libtorch)"


async def test_a_host_that_never_reads_its_arguments_is_given_up() -> None:
    much = {"text": "x" * 1_000_000}
    with anyio.fail_after(10):
        death = await host(*SLEEPS, engine_args=much, start_timeout_s=0.2).run()
    assert "not ready within" in death.message


async def test_a_process_that_will_not_die_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []

    async def kill_in_vain(session_id: int, **options: Any) -> None:
        left.append(session_id)

    monkeypatch.setattr(host_process, "kill_session", kill_in_vain)
    try:
        with anyio.fail_after(20):
            death = await host(*SLEEPS, start_timeout_s=0.2).run()
    finally:
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # or closing the event loop would wait for it
            while is_there(pid):  # noqa: ASYNC110 - a process's end has no event here
                await anyio.sleep(0.005)
    assert "not ready within" in death.message
