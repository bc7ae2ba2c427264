"""Standard output for the answer alone, and what becomes of one that takes no answer."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class OutputFailed(Exception):
    """Standard output is closed, or full."""


@contextmanager
def clean_stdout() -> Iterator[None]:
    """Nothing that native code writes inside gets to standard output (HiGHS greets whom it serves).

    What Python prints inside is lost as well.
    """
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
        sys.stdout.flush()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def check_stdout() -> None:
    """Raises OutputFailed if standard output is closed, and its place free for another file."""
    if sys.stdout is None:
        raise OutputFailed("standard output is closed")


@contextmanager
def answering() -> Iterator[None]:
    """What is printed inside arrives. Raises OutputFailed if it does not, and SystemExit(1) where
    its reader wants no more (`| head`)."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_output()
        raise SystemExit(1) from None
    except OSError as error:
        _forget_output()
        reason = (error.strerror or "it failed").lower()
        raise OutputFailed(f"standard output cannot be written: {reason}") from None


def _forget_output() -> None:
    """What is still buffered must not fail again when the interpreter ends."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
