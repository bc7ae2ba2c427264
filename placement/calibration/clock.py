"""Time on a machine that others use as well."""

from __future__ import annotations

import time
from pathlib import Path

_SCHEDULER = Path("/proc/thread-self/schedstat")


def waiting_s() -> float:
    """How long this thread has waited for a core so far, in seconds; 0 where nobody counts it.

    Linux: the second number of schedstat, in nanoseconds.
    """
    try:
        return int(_SCHEDULER.read_bytes().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def busy_s() -> float:
    """A clock that stands still while this thread waits for a core; only differences count.

    What an operation's other threads wait is not taken off: with several, it errs to the long side.
    """
    return time.perf_counter() - waiting_s()
