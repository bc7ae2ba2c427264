"""Ending everything that one engine host started, and what it leaves in shared memory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

# vLLM's message queues and the shared buffers of its CPU tensor parallel groups.
_SHARED_MEMORY = re.compile(r"/dev/shm/(?:psm_\w+|\S*cpushm\S*|sem\.mp-\w+)")


def session_members(session_id: int) -> list[int]:
    """Pids of the living processes of a session. A host leads one of its own."""
    return [pid for pid in _all_pids() if _session_of(pid) == session_id]


def kill_session(session_id: int, *, known_shared_memory: Iterable[str] = ()) -> None:
    """Kill every process of a session and remove the shared memory files that only it used."""
    members = session_members(session_id)
    files = set(known_shared_memory) | shared_memory_of(members)
    for pid in members:
        _kill(pid)
    for pid in session_members(session_id):
        _kill(pid)
    _remove_unused(files, except_by=set(members))


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """vLLM's shared memory files that these processes have mapped."""
    return {path for pid in pids for path in _SHARED_MEMORY.findall(_maps(pid))}


def _remove_unused(files: set[str], *, except_by: set[int]) -> None:
    if not files:
        return
    in_use = shared_memory_of(pid for pid in _all_pids() if pid not in except_by)
    for path in files - in_use:
        Path(path).unlink(missing_ok=True)


def _all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return ""
