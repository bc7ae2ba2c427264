"""Jobs that ask for slots, in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Any

import anyio
import anyio.abc
import pytest

from spot.virtual_time import run_virtual
from tests.workflows.pooling_fakes import Runs, real_slots
from workflows.errors import NodeFailed
from workflows.job import Job, NodeKey
from workflows.scheduling.messages import CapacityChanged, PlannedNode, RunArrived, RunEnded, Size
from workflows.scheduling.parameters import SchedulerParameters
from workflows.tickets import ItemWork


class Desk:
    """Jobs that hold slots of `llm` for a while. log: names as they got a slot, with the time."""

    def __init__(self, runs: Runs, tasks: anyio.abc.TaskGroup) -> None:
        self.runs = runs
        self.tasks = tasks
        self.log: list[tuple[str, float]] = []
        self.ended: dict[str, str] = {}
        self.jobs: dict[str, Job] = {}

    def start(self, name: str, hold_s: float = 1.0, **options: Any) -> anyio.CancelScope:
        scope = anyio.CancelScope()

        async def work() -> None:
            self.ended[name] = "stopped"
            with scope, self.runs.job(resources=("llm",)) as job:
                self.jobs[name] = job
                try:
                    async with job.slot("llm", **options):
                        self.log.append((name, anyio.current_time()))
                        await anyio.sleep(hold_s)
                    self.ended[name] = "completed"
                except NodeFailed as failure:
                    self.ended[name] = failure.code

        self.tasks.start_soon(work)
        return scope

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.log]


def at_desk(work: Callable[[Desk], Awaitable[None]], *, num_slots: int = 1, **options: Any) -> Desk:
    """Let `work` happen in virtual time; all that it started ends, and no slot is left taken."""

    async def main() -> Desk:
        llm = CapacityChanged(resource="llm", num_slots=num_slots, is_preemptible=True)
        async with (
            real_slots(resources=[llm], **options) as runs,
            anyio.create_task_group() as tasks,
        ):
            desk = Desk(runs, tasks)
            await work(desk)
        return desk

    return run_virtual(main)


def test_no_more_work_than_slots() -> None:
    async def work(desk: Desk) -> None:
        for number in range(5):
            desk.start(str(number))

    desk = at_desk(work, num_slots=2)
    assert [at_s for _, at_s in desk.log] == [0, 0, 1, 1, 2]
    assert set(desk.ended.values()) == {"completed"}


def test_of_those_that_are_ready_together_the_most_urgent_gets_the_slot() -> None:
    async def work(desk: Desk) -> None:
        for name, priority in (("low", 1), ("high", -1), ("middle", 0)):
            desk.start(name, priority=priority)

    assert at_desk(work).names == ["high", "middle", "low"]


def test_short_work_goes_first() -> None:
    async def work(desk: Desk) -> None:
        desk.start("running")
        await anyio.sleep(0.01)
        desk.start("long", size=Size(2000))
        desk.start("short", size=Size(10))

    assert at_desk(work).names == ["running", "short", "long"]


def test_the_policy_is_the_one_that_was_asked_for() -> None:
    async def work(desk: Desk) -> None:
        desk.start("running")
        await anyio.sleep(0.01)
        desk.start("long", size=Size(2000))
        await anyio.sleep(0.01)
        desk.start("short", size=Size(10))

    assert at_desk(work, parameters=SchedulerParameters(policy="fcfs")).names[1:] == [
        "long",
        "short",
    ]
    assert at_desk(work, parameters=SchedulerParameters(policy="srtf")).names[1:] == [
        "short",
        "long",
    ]


def test_a_cancelled_one_frees_its_slot_at_once() -> None:
    async def work(desk: Desk) -> None:
        first = desk.start("first", hold_s=60)
        desk.start("second")
        await anyio.sleep(0.5)
        first.cancel()

    assert at_desk(work).log == [("first", 0), ("second", 0.5)]


def test_one_that_is_cancelled_while_it_waits_is_never_started() -> None:
    async def work(desk: Desk) -> None:
        desk.start("first")
        waiting = desk.start("waiting")
        desk.start("last")
        await anyio.sleep(0.5)
        waiting.cancel()

    assert at_desk(work).log == [("first", 0), ("last", 1)]


def test_one_that_is_cancelled_in_the_moment_of_its_turn_gives_the_slot_back() -> None:
    async def work(desk: Desk) -> None:
        desk.start("first", hold_s=1)
        second = desk.start("second")
        desk.start("third")
        await anyio.sleep(1)
        # The first ends in this turn of the loop: the slot is on its way to the second.
        second.cancel()

    desk = at_desk(work)
    assert desk.names[-1] == "third"
    assert desk.ended["second"] == "stopped"


def test_a_failure_frees_the_slot() -> None:
    async def work(desk: Desk) -> None:
        with desk.runs.job() as job, pytest.raises(NodeFailed):
            async with job.slot("llm"):
                raise NodeFailed("no", code="x", is_retryable=False)
        desk.start("next")

    assert at_desk(work).names == ["next"]


def test_slots_come_and_go_with_the_fleet() -> None:
    async def work(desk: Desk) -> None:
        for number in range(3):
            desk.start(str(number), hold_s=10)
        await anyio.sleep(1)
        assert desk.names == []
        desk.runs.slots.set_slots("llm", 2)
        await anyio.sleep(1)
        desk.runs.slots.set_slots("llm", 1)

    assert [at_s for _, at_s in at_desk(work, num_slots=0).log] == [1, 1, 11]


def test_without_any_slot_for_long_work_learns_from_the_engine_what_is_wrong() -> None:
    async def work(desk: Desk) -> None:
        desk.start("waiting")

    assert at_desk(work, num_slots=0, patience_s=30.0).log == [("waiting", 30)]


def test_nobody_loses_patience_once_there_are_slots_again() -> None:
    async def work(desk: Desk) -> None:
        desk.runs.slots.set_slots("llm", 0)
        await anyio.sleep(5)
        desk.runs.slots.set_slots("llm", 2)
        await anyio.sleep(60)
        assert desk.runs.slots.statistics()["llm"].num_slots == 2

    at_desk(work, patience_s=30.0)


def test_work_whose_deadline_passes_in_the_queue_fails() -> None:
    async def work(desk: Desk) -> None:
        desk.start("first", hold_s=10)
        await anyio.sleep(0.01)
        slots = desk.runs.slots
        node = NodeKey("late", "n")
        part = PlannedNode(id=node.stage("llm"), profile="llm", resource="llm")
        slots.tell(RunArrived(run_id="late", nodes=(part,), deadline_s=5.0))
        job = Job(slots, node, ("llm",))
        job.join(node)
        with pytest.raises(NodeFailed, match="deadline"):
            async with job.slot("llm"):
                raise AssertionError
        assert anyio.current_time() == 5
        job.leave(node)
        slots.tell(RunEnded(run_id="late"))

    at_desk(work)


def test_followers_go_on_when_the_leader_leaves() -> None:
    got: list[float] = []

    async def work(desk: Desk) -> None:
        desk.start("running", hold_s=2)
        await anyio.sleep(0.1)
        with ExitStack() as stack:
            leader = stack.enter_context(desk.runs.job("a"))
            other = desk.runs.job("b")
            follower = stack.enter_context(other)

            async def take() -> None:
                async with leader.slot("llm"):
                    got.append(anyio.current_time())

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(take)
                await anyio.sleep(0.1)
                leader.join(follower.node)
                leader.leave(leader.node)
                await anyio.sleep(0.1)
                desk.runs.slots.check_invariants()
            leader.leave(follower.node)
            leader.join(leader.node)

    at_desk(work)
    assert got == [2]


def test_when_the_last_one_leaves_nothing_is_left() -> None:
    async def work(desk: Desk) -> None:
        desk.start("running", hold_s=2)
        await anyio.sleep(0.1)
        with desk.runs.job() as leader, desk.runs.job() as follower:
            with anyio.move_on_after(0.5) as waiting:
                leader.join(follower.node)
                async with leader.slot("llm"):
                    raise AssertionError
            assert waiting.cancelled_caught
            leader.leave(follower.node)
            await anyio.sleep(0.1)
            assert desk.runs.slots.statistics()["llm"].num_queued == 0

    at_desk(work)


def test_sub_nodes_change_the_place_of_what_runs() -> None:
    told: list[float] = []
    at_first: list[float] = []

    async def work(desk: Desk) -> None:
        slots = desk.runs.slots

        def on_reprioritise(work_id: str, head_start_s: float) -> None:
            assert work_id == "long"
            told.append(head_start_s)

        slots.on_reprioritise = on_reprioritise
        for number in range(20):
            desk.start(str(number), hold_s=0.1, size=Size(5))
        await anyio.sleep(10)
        with desk.runs.job(resources=("llm",)) as job:
            async with job.slot("llm", size=Size(20), work_id="long") as slot:
                at_first.append(slot.head_start_s)
                for _ in range(19):
                    await anyio.sleep(0.03)
                    slots.attained("long", 1)
                    slots.attained("unknown", 1)

    at_desk(work)
    # The nearer its end, the earlier it counts as having come.
    assert [*at_first, *told] == sorted({*at_first, *told})
    assert told


def test_a_head_start_does_not_grow_with_waiting() -> None:
    """Else a run of many nodes would keep plain requests that came after it out of the engine."""
    starts: list[float] = []

    async def work(desk: Desk) -> None:
        async def take() -> None:
            with desk.runs.job(resources=("llm",)) as job:
                async with job.slot("llm") as slot:
                    starts.append(slot.head_start_s)
                    await anyio.sleep(100)

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(take)

    at_desk(work)
    assert len(starts) == 4
    assert max(starts) < 1


def test_a_turn_says_how_long_it_waited_and_for_what() -> None:
    async def work(desk: Desk) -> None:
        desk.start("first")
        desk.start("second", priority=3)
        await anyio.sleep(0.5)
        (turn,) = desk.jobs["second"].turns
        assert turn.started_s is None
        standing = desk.runs.slots.standing(turn)
        assert standing is not None
        assert standing.is_queued

    desk = at_desk(work)
    (turn,) = desk.jobs["second"].turns
    assert (turn.resource, turn.asked_s, turn.started_s, turn.ended_s) == ("llm", 0, 1, 2)
    waits = desk.runs.slots.waits["llm"]
    assert (waits.num_dispatches, waits.num_waits, waits.waited_s) == (2, 2, 1)


def test_what_work_takes_is_learnt() -> None:
    async def work(desk: Desk) -> None:
        for number in range(20):
            desk.start(str(number), hold_s=3, profile="llm:model")

    profiler = at_desk(work, num_slots=4).runs.slots.profiler
    assert profiler.cost("llm:model").of(Size()) == pytest.approx(3, rel=0.2)


# Items ---------------------------------------------------------------------------------------


class Parts:
    """Items in batches. batches: what was worked on together, with the time."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[Any], float]] = []
        self.abandoned: list[Any] = []
        self.done: dict[Any, anyio.Event] = {}
        self.failure: NodeFailed | None = None

    async def run(self, items: Sequence[Any]) -> None:
        self.batches.append((list(items), anyio.current_time()))
        await anyio.sleep(len(items))
        if self.failure is not None:
            raise self.failure
        for item in items:
            self.done[item].set()

    def abandon(self, items: Sequence[Any], failure: NodeFailed) -> None:
        self.abandoned += items
        for item in items:
            self.done[item].set()

    async def wanted(self, job: Job, items: Sequence[str]) -> None:
        work = ItemWork(self.run, self.abandon)
        for item in items:
            self.done[item] = anyio.Event()
        size = Size(len(items))
        async with job.items("embed", items, profile="embed:m", size=size, work=work):
            for item in items:
                await self.done[item].wait()


