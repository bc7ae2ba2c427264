"""Pooling models that do what a test says."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np

from workflows.errors import NodeFailed
from workflows.job import Job, NodeKey, Slot
from workflows.operators.base import NodeContext
from workflows.pooling import BadItem, Computed, Pair, Vector
from workflows.scheduling.messages import PlannedNode, RunArrived, RunEnded
from workflows.slots import Slots
from workflows.tickets import ItemWork

RESOURCES = ("llm", "embed", "rerank", "search", "http", "web_search")


class FreeJob:
    """A job that has every slot that it asks for, at once."""

    node = NodeKey("run_1", "n")

    def join(self, node: NodeKey) -> None:
        pass

    def leave(self, node: NodeKey) -> None:
        pass

    @asynccontextmanager
    async def slot(self, resource: str, **options: Any) -> AsyncIterator[Slot]:
        yield Slot(0.0)

    @asynccontextmanager
    async def items(
        self, resource: str, items: Sequence[Any], *, work: ItemWork, **options: Any
    ) -> AsyncIterator[None]:
        try:
            await work.run(items)
        except NodeFailed as failure:
            work.abandon(items, failure)
        yield None


class Runs:
    """Real slots, and runs of one node each that ask for them."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._num_runs = 0

    @contextmanager
    def job(self, tenant: str = "t", *, resources: Sequence[str] = RESOURCES) -> Iterator[Job]:
        """Of the only node of a run."""
        self._num_runs += 1
        node = NodeKey(f"run{self._num_runs}", "n")
        parts = tuple(
            PlannedNode(id=node.stage(resource), profile=resource, resource=resource)
            for resource in resources
        )
        self.slots.tell(RunArrived(run_id=node.run_id, nodes=parts, tenant=tenant))
        job = Job(self.slots, node, resources)
        job.join(node)
        try:
            yield job
        finally:
            job.leave(node)
            self.slots.tell(RunEnded(run_id=node.run_id))


@asynccontextmanager
async def real_slots(**options: Any) -> AsyncIterator[Runs]:
    """Slots whose state is checked, and must be empty, at the end."""
    async with Slots(**options) as slots:
        yield Runs(slots)
        with anyio.fail_after(5):
            while not slots.is_empty:
                await anyio.lowlevel.checkpoint()
        slots.check_invariants()


def context(tenant: str = "t", **fields: Any) -> NodeContext:
    return NodeContext(
        **{
            "run_id": "run_1",
            "node_id": "n",
            "tenant": tenant,
            "idempotency_key": "run_1:n",
            "job": FreeJob(),
            **fields,
        }
    )


@dataclass
class FakeModel:
    """Embeds and scores. calls: the items of each. gate: that each call waits for."""

    name: str = "fake"
    revision: str = "1"
    dimension: int = 4
    max_tokens: int = 64
    tokenizer_file: Path | None = None
    gate: anyio.Event | None = None
    failures: dict[Any, NodeFailed] = field(default_factory=dict)
    names_the_bad: bool = True
    calls: list[list[Any]] = field(default_factory=list)
    num_cancelled: int = 0

    async def embed(self, texts: Sequence[str], *, truncate: bool) -> list[Computed[Vector]]:
        await self._work(texts)
        return [Computed(vector_of(text, self.dimension), len(text)) for text in texts]

    async def score(self, pairs: Sequence[Pair], *, truncate: bool) -> list[Computed[float]]:
        await self._work(pairs)
        return [Computed(float(len(right)), 1) for _, right in pairs]

    async def _work(self, items: Sequence[Any]) -> None:
        self.calls.append(list(items))
        try:
            if self.gate is not None:
                await self.gate.wait()
        except BaseException:
            self.num_cancelled += 1
            raise
        for index, item in enumerate(items):
            failure = self.failures.get(item)
            if failure is not None and self.names_the_bad and not failure.is_retryable:
                raise BadItem(index, failure)
            if failure is not None:
                raise failure


@dataclass
class FakeModels:
    model: FakeModel = field(default_factory=FakeModel)

    async def embedding(self, name: str | None) -> FakeModel:
        return self._named(name)

    async def scoring(self, name: str | None) -> FakeModel:
        return self._named(name)

    def _named(self, name: str | None) -> FakeModel:
        if name not in (None, self.model.name):
            raise NodeFailed(f"no model {name}", code="model_not_found", is_retryable=False)
        return self.model


def vector_of(text: str, dimension: int) -> Vector:
    """The same for the same text, and hardly ever for another one."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).normal(size=dimension).astype(np.float32)
