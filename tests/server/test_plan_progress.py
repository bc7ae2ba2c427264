"""Progress on standard error, on a terminal and in a log."""

from __future__ import annotations

import io
import threading

from server.plan_progress import progress


class Stream(io.StringIO):
    """Says when a text has been written twice."""

    def __init__(self, *, is_terminal: bool, until: str = "never") -> None:
        super().__init__()
        self.is_terminal, self.until = is_terminal, until
        self.has_enough = threading.Event()

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count(self.until) >= 2:
            self.has_enough.set()
        return written


def test_a_log_gets_the_latest_line_again_and_again() -> None:
    stream = Stream(is_terminal=False, until="best so far 3 (0 s)\n")
    with progress(stream, period_s=0.001, now_s=lambda: 20.0) as say:
        say("best so far 3")
        assert stream.has_enough.wait(10)
    assert set(stream.getvalue().splitlines()) <= {"searching (0 s)", "best so far 3 (0 s)"}


def test_a_short_search_says_nothing_in_a_log() -> None:
    stream = Stream(is_terminal=False)
    with progress(stream) as say:
        say("best so far 3")
    assert stream.getvalue() == ""


def test_a_terminal_shows_at_once_that_it_searches_and_is_cleared_in_the_end() -> None:
    stream = Stream(is_terminal=True)
    with progress(stream, period_s=60.0, now_s=lambda: 5.0) as say:
        assert stream.getvalue() == "\r\x1b[2Ksearching (0 s)"
        say("x" * 200)
    assert stream.getvalue() == f"\r\x1b[2Ksearching (0 s)\r\x1b[2K{'x' * 100} (0 s)\r\x1b[2K"
    assert "plan progress" not in {thread.name for thread in threading.enumerate()}
