"""Calls that end in time, whatever they wait for."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def call_within(timeout_s: float, call: Callable[[], T]) -> T:
    """What `call()` returns or raises, or TimeoutError after `timeout_s`.

    A thread bears the wait and is left behind, because no client's timeout covers a name server
    that is silent. So this is for start-up, not for serving.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised in the caller below
            errors.append(error)

    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer in {timeout_s:g} s")
    return results[0]
