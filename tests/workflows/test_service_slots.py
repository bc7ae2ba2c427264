"""Whole runs that share slots, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
from pydantic import BaseModel, ConfigDict

from spot.virtual_time import run_virtual
from workflows.checked import check_workflow
from workflows.operators.base import JsonType, NodeContext, NodeResult, Operator
from workflows.operators.nested import MapOperator
from workflows.scheduling.messages import CapacityChanged, Size
from workflows.scheduling.parameters import PolicyName, SchedulerParameters
from workflows.service import Run, WorkflowService
from workflows.signature import Identity
from workflows.slots import Slots

NUM_SLOTS = 2


class BusyParams(BaseModel):
    """takes_s: with a slot. tag: equal ones are equal work."""

    model_config = ConfigDict(extra="forbid")

    takes_s: float = 1.0
    tag: str = ""


@dataclass
class World:
    """How many hold slots, and that there never are too many. started: names and times."""

    num_holding: int = 0
    started: dict[str, float] = field(default_factory=dict)

    async def hold(self, name: str, takes_s: float) -> None:
        self.num_holding += 1
        assert self.num_holding <= NUM_SLOTS
        self.started[name] = anyio.current_time()
        try:
            await anyio.sleep(takes_s)
        finally:
            self.num_holding -= 1


class Think:
    """Holds a slot of `llm` for a while."""

    name = "think"
    params = BusyParams
    resources = ("llm",)
    outputs: Mapping[str, JsonType] = {"name": "string"}

    def __init__(self, world: World) -> None:
        self._world = world

    def identity(self, params: BusyParams) -> Identity | None:
        return Identity(content=params.tag) if params.tag else None

    def expected_size(self, params: Any, expected_outputs: float) -> Size:
        return Size(params.get("takes_s", 1.0) * 40)

    async def run(self, params: BusyParams, context: NodeContext) -> NodeResult:
        name = f"{context.run_id}/{context.node_id}"
        size = Size(params.takes_s * 40)
        async with context.job.slot("llm", size=size, work_id=f"{name}/{context.attempt}"):
            await self._world.hold(name, params.takes_s)
        return NodeResult(output={"name": name}, usage={"tokens": 1})


def operators(world: World) -> dict[str, Operator]:
    every: list[Operator] = [Think(world), MapOperator()]
    return {one.name: one for one in every}


def in_world(
    work: Callable[[WorkflowService, Callable[..., Run], World], Any],
    *,
    policy: PolicyName = "hera",
    num_llm: int = NUM_SLOTS,
) -> None:
    """Let runs happen in virtual time; nothing may be left behind."""

    async def main() -> None:
        world = World()
        resources = [CapacityChanged(resource="llm", num_slots=num_llm, is_preemptible=True)]
        slots = Slots(
            resources=resources,
            parameters=SchedulerParameters(policy=policy, min_long_sample=2),
            patience_s=5.0,
        )
        async with WorkflowService(slots) as service:

            def submit(*nodes: dict[str, Any], tenant: str = "t", **fields: Any) -> Run:
                document = {"nodes": list(nodes), **fields}
                return service.submit(check_workflow(document, operators(world)), {}, tenant=tenant)

            await work(service, submit, world)
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            slots.check_invariants()
            assert slots.is_empty
            assert service.num_active == 0
            assert not world.num_holding

    run_virtual(main)


def think(name: str, takes_s: float = 1.0, *after: str, **fields: Any) -> dict[str, Any]:
    params = {"takes_s": takes_s, **fields.pop("params", {})}
    return {"id": name, "op": "think", "params": params, "depends_on": list(after), **fields}


def test_the_child_of_the_fast_branch_starts_at_once() -> None:
    async def work(service: WorkflowService, submit: Callable[..., Run], world: World) -> None:
        run = submit(
            think("root", 1),
            think("slow", 50, "root"),
            think("fast", 1, "root"),
            think("child", 1, "fast"),
            think("join", 1, "slow", "child"),
        )
        await run.ended.wait()
        started = {name.partition("/")[2]: at_s for name, at_s in world.started.items()}
        assert started == {"root": 0, "slow": 1, "fast": 1, "child": 2, "join": 51}

    in_world(work)


def test_a_run_that_is_cancelled_frees_its_slots_at_once() -> None:
    async def work(service: WorkflowService, submit: Callable[..., Run], world: World) -> None:
        hog = submit(think("a", 100), think("b", 100), think("c", 100))
        await anyio.sleep(1)
        other = submit(think("a", 1))
        await anyio.sleep(4)
        assert list(world.started) == [f"{hog.id}/a", f"{hog.id}/b"]
        service.cancel(hog)
        await other.ended.wait()
        assert anyio.current_time() == 6

    in_world(work)


def test_short_runs_pass_long_ones_that_wait() -> None:
    async def work(service: WorkflowService, submit: Callable[..., Run], world: World) -> None:
        submit(think("a", 2), think("b", 2))
        await anyio.sleep(0.1)
        long = submit(think("a", 30))
        short = submit(think("a", 1))
        await long.ended.wait()
        assert world.started[f"{short.id}/a"] <= world.started[f"{long.id}/a"]

    in_world(work, num_llm=1)


def test_first_come_first_served_if_that_is_the_policy() -> None:
    async def work(service: WorkflowService, submit: Callable[..., Run], world: World) -> None:
        runs = [submit(think("a", takes_s)) for takes_s in (2, 30, 1)]
        for run in runs:
            await run.ended.wait()
        assert [world.started[f"{run.id}/a"] for run in runs] == [0, 2, 32]

    in_world(work, num_llm=1, policy="fcfs")


def test_a_nodes_declared_priority_comes_before_all_else() -> None:
    async def work(service: WorkflowService, submit: Callable[..., Run], world: World) -> None:
        names = ("first", "low", "usual", "high")
        nodes = [
            think(name, 1, priority=priority)
            for name, priority in zip(names, (0, 5, 0, -5), strict=True)
        ]
        hold = submit(nodes[0])
        await anyio.sleep(0.1)
        runs = [submit(node) for node in nodes[1:]]
        for run in (hold, *runs):
            await run.ended.wait()
        order = sorted(world.started, key=world.started.__getitem__)
        assert [name.partition("/")[2] for name in order] == ["first", "high", "usual", "low"]

    in_world(work, num_llm=1)


def test_equal_work_takes_one_slot_and_outlives_who_began_it() -> None:
    async def work(service: WorkflowService, submit: Callable[..., Run], world: World) -> None:
        runs = [submit(think("a", 10, params={"tag": "same"})) for _ in range(3)]
        await anyio.sleep(1)
        assert service.slots.statistics()["llm"].num_running == 1
        service.cancel(runs[0])
        for run in runs:
            await run.ended.wait()
        assert [run.state.status for run in runs] == ["cancelled", "completed", "completed"]
        assert anyio.current_time() == 10
        assert len(world.started) == 1

    in_world(work)


def test_the_runs_inside_a_run_are_ranked_with_it() -> None:
    async def work(service: WorkflowService, submit: Callable[..., Run], world: World) -> None:
        inner = {"nodes": [think("x", 1), think("y", 1, "x")]}
        node = {"id": "m", "op": "map", "params": {"workflow": inner, "over": [1, 2, 3]}}
        run = submit(node)
        await anyio.sleep(0.5)
        # Of the three items, with two nodes each, nothing has ended.
        node_s = service.slots.profiler.cost("llm").of(Size(40))
        assert service.slots.remaining_s(run.id) > 3 * node_s
        await run.ended.wait()
        assert run.state.status == "completed"
        assert len(world.started) == 6

    in_world(work)
