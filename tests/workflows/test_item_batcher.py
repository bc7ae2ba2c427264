"""Items of many callers in common batches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import anyio
import pytest
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from tests.workflows.pooling_fakes import Runs, real_slots
from workflows.errors import NodeFailed
from workflows.item_batcher import ItemBatcher
from workflows.pooling import BadItem
from workflows.scheduling.messages import CapacityChanged

pytestmark = pytest.mark.anyio


class Worker:
    """Doubles numbers. Waits at `gate`; refuses the negative ones, in its own ways."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = anyio.Event()
        self.gate.set()
        self.num_cancelled = 0
        self.names_the_bad = True
        self.is_down = False
        self.is_broken = False

    def close_gate(self) -> None:
        self.gate = anyio.Event()

    async def __call__(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        try:
            await self.gate.wait()
        except BaseException:
            self.num_cancelled += 1
            raise
        if self.is_broken:
            raise RuntimeError("a bug")
        if self.is_down:
            raise NodeFailed("down", code="down", is_retryable=True)
        for index, item in enumerate(items):
            if item < 0:
                failure = NodeFailed(f"{item} is bad", code="bad", is_retryable=False)
                raise BadItem(index, failure) if self.names_the_bad else failure
        return [2 * item for item in items]


@pytest.fixture
async def group() -> AsyncIterator[TaskGroup]:
    async with anyio.create_task_group() as group:
        yield group
        group.cancel_scope.cancel()


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
async def runs() -> AsyncIterator[Runs]:
    """A batch of up to eight at a time."""
    embed = CapacityChanged(resource="embed", num_slots=1, max_batch=8)
    async with real_slots(resources=[embed]) as runs:
        yield runs


@pytest.fixture
def batcher(worker: Worker) -> ItemBatcher[int, int]:
    return ItemBatcher(worker, resource="embed", profile="embed:worker", chars=lambda _: 1)


Outcome = list[int] | str


class Callers:
    """Concurrent callers, and what each got."""

    def __init__(self, batcher: ItemBatcher[int, int], group: TaskGroup, runs: Runs) -> None:
        self._batcher = batcher
        self._runs = runs
        self._group = group
        self.outcomes: dict[str, Outcome] = {}
        self.shared: dict[str, int] = {}
        self.on_outcome: dict[str, Callable[[], None]] = {}

    def start(self, name: str, *items: int, tenant: str = "t") -> anyio.CancelScope:
        scope = anyio.CancelScope()

        async def call() -> None:
            with scope, self._runs.job(tenant, resources=("embed",)) as job:
                try:
                    answers = await self._batcher.submit(job, tenant, items)
                except NodeFailed as failure:
                    self.outcomes[name] = failure.code
                else:
                    self.outcomes[name] = [one.value for one in answers]
                    self.shared[name] = sum(one.is_shared for one in answers)
                    self.on_outcome.get(name, lambda: None)()

        self._group.start_soon(call)
        return scope

    async def wait(self, *names: str) -> None:
        with anyio.fail_after(5):
            while not set(names) <= set(self.outcomes):
                await checkpoint()


@pytest.fixture
def callers(batcher: ItemBatcher[int, int], group: TaskGroup, runs: Runs) -> Callers:
    return Callers(batcher, group, runs)


async def until_running(worker: Worker, num_batches: int) -> None:
    with anyio.fail_after(5):
        while len(worker.batches) < num_batches:
            await checkpoint()


async def test_calls_of_one_moment_are_one_batch(worker: Worker, callers: Callers) -> None:
    for number in range(4):
        callers.start(str(number), number, number + 10)
    await callers.wait("0", "1", "2", "3")
    assert worker.batches == [[0, 10, 1, 11, 2, 12, 3, 13]]
    assert callers.outcomes == {str(number): [2 * number, 2 * number + 20] for number in range(4)}


async def test_a_batch_is_no_larger_than_allowed(
    worker: Worker, callers: Callers, batcher: ItemBatcher[int, int]
) -> None:
    callers.start("many", *range(30))
    await callers.wait("many")
    assert [len(one) for one in worker.batches] == [8, 8, 8, 6]
    assert callers.outcomes["many"] == [2 * number for number in range(30)]
    assert (batcher.statistics.num_items, batcher.statistics.num_batches) == (30, 4)


async def test_what_comes_while_a_batch_runs_gathers(worker: Worker, callers: Callers) -> None:
    worker.close_gate()
    callers.start("first", 1)
    await until_running(worker, 1)
    for number in range(2, 6):
        callers.start(str(number), number)
    worker.gate.set()
    await callers.wait("first", "2", "3", "4", "5")
    assert worker.batches == [[1], [2, 3, 4, 5]]


async def test_a_long_call_lets_a_short_one_between(
    worker: Worker, callers: Callers, runs: Runs
) -> None:
    worker.close_gate()
    callers.start("long", *range(100, 200))
    await until_running(worker, 1)
    callers.start("short", 1)
    with anyio.fail_after(5):
        while runs.slots.statistics()["embed"].num_queued_items < 93:  # eight of them run
            await checkpoint()
    await anyio.sleep(0.02)  # work that takes no time at all has no order
    worker.gate.set()
    await callers.wait("long", "short")
    assert 1 in worker.batches[1]


async def test_equal_items_in_flight_are_computed_once(
    worker: Worker, callers: Callers, batcher: ItemBatcher[int, int]
) -> None:
    worker.close_gate()
    callers.start("a", 1, 2, 1)
    await until_running(worker, 1)
    callers.start("b", 2, 3)
    await checkpoint()
    worker.gate.set()
    await callers.wait("a", "b")
    assert worker.batches == [[1, 2], [3]]
    assert callers.outcomes == {"a": [2, 4, 2], "b": [4, 6]}
    assert sum(callers.shared.values()) == batcher.statistics.num_shared == 2
    assert (batcher.statistics.num_items, batcher.statistics.num_computed) == (5, 3)


async def test_nothing_is_kept_that_is_not_in_flight(worker: Worker, callers: Callers) -> None:
    callers.start("a", 1)
    await callers.wait("a")
    callers.start("b", 1)
    await callers.wait("b")
    assert worker.batches == [[1], [1]]
    assert callers.shared == {"a": 0, "b": 0}


async def test_tenants_share_batches_but_no_item(worker: Worker, callers: Callers) -> None:
    callers.start("mine", 1, 2, tenant="mine")
    callers.start("yours", 2, 1, tenant="yours")
    await callers.wait("mine", "yours")
    assert worker.batches == [[1, 2, 2, 1]]
    assert callers.shared == {"mine": 0, "yours": 0}


@pytest.mark.parametrize("names_the_bad", [True, False])
async def test_a_bad_item_fails_only_those_who_asked_for_it(
    worker: Worker, callers: Callers, names_the_bad: bool
) -> None:
    worker.names_the_bad = names_the_bad
    callers.start("good", 1, 2)
    callers.start("bad", 3, -4)
    callers.start("bad too", -4)
    callers.start("fine", 3, 5)
    await callers.wait("good", "bad", "bad too", "fine")
    assert callers.outcomes == {"good": [2, 4], "bad": "bad", "bad too": "bad", "fine": [6, 10]}


async def test_a_model_that_is_down_fails_all_at_once(worker: Worker, callers: Callers) -> None:
    worker.is_down = True
    callers.start("a", 1, 2)
    callers.start("b", 3)
    await callers.wait("a", "b")
    assert callers.outcomes == {"a": "down", "b": "down"}
    assert len(worker.batches) == 1


async def test_a_bug_ends_the_batch_and_not_the_batcher(worker: Worker, callers: Callers) -> None:
    worker.is_broken = True
    callers.start("a", 1)
    await callers.wait("a")
    worker.is_broken = False
    callers.start("b", 1)
    await callers.wait("b")
    assert callers.outcomes == {"a": "internal_error", "b": [2]}


async def test_who_leaves_takes_nobodys_items_along(worker: Worker, callers: Callers) -> None:
    worker.close_gate()
    leaver = callers.start("leaver", 1, 2)
    callers.start("stayer", 2, 3)
    await until_running(worker, 1)
    leaver.cancel()
    await checkpoint()
    callers.start("joiner", 1)
    await anyio.sleep(0.005)
    worker.gate.set()
    await callers.wait("stayer", "joiner")
    assert worker.batches == [[1, 2, 3]]
    assert worker.num_cancelled == 0
    assert "leaver" not in callers.outcomes
    assert callers.shared["joiner"] == 0  # the one that it was computed for has gone


async def test_who_leaves_as_the_batch_ends_is_not_charged(
    worker: Worker, callers: Callers
) -> None:
    worker.close_gate()
    callers.start("first", 1)
    callers.start("second", 1)
    callers.start("third", 1)
    leaver = callers.start("leaver", 2)
    callers.start("stayer", 2)
    callers.on_outcome["first"] = leaver.cancel
    await until_running(worker, 1)
    worker.gate.set()
    await callers.wait("third", "stayer")
    assert worker.batches == [[1, 2]]  # what more of them wait for goes first
    assert callers.shared == {"first": 0, "second": 1, "third": 1, "stayer": 0}


async def test_a_batch_that_nobody_waits_for_is_stopped(worker: Worker, callers: Callers) -> None:
    worker.close_gate()
    scopes = [callers.start("a", 1, 2), callers.start("b", 2)]
    await until_running(worker, 1)
    for scope in scopes:
        scope.cancel()
    while not worker.num_cancelled:
        await checkpoint()
    worker.gate.set()
    callers.start("c", 1)
    await callers.wait("c")
    assert worker.batches == [[1, 2], [1]]


async def test_who_joins_a_stopped_batch_is_computed_anew(worker: Worker, callers: Callers) -> None:
    worker.close_gate()
    scope = callers.start("a", 1)
    await until_running(worker, 1)
    scope.cancel()
    callers.start("b", 1)  # before the cancellation has reached the batch
    await until_running(worker, 2)
    worker.gate.set()
    await callers.wait("b")
    assert callers.outcomes == {"b": [2]}


async def test_what_has_not_begun_is_taken_back(worker: Worker, callers: Callers) -> None:
    worker.close_gate()
    callers.start("running", 1)
    await until_running(worker, 1)
    scope = callers.start("waiting", 2)
    await checkpoint()
    await checkpoint()
    scope.cancel()
    callers.start("other", 3)
    worker.gate.set()
    await callers.wait("running", "other")
    assert worker.batches == [[1], [3]]
