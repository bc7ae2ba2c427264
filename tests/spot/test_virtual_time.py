"""Virtual time passes in jumps, keeps its promises about threads and files, and ends hangs."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

from spot.virtual_time import NothingToWaitFor, run_virtual


def test_sleepers_wake_in_order_of_time() -> None:
    woken: list[tuple[float, str]] = []

    async def sleeper(name: str, delay_s: float) -> None:
        await anyio.sleep(delay_s)
        woken.append((anyio.current_time(), name))

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(sleeper, "late", 3.0)
            group.start_soon(sleeper, "early", 0.5)
            group.start_soon(sleeper, "middle", 1.25)

    run_virtual(main)
    assert woken == [(0.5, "early"), (1.25, "middle"), (3.0, "late")]


def test_the_result_and_the_error_of_the_function_come_out() -> None:
    async def double(number: int) -> int:
        await anyio.sleep(1)
        return 2 * number

    async def fail() -> None:
        raise KeyError("mine")

    assert run_virtual(double, 21) == 42
    with pytest.raises(KeyError, match="mine"):
        run_virtual(fail)


def test_fifty_minutes_pass_at_once() -> None:
    async def main() -> float:
        for _ in range(3000):
            await anyio.sleep(1)
        return anyio.current_time()

    start_s = time.monotonic()
    assert run_virtual(main) == 3000.0
    assert time.monotonic() - start_s < 30


def test_days_are_no_limit() -> None:
    async def main() -> float:
        week_s = 7 * 24 * 3600.0
        await anyio.sleep(week_s)
        return anyio.current_time()

    assert run_virtual(main) == pytest.approx(7 * 24 * 3600)


def test_deadlines_are_virtual() -> None:
    async def main() -> None:
        with anyio.move_on_after(2) as scope:
            await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert anyio.current_time() == 2.0
        with pytest.raises(TimeoutError), anyio.fail_after(3):
            await anyio.sleep(4)
        assert anyio.current_time() == 5.0
        with anyio.fail_after(1):
            await anyio.sleep(0.5)
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 100)
            await anyio.sleep(1)
            group.cancel_scope.cancel()
        assert anyio.current_time() == 6.5

    run_virtual(main)


def test_without_a_wait_no_time_passes() -> None:
    async def main() -> float:
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        return anyio.current_time()

    assert run_virtual(main) == 0.0


def test_threads_take_no_virtual_time() -> None:
    async def main() -> list[float]:
        times: list[float] = []

        async def tick() -> None:
            await anyio.sleep(1)
            times.append(anyio.current_time())

        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            assert await anyio.to_thread.run_sync(lambda: time.sleep(0.02) or 5) == 5
            times.append(anyio.current_time())
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, time.sleep, 0.02)
        times.append(anyio.current_time())
        return times

    assert run_virtual(main) == [0.0, 1.0, 1.0]


def test_a_thread_that_waits_for_the_clock_it_stops_is_found() -> None:
    async def main() -> None:
        await anyio.to_thread.run_sync(
            lambda: anyio.from_thread.run(anyio.sleep, 5), abandon_on_cancel=True
        )

    with pytest.raises(NothingToWaitFor, match="a thread gave no sign"):
        run_virtual(main, max_real_wait_s=0.05)


def test_sockets_are_served() -> None:
    async def main() -> bytes:
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            threading.Timer(0.02, theirs.sendall, (b"hello",)).start()
            heard = await reader.readexactly(5)
            writer.close()
            await writer.wait_closed()
        return heard

    assert run_virtual(main) == b"hello"


def test_a_hang_is_an_error_and_tasks_are_cleaned_up() -> None:
    cleaned: list[str] = []

    async def waiter() -> None:
        try:
            await anyio.Event().wait()
        finally:
            cleaned.append("waiter")

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(waiter)
            await anyio.sleep(1)

    with pytest.raises(NothingToWaitFor, match="nothing left to wait for in virtual time"):
        run_virtual(main)
    assert cleaned == ["waiter"]


def test_a_peer_that_keeps_silent_is_a_hang() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            await asyncio.get_running_loop().sock_recv(ours, 1)

    with pytest.raises(NothingToWaitFor, match="a socket or pipe"):
        run_virtual(main, max_real_wait_s=0.05)


def test_clocks_are_not_nested() -> None:
    async def inner() -> None:
        pass

    async def main() -> None:
        with pytest.raises(RuntimeError, match="Already running asyncio"):
            run_virtual(inner)

    run_virtual(main)


def test_a_run_repeats_itself() -> None:
    async def main() -> list[tuple[float, int]]:
        seen: list[tuple[float, int]] = []

        async def worker(index: int) -> None:
            for step in range(20):
                await anyio.sleep(((index * 7 + step * 3) % 5) / 4)
                seen.append((anyio.current_time(), index))

        async with anyio.create_task_group() as group:
            for index in range(10):
                group.start_soon(worker, index)
        return seen

    assert run_virtual(main) == run_virtual(main)
