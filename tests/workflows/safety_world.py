"""A world in which every result tells whose work it was; made for `test_safety`.

Each execution has a number of its own, which stands in the usage of every node that has its result:
`work 7: 1` of the one that bears the cost, `work 7: 0` of those that shared it. What deterministic
work gives depends on a secret of the tenant's; a sample tells the number of its execution.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from pydantic import BaseModel, ConfigDict

from workflows.checked import CheckedNode
from workflows.errors import NodeFailed
from workflows.item_batcher import ItemBatcher
from workflows.job import Job
from workflows.operators.base import JsonType, NodeContext, NodeResult, Operator
from workflows.operators.nested import LoopOperator, MapOperator, WorkflowOperator
from workflows.pooling import BadItem
from workflows.run import Run
from workflows.scheduling.messages import Size
from workflows.signature import Identity
from workflows.slots import Slots

TENANTS = ("x", "y")
BAD = "bad"
_ITEM_S = 0.1


def marker(tenant: str) -> str:
    """Stands in every output of a tenant, and in none of another one's."""
    return f"<{tenant}>"


def answer(tenant: str, *asked: object) -> str:
    """What deterministic work gives."""
    secret = f"the secret of {tenant}"
    return marker(tenant) + hashlib.sha256(repr((secret, asked)).encode()).hexdigest()[:8]


def is_write(node: CheckedNode) -> bool:
    """Whether the author, or the operator, says so."""
    return node.spec.effects == "write" or node.spec.op == "write"


@dataclass(frozen=True, slots=True)
class Execution:
    """Work that was done to its end, or an item of it. content: all that its result depends on.

    context: of the node in whose name it was done. ended_s: by the wall clock. version: of the data
    that it read.
    """

    number: int
    content: str
    context: NodeContext
    ended_s: float
    version: int = 0


@dataclass
class World:
    """What outlives a server.

    base_s: the wall clock at the start of the present server's event loop. is_dead: the present
    server's; it changes nothing any more. max_slots: by resource. changes: when what is read does.
    done: executions by number. effects: how often, by key. recorded: the keys of nodes whose
    completion is on record, if is_recorded. jobs: that hold slots. runs: by id. wrongs: what must
    not have happened.
    """

    base_s: float = 0.0
    is_dead: bool = False
    max_slots: Mapping[str, int] = field(default_factory=dict)
    changes: Sequence[float] = ()
    slots: Slots = field(default_factory=Slots)
    num_begun: int = 0
    done: dict[int, Execution] = field(default_factory=dict)
    effects: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    recorded: set[str] = field(default_factory=set)
    is_recorded: bool = False
    runs: dict[str, Run] = field(default_factory=dict)
    holds: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    jobs: list[Job] = field(default_factory=list)
    wrongs: list[str] = field(default_factory=list)

    def now_s(self) -> float:
        """The wall clock."""
        return self.base_s + anyio.current_time()

    def begin(self, context: NodeContext) -> int:
        """The number of an execution that begins. Raises NodeFailed where the server is gone."""
        self._live()
        if self.is_recorded:
            self._check_record(self.runs[context.run_id], context.node_id)
        return self.new_number()

    def new_number(self) -> int:
        self.num_begun += 1
        return self.num_begun

    def _check_record(self, run: Run, node_id: str) -> None:
        """Before anything follows from a side effect, it is on record."""
        for name in run.state.workflow.nodes[node_id].dependencies:
            parent = run.state.nodes[name]
            key = f"{(run.root or run).id}:{run.path}{name}"
            if is_write(parent.node) and parent.usage and key not in self.recorded:
                self.wrongs.append(f"{node_id} followed {key}, which is not on record")

    def version(self, at_s: float) -> int:
        """Of the data that are read, at a time by the wall clock."""
        return sum(changed_s <= at_s for changed_s in self.changes)

    @asynccontextmanager
    async def holding(self, resource: str, job: Job | None = None) -> AsyncIterator[None]:
        """A slot. job: by which it was got, but for items."""
        self.holds[resource] += 1
        if job is not None:
            self.jobs.append(job)
        if self.holds[resource] > self.max_slots[resource]:
            self.wrongs.append(f"{self.holds[resource]} at once hold {resource}")
        try:
            yield
        finally:
            self.holds[resource] -= 1
            if job is not None:
                self.jobs.remove(job)

    def change(self, key: str) -> None:
        """A side effect, by its key."""
        self._live()
        if key in self.recorded:
            self.wrongs.append(f"{key} was done again, though its end is on record")
        self.effects[key] += 1

    def complete(self, number: int, content: str, context: NodeContext, version: int = 0) -> None:
        """An execution has come to its end."""
        self._live()
        self.done[number] = Execution(number, content, context, self.now_s(), version)

    def _live(self) -> None:
        """What was about to happen when the server was killed does not."""
        if self.is_dead:
            raise NodeFailed("the server is gone", code="gone", is_retryable=False)


