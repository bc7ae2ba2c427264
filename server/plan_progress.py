"""How far a search is, on standard error, while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from server.plan_search import Say

# A line that changes on a terminal; lines in a log elsewhere.
_TERMINAL_PERIOD_S, _LOG_PERIOD_S = 1.0, 10.0
_MOST_CHARACTERS = 100
_CLEAR = "\r\x1b[2K"


@contextmanager
def progress(
    stream: TextIO,
    *,
    period_s: float | None = None,
    now_s: Callable[[], float] = time.monotonic,
) -> Iterator[Say]:
    """Takes lines of progress, and shows the latest with the seconds since the beginning.

    On a terminal at once and every second, cleared at the end; elsewhere every ten seconds, so that
    a short search says nothing. period_s: instead of these.
    """
    is_terminal = stream.isatty()
    started_s, ended = now_s(), threading.Event()
    latest = "searching"

    def show() -> None:
        line = f"{latest[:_MOST_CHARACTERS]} ({now_s() - started_s:.0f} s)"
        print(f"{_CLEAR}{line}" if is_terminal else f"{line}\n", end="", file=stream, flush=True)

    def say(line: str) -> None:
        nonlocal latest
        latest = line
        if is_terminal:
            show()

    def keep_showing() -> None:
        while not ended.wait(period_s or (_TERMINAL_PERIOD_S if is_terminal else _LOG_PERIOD_S)):
            show()

    ticker = threading.Thread(target=keep_showing, name="plan progress", daemon=True)
    say(latest)
    ticker.start()
    try:
        yield say
    finally:
        ended.set()
        ticker.join()
        if is_terminal:
            print(_CLEAR, end="", file=stream, flush=True)
