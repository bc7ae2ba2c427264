from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup

from tests.workflows.pooling_fakes import FreeJob
from workflows.errors import NodeFailed
from workflows.job import NodeKey
from workflows.operators.base import NodeResult
from workflows.shared_work import Emit, SharedWork, Source

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
        self.outcomes: dict[str, Source | NodeFailed] = {}
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

    async def ask(
        self,
        name: str,
        *,
        key: str = "k",
        ttl_s: float | None = None,
        is_pure: bool = False,
        run_id: str | None = None,
    ) -> None:
        """run_id: by default each asks in a run of its own."""
        self.scopes[name] = anyio.CancelScope()
        self.heard[name] = ""
        job: Any = FreeJob()
        job.node = NodeKey(run_id or f"run_{name}", name)

        async def subscribe() -> None:
            with self.scopes[name]:
                try:
                    result, shared = await self.shared.result(
                        key,
                        self.work,
                        job=job,
                        emit=hear,
                        ttl_s=ttl_s,
                        is_pure=is_pure,
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


async def test_pure_work_is_found_while_a_run_that_used_it_is_active(tasks: TaskGroup) -> None:
    bench = Bench(tasks)
    await bench.ask("a", is_pure=True)
    await bench.ask("b", is_pure=True)
    await bench.end()
    bench.shared.release("run_a")
    await bench.ask("c", is_pure=True)
    bench.shared.release("run_b")
    await bench.ask("d", is_pure=True)
    assert bench.shared.num_held == 1
    for name in "cd":
        bench.shared.release(f"run_{name}")
    assert bench.shared.num_held == 0
    await bench.ask("e", is_pure=True)
    assert bench.outcomes == {
        "a": "none",
        "b": "inflight",
        "c": "held",
        "d": "held",
        "e": "none",
    }
    assert bench.shared.num_executed == 2
    assert bench.shared.num_shared == {"inflight": 1, "cache": 2}


async def test_whoever_comes_before_the_others_wake_does_not_do_it_again(
    tasks: TaskGroup,
) -> None:
    bench = Bench(tasks)
    found: list[Source] = []
    await bench.ask("a", is_pure=True)

    async def look_whenever_the_work_is_over() -> None:
        while bench.shared.num_running:
            await anyio.lowlevel.checkpoint()
        found.append(bench.shared.source("k", ttl_s=None))

    tasks.start_soon(look_whenever_the_work_is_over)
    await bench.end()
    assert found == ["held"]


async def test_who_comes_late_hears_all_of_what_is_held(tasks: TaskGroup) -> None:
    bench = Bench(tasks)
    await bench.ask("a", is_pure=True)
    assert bench.emit is not None
    bench.emit("one ")
    bench.emit("two")
    await bench.end()
    await bench.ask("b", is_pure=True)
    assert bench.heard == dict.fromkeys("ab", "one two")


async def test_who_has_left_holds_nothing(tasks: TaskGroup) -> None:
    bench = Bench(tasks)
    await bench.ask("a", is_pure=True)
    await bench.ask("b", is_pure=True)
    await bench.leave("a")
    await bench.end()
    bench.shared.release("run_b")
    assert bench.shared.num_held == 0


@pytest.mark.parametrize("is_pure", [True, False])
async def test_what_is_cut_failed_or_not_pure_is_not_held(tasks: TaskGroup, is_pure: bool) -> None:
    bench = Bench(tasks)
    bench.may_be_kept = not is_pure
    await bench.ask("a", is_pure=is_pure)
    await bench.end()
    bench.error = NodeFailed("no", code="x", is_retryable=False)
    await bench.ask("b", key="other", is_pure=True)
    assert bench.shared.num_held == 0


async def test_a_result_that_is_kept_is_held_by_who_uses_it_and_so_outlives_its_time(
    tasks: TaskGroup,
) -> None:
    bench = Bench(tasks)
    bench.may_end.set()
    await bench.ask("a", is_pure=True, ttl_s=60)
    bench.shared.release("run_a")
    await bench.ask("b", is_pure=True, ttl_s=60)
    await anyio.sleep(0.02)
    await bench.ask("c", is_pure=True, ttl_s=0.01)
    assert bench.outcomes == {"a": "none", "b": "cache", "c": "held"}