class WorkParams(BaseModel):
    """prompt, seed, temperature: as of an `llm` node. num_failures: so many tries fail, and may be
    repeated; is_refused: all do, and may not. is_cut: the result must not be kept. items: of
    `look`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str = ""
    seed: int | None = None
    temperature: float = 0.0
    stream: bool = False
    takes_s: float = 0.0
    num_failures: int = 0
    is_refused: bool = False
    is_cut: bool = False
    items: list[str] = []

    @property
    def content(self) -> str:
        return self.model_dump_json(exclude={"stream", "takes_s"})

    @property
    def is_sampled(self) -> bool:
        return self.temperature > 0 and self.seed is None

    def fail(self, attempt: int) -> None:
        """Raises NodeFailed if this attempt does."""
        if self.is_refused:
            raise NodeFailed("refused", code="refused", is_retryable=False)
        if attempt <= self.num_failures:
            raise NodeFailed("busy", code="busy", is_retryable=True)


class _Working:
    """What the operators of this world have in common."""

    params = WorkParams
    outputs: Mapping[str, JsonType] = {"text": "string"}

    def __init__(self, world: World) -> None:
        self._world = world

    def expected_size(self, params: Any, expected_outputs: float) -> Size:
        return Size(1.0 + 40 * params.get("takes_s", 0.0))


class Think(_Working):
    """A language model: its text comes in two pieces."""

    name = "think"
    resources = ("llm",)

    def identity(self, params: WorkParams) -> Identity:
        sampled = "a sample" if params.is_sampled else ""
        return Identity(
            content=params.content,
            sampled=sampled,
            is_pure=not params.is_sampled,
            wants_deltas=params.stream,
        )

    async def run(self, params: WorkParams, context: NodeContext) -> NodeResult:
        number = self._world.begin(context)
        text = answer(context.tenant, params.prompt, params.seed)
        if params.is_sampled:
            text += f"#{number}"
        size = Size(1.0 + 40 * params.takes_s)
        work_id = f"work {number}"
        async with context.job.slot("llm", size=size, work_id=work_id) as slot:
            async with self._world.holding("llm", context.job):
                await anyio.sleep(params.takes_s / 2)
                context.emit(text[:5])
                self._world.slots.attained(work_id, 1)
                await anyio.sleep(params.takes_s / 2)
                params.fail(context.attempt)
                context.emit(text[5:])
            slot.size = size
        self._world.complete(number, params.content, context)
        return NodeResult(
            output={"text": text},
            usage={f"work {number}": 1, "total_tokens": 1},
            may_be_kept=not params.is_cut,
        )


class Read(_Working):
    """Reads what changes, and says of which version its work would be."""

    name = "read"
    resources = ("http",)

    def identity(self, params: WorkParams) -> Identity:
        return Identity(content=[params.content, self._world.version(self._world.now_s())])

    async def run(self, params: WorkParams, context: NodeContext) -> NodeResult:
        number = self._world.begin(context)
        async with context.job.slot("http"), self._world.holding("http", context.job):
            await anyio.sleep(params.takes_s / 2)
            version = self._world.version(self._world.now_s())
            await anyio.sleep(params.takes_s / 2)
            params.fail(context.attempt)
        self._world.complete(number, params.content, context, version)
        text = answer(context.tenant, params.prompt, version)
        return NodeResult(output={"text": text}, usage={f"work {number}": 1, "total_tokens": 1})


class Write(_Working):
    """Changes something in the middle of its work."""

    name = "write"
    resources = ("http",)

    def identity(self, params: WorkParams) -> Identity:
        """A wrong one, as an author of operators may write it: the service must know better."""
        return Identity(content=params.content, is_pure=True)

    def writes(self, params: WorkParams) -> bool:
        return True

    async def run(self, params: WorkParams, context: NodeContext) -> NodeResult:
        number = self._world.begin(context)
        async with context.job.slot("http"), self._world.holding("http", context.job):
            await anyio.sleep(params.takes_s / 2)
            self._world.change(context.idempotency_key)
            await anyio.sleep(params.takes_s / 2)
            params.fail(context.attempt)
        self._world.complete(number, params.content, context)
        text = answer(context.tenant, params.prompt, params.seed)
        return NodeResult(output={"text": text}, usage={f"work {number}": 1, "total_tokens": 1})


class Look(_Working):
    """Embeds items in batches with those of other nodes. Each item is an execution of its own."""

    name = "look"
    resources = ("embed",)

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._batcher: ItemBatcher[str, int] = ItemBatcher(
            self._embed, resource="embed", profile="embed:m", chars=len
        )

    @property
    def in_flight(self) -> int:
        """Items that somebody waits for, or that were forgotten there."""
        return len(self._batcher._in_flight)

    def identity(self, params: WorkParams) -> Identity:
        return Identity(content=params.content, is_pure=True)

    async def run(self, params: WorkParams, context: NodeContext) -> NodeResult:
        number = self._world.begin(context)
        found = await self._batcher.submit(context.job, context.tenant, params.items)
        self._world.complete(number, params.content, context)
        charged = {f"item {one.value}": 0 for one in found}
        for one in found:
            charged[f"item {one.value}"] += not one.is_shared
        return NodeResult(
            output={"text": answer(context.tenant, params.items)},
            usage={f"work {number}": 1, "total_tokens": 1, **charged},
            num_shared_items=sum(one.is_shared for one in found),
        )

    async def _embed(self, items: Sequence[str]) -> list[int]:
        async with self._world.holding("embed"):
            await anyio.sleep(_ITEM_S * len(items))
        if BAD in items:
            failure = NodeFailed("refused", code="refused", is_retryable=False)
            raise BadItem(items.index(BAD), failure)
        return [self._world.new_number() for _ in items]


def operators(world: World) -> dict[str, Operator]:
    every: list[Operator] = [
        Think(world),
        Read(world),
        Write(world),
        Look(world),
        WorkflowOperator(),
        MapOperator(),
        LoopOperator(),
    ]
    return {one.name: one for one in every}
