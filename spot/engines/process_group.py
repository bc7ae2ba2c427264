"""Ending everything that one engine host started, and what it leaves in shared memory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import anyio

_MAX_DYING_S = 5.0

# vLLM's message queues and the shared buffers of its CPU tensor parallel groups.
_SHARED_MEMORY = re.compile(r"/dev/shm/(?:psm_\w+|\S*cpushm\S*|sem\.mp-\w+)")


def session_members(session_id: int) -> list[int]:
    """Pids of the living processes of a session. A host leads one of its own."""
    return [pid for pid in _all_pids() if _session_of(pid) == session_id and _is_living(pid)]


async def kill_session(
    session_id: int, *, known_pids: Iterable[int] = (), known_shared_memory: Iterable[str] = ()
) -> None:
    """Kill every process of a session, and remove the shared memory files that only it used.

    known_pids, known_shared_memory: what the session had while it was well; some of its processes
        may be dead already.
    Returns when all are dead, or will not die (one that waits for a broken disk, say).
    """
    files = set(known_shared_memory)
    killed: set[int] = set()
    with anyio.move_on_after(_MAX_DYING_S):
        while members := session_members(session_id):
            files |= shared_memory_of(members)
            for pid in members:
                _kill(pid)
            killed.update(members)
            await anyio.sleep(0.01)
    dead = (pid for pid in killed | set(known_pids) if not _is_living(pid))
    files.update(path for pid in dead for path in _semaphores_of(pid))
    _remove_unused(files)


def describe_exit(code: int) -> str:
    """How a process ended, by the exit code that Python's process objects give."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """vLLM's shared memory files that these processes have mapped."""
    return {path for pid in pids for path in _SHARED_MEMORY.findall(_maps(pid))}


def _semaphores_of(pid: int) -> list[str]:
    """Named semaphores of a library that puts its pid into the name."""
    return [str(path) for path in Path("/dev/shm").glob(f"sem.loky-{pid}-*")]


def _remove_unused(files: set[str]) -> None:
    if not files:
        return
    for path in files - shared_memory_of(_all_pids()):
        Path(path).unlink(missing_ok=True)


def _all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _is_living(pid: int) -> bool:
    """Whether a process is more than an entry that its parent has not read yet.

    A first thread that is gone is such an entry as well, while others still hold the memory.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state not in "ZX" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return ""
