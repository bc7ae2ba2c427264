from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from tests.workflows.pooling_fakes import FreeJob
from workflows.errors import NodeFailed
from workflows.operators.base import NodeResult
from workflows.shared_work import Emit, Shared, SharedWork

pytestmark = pytest.mark.anyio


class Bench:
    """Work that ends when it is told, and its subscribers."""

    def __init__(self, tasks: TaskGroup, **limits: Any) -> None:
        self.shared = SharedWork(**limits)
        self.tasks = tasks
        self.may_end = anyio.Event()
        self.error: NodeFailed | None = None
        self.may_be_kept = True
        self.on_end: Callable[[], None] = lambda: None
        self.emit: Emit | None = None
        self.num_stopped = 0
        self.outcomes: dict[str, Shared | NodeFailed] = {}
        self.heard: dict[str, str] = {}
        self.scopes: dict[str, anyio.CancelScope] = {}

    async def work(self, emit: Emit) -> NodeResult:
        self.emit = emit
        try:
            await self.may_end.wait()
        except anyio.get_cancelled_exc_class():
            self.num_stopped += 1
            raise
        self.on_end()
        if self.error is not None:
            raise self.error
        return NodeResult(output={"n": 1}, may_be_kept=self.may_be_kept)

    async def ask(self, name: str, *, key: str = "k", ttl_s: float | None = None) -> None:
        self.scopes[name] = anyio.CancelScope()
        self.heard[name] = ""

        async def subscribe() -> None:
            with self.scopes[name]:
                try:
                    result, shared = await self.shared.result(
                        key,
                        self.work,
                        job=FreeJob(),  # type: ignore[arg-type]
                        emit=hear,
                        ttl_s=ttl_s,
                        tasks=self.tasks,
                    )
                    assert result.output == {"n": 1}
                    self.outcomes[name] = shared
                except NodeFailed as error:
                    self.outcomes[name] = error

        def hear(text: str) -> None:
            self.heard[name] += text

        self.tasks.start_soon(subscribe)
        await anyio.wait_all_tasks_blocked()

    async def leave(self, name: str) -> None:
        self.scopes[name].cancel()
        await anyio.wait_all_tasks_blocked()

    async def end(self) -> None:
        self.may_end.set()
        await anyio.wait_all_tasks_blocked()
        assert self.shared.num_running == 0


@pytest.fixture
async def tasks() -> AsyncIterator[TaskGroup]:
    async with anyio.create_task_group() as group:
        yield group
        group.cancel_scope.cancel()


async def test_equal_work_is_done_once(tasks: TaskGroup) -> None:
    bench = Bench(tasks)
    for name in "abc":
        await bench.ask(name)
    await bench.ask("other", key="other")
    await bench.end()
    assert bench.outcomes == {"a": "none", "b": "inflight", "c": "inflight", "other": "none"}
    assert bench.shared.num_executed == 2


async def test_the_first_may_leave_and_the_others_get_the_result(tasks: TaskGroup) -> None:
    bench = Bench(tasks)
    for name in "abc":
        await bench.ask(name)
    await bench.leave("a")
    assert bench.num_stopped == 0
    await bench.end()
    # The next one accounts for the work.
    assert bench.outcomes == {"b": "none", "c": "inflight"}


async def test_who_leaves_as_the_work_ends_does_not_account_for_it(tasks: TaskGroup) -> None:
    bench = Bench(tasks)
    await bench.ask("a")
    await bench.ask("b")
    bench.on_end = bench.scopes["a"].cancel
    await bench.end()
    assert bench.outcomes == {"b": "none"}


async def test_only_the_last_to_leave_stops_the_work(tasks: TaskGroup) -> None:
    bench = Bench(tasks)
    await bench.ask("a")
    await bench.ask("b")
    await bench.leave("b")
    assert bench.num_stopped == 0
    await bench.leave("a")
    assert bench.num_stopped == 1
    assert bench.shared.num_running == 0


async def test_nobody_waits_for_work_that_is_being_stopped(tasks: TaskGroup) -> None:
    bench = Bench(tasks)
    await bench.ask("a")
    bench.scopes["a"].cancel()
    await bench.ask("b")
    await bench.end()
    assert bench.outcomes == {"b": "none"}
    assert bench.shared.num_executed == 2


async def test_a_failure_is_everybodys_and_the_next_try_is_new(tasks: TaskGroup) -> None:
    bench = Bench(tasks)
    bench.error = NodeFailed("no", code="busy", is_retryable=True)
    await bench.ask("a")
    await bench.ask("b")
    await bench.end()
    for name in "ab":
        error = bench.outcomes[name]
        assert isinstance(error, NodeFailed)
        assert (error.code, error.is_retryable) == ("busy", True)
    bench.error = None
    await bench.ask("c")
    assert bench.outcomes["c"] == "none"


async def test_whoever_comes_late_hears_all(tasks: TaskGroup) -> None:
    bench = Bench(tasks)
    await bench.ask("a")
    assert bench.emit is not None
    bench.emit("one ")
    bench.emit("two ")
    await bench.ask("b", ttl_s=60)
    bench.emit("three")
    await bench.end()
    await bench.ask("c", ttl_s=60)
    assert bench.outcomes["c"] == "cache"
    assert bench.heard == dict.fromkeys("abc", "one two three")


async def test_a_result_is_kept_only_where_that_was_asked_for(tasks: TaskGroup) -> None:
    bench = Bench(tasks)
    await bench.ask("a")
    await bench.end()
    assert bench.shared.num_bytes == 0
    await bench.ask("b", ttl_s=60)
    await bench.ask("c", ttl_s=60)
    await bench.ask("d")
    assert bench.outcomes == {"a": "none", "b": "none", "c": "cache", "d": "none"}


async def test_what_is_cut_or_failed_is_not_kept(tasks: TaskGroup) -> None:
    bench = Bench(tasks)
    bench.may_be_kept = False
    await bench.ask("a", ttl_s=60)
    await bench.end()
    assert bench.shared.num_bytes == 0
    bench.error = NodeFailed("no", code="x", is_retryable=False)
    await bench.ask("b", ttl_s=60)
    assert bench.shared.num_bytes == 0


async def test_a_result_that_is_too_old_is_not_used(tasks: TaskGroup) -> None:
    bench = Bench(tasks)
    bench.may_end.set()
    await bench.ask("a", ttl_s=60)
    await anyio.sleep(0.02)
    await bench.ask("b", ttl_s=0.01)
    assert bench.outcomes["b"] == "none"


async def test_results_are_kept_within_bounds(tasks: TaskGroup) -> None:
    bench = Bench(tasks, max_bytes=1200)
    bench.may_end.set()
    for key in ("a", "b", "a", "c"):
        await bench.ask(f"{key}{len(bench.outcomes)}", key=key, ttl_s=60)
    assert bench.shared.num_bytes <= 1200
    # `b` was used longest ago.
    await bench.ask("again a", key="a", ttl_s=60)
    await bench.ask("again b", key="b", ttl_s=60)
    assert (bench.outcomes["again a"], bench.outcomes["again b"]) == ("cache", "none")


async def test_what_is_larger_than_all_room_is_not_kept(tasks: TaskGroup) -> None:
    bench = Bench(tasks, max_bytes=100)
    bench.may_end.set()
    await bench.ask("a", ttl_s=60)
    assert bench.shared.num_bytes == 0
