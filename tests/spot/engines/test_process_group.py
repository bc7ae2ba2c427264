"""Ending whole sessions, and what they leave in shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from spot.engines.process_group import kill_session, session_members, shared_memory_of

pytestmark = pytest.mark.anyio

_MAPS_A_FILE = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    held = mmap.mmap(file.fileno(), 4096)
print("ready", flush=True)
time.sleep(600)
"""

_ENDS_ITS_FIRST_THREAD = """
import ctypes, threading, time
threading.Thread(target=lambda: (print("ready", flush=True), time.sleep(600))).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.fixture
def shared_file() -> Iterator[Path]:
    path = Path(f"/dev/shm/psm_test{os.getpid()}")
    path.write_bytes(bytes(4096))
    yield path
    path.unlink(missing_ok=True)


def start(*command: str) -> subprocess.Popen[bytes]:
    """A process in a session of its own."""
    return subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)


def start_mapper(path: Path) -> subprocess.Popen[bytes]:
    process = start(sys.executable, "-c", _MAPS_A_FILE, str(path))
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def is_there(path: Path | str) -> bool:
    return os.path.exists(path)


def is_zombie(pid: int) -> bool:
    return " Z " in Path(f"/proc/{pid}/stat").read_text()


def end(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


async def test_every_member_of_the_session_is_killed() -> None:
    shell = start("bash", "-c", "sleep 600 & echo $!; wait")
    assert shell.stdout is not None
    child = int(shell.stdout.readline())
    assert {shell.pid, child} <= set(session_members(shell.pid))
    await kill_session(shell.pid)
    assert session_members(shell.pid) == []
    assert shell.wait(5) == -9
    end(shell)


async def test_a_process_lives_as_long_as_any_of_its_threads() -> None:
    process = start(sys.executable, "-c", _ENDS_ITS_FIRST_THREAD)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    while not is_zombie(process.pid):  # noqa: ASYNC110 - a thread's end has no event here
        await anyio.sleep(0.001)
    assert session_members(process.pid) == [process.pid]
    await kill_session(process.pid)
    assert process.wait(5) == -9
    end(process)


async def test_what_only_the_dead_used_is_removed(shared_file: Path) -> None:
    process = start_mapper(shared_file)
    assert shared_memory_of([process.pid]) == {str(shared_file)}
    await kill_session(process.pid)
    end(process)
    assert not is_there(shared_file)


async def test_what_the_living_use_stays(shared_file: Path) -> None:
    dead, living = start_mapper(shared_file), start_mapper(shared_file)
    await kill_session(dead.pid)
    assert is_there(shared_file)
    end(dead, living)


async def test_semaphores_named_after_the_dead_are_removed() -> None:
    sleeper = start("sleep", "600")
    semaphore = f"/dev/shm/sem.loky-{sleeper.pid}-test"
    os.close(os.open(semaphore, os.O_CREAT))
    end(sleeper)
    await kill_session(sleeper.pid)
    assert is_there(semaphore), "nobody said that it was of that session"
    await kill_session(sleeper.pid, known_pids=[sleeper.pid])
    assert not is_there(semaphore)
