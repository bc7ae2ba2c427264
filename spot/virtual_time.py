"""Async code in virtual time: an event loop whose clock jumps to the next timer.

All time in this project comes from the running event loop, so the code that serves runs unchanged
under `run_virtual`: `anyio.sleep`, deadlines and `anyio.current_time` follow the loop's clock, and
that moves only when nothing is left to do at the present moment. It starts at 0.

- Threads of `anyio.to_thread` (with the default limiter, or one given to `VirtualLoop.watch`) and
  of `run_in_executor` take no virtual time: the clock stands still until they are done. Other
  threads are not seen.
- Sockets and pipes are served as ever. The clock does not wait for their peers: it jumps as long as
  there is a timer, and only without one is their next event awaited, in real time.
- When nothing can wake the loop any more, `NothingToWaitFor` ends it, instead of a hang.
- A run repeats itself exactly as far as its code does: anyio cancels the tasks of a group in no
  particular order, and timers due at the same moment fire in a repeatable but unsorted order.

Why not a library: looptime (pytest's clock, its idle steps follow real time), aiotools.VirtualClock
(patches a running loop; hangs go unseen), async-solipsism (GPL, refuses threads).
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

T = TypeVar("T")
Args = TypeVarTuple("Args")

# Real time that a thread or a peer may take before it counts as a hang.
MAX_REAL_WAIT_S = 60.0


class NothingToWaitFor(RuntimeError):
    """Virtual time has stopped for good: no timer, no thread and no file can wake the loop."""


def run_virtual(
    function: Callable[[*Args], Awaitable[T]],
    *args: *Args,
    max_real_wait_s: float = MAX_REAL_WAIT_S,
) -> T:
    """Run an async function in virtual time and return its result.

    Raises NothingToWaitFor if it can never end, after its tasks were cancelled. Raises RuntimeError
    inside a running event loop: two clocks cannot be nested.
    """

    async def main() -> T:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.watch(anyio.to_thread.current_default_thread_limiter())
        return await function(*args)

    options = {"loop_factory": lambda: VirtualLoop(max_real_wait_s)}
    return anyio.run(main, backend="asyncio", backend_options=options)


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio's loop with a clock that jumps. Usable as `loop_factory`, where `watch` is optional.

    Raises NothingToWaitFor out of `run_forever` and `run_until_complete`.
    """

    def __init__(self, max_real_wait_s: float = MAX_REAL_WAIT_S) -> None:
        self._clock = _JumpingSelector(self._is_thread_working, max_real_wait_s)
        self._limiters: list[anyio.CapacityLimiter] = []
        self._num_executing = 0
        super().__init__(self._clock)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._clock.now_s

    def watch(self, limiter: anyio.CapacityLimiter) -> None:
        """Let time stand still while this limiter's threads work."""
        self._limiters.append(limiter)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = super().run_in_executor(executor, func, *args)
        self._num_executing += 1
        future.add_done_callback(self._count_executed)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._num_executing += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._num_executing -= 1

    def _count_executed(self, future: asyncio.Future[Any]) -> None:
        self._num_executing -= 1

    def _is_thread_working(self) -> bool:
        return self._num_executing > 0 or any(
            limiter.borrowed_tokens > 0 for limiter in self._limiters
        )


class _JumpingSelector(selectors.DefaultSelector):
    """Where the loop would wait, the clock moves instead."""

    def __init__(self, is_thread_working: Callable[[], bool], max_real_wait_s: float) -> None:
        super().__init__()
        self.now_s = 0.0
        self._is_thread_working = is_thread_working
        self._max_real_wait_s = max_real_wait_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; if nothing is, pass `timeout` seconds of virtual time."""
        if timeout is not None and timeout <= 0:
            return super().select(0)
        if self._is_thread_working():
            return self._really_wait("a thread")
        if events := super().select(0):
            return events
        if timeout is not None:
            self.now_s += timeout
            return []
        if len(self.get_map()) > 1:  # The first is how threads wake the loop.
            return self._really_wait("a socket or pipe")
        raise NothingToWaitFor("nothing left to wait for in virtual time")

    def _really_wait(self, cause: str) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(self._max_real_wait_s)
        if not events:
            raise NothingToWaitFor(f"{cause} gave no sign for {self._max_real_wait_s} s")
        return events