def with_embedder(work: Callable[[Runs, Parts], Awaitable[None]], **limits: Any) -> Parts:
    async def main() -> Parts:
        embed = CapacityChanged(resource="embed", **limits)
        async with real_slots(resources=[embed]) as runs:
            parts = Parts()
            await work(runs, parts)
        return parts

    return run_virtual(main)


async def ask(runs: Runs, parts: Parts, items: Sequence[str]) -> None:
    with runs.job(resources=("embed",)) as job:
        await parts.wanted(job, items)


def test_items_of_several_runs_go_together() -> None:
    async def work(runs: Runs, parts: Parts) -> None:
        async with anyio.create_task_group() as tasks:
            for items in ("ab", "c", "def"):
                tasks.start_soon(ask, runs, parts, items)

    parts = with_embedder(work, num_slots=1, max_batch=4)
    assert sorted(len(items) for items, _ in parts.batches) == [2, 4]
    assert sorted(item for items, _ in parts.batches for item in items) == list("abcdef")


def test_items_are_spread_over_free_slots_where_that_is_sooner() -> None:
    async def work(runs: Runs, parts: Parts) -> None:
        # Teach it that items take a second each, and a call nothing.
        for number in range(1, 9):
            await ask(runs, parts, [f"{number}-{index}" for index in range(number)])
        parts.batches.clear()
        await ask(runs, parts, "abcdefgh")

    parts = with_embedder(work, num_slots=4, max_batch=16)
    assert len(parts.batches) > 2
    assert {at_s for _, at_s in parts.batches} == {parts.batches[0][1]}


def test_what_was_cut_fails_as_one() -> None:
    async def work(runs: Runs, parts: Parts) -> None:
        parts.failure = NodeFailed("down", code="down", is_retryable=True)
        await ask(runs, parts, "abcdefgh")

    parts = with_embedder(work, num_slots=1, max_batch=2)
    assert len(parts.batches) == 1
    assert parts.abandoned == list("abcdefgh")


def test_a_batch_that_nobody_waits_for_is_stopped_and_its_slot_is_free() -> None:
    async def work(runs: Runs, parts: Parts) -> None:
        with anyio.move_on_after(0.5):
            await ask(runs, parts, "abcdefgh")
        await ask(runs, parts, "x")

    parts = with_embedder(work, num_slots=1, max_batch=8)
    assert parts.batches[1] == (["x"], 0.5)
