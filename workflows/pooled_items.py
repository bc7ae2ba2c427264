"""Texts to vectors and pairs to scores, for all runs together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import anyio
from anyio.abc import TaskGroup

from workflows.item_batcher import Batched, BatcherStatistics, ItemBatcher
from workflows.pooling import Computed, EmbeddingModel, Pair, PoolingModels, ScoringModel, Vector

V = TypeVar("V")
_Key = tuple[str, str, str, bool]


@dataclass(frozen=True, slots=True)
class PooledAnswer(Generic[V]):
    """One value for each item. usage: of tokens; `cached_tokens` were computed for someone else."""

    values: list[V]
    usage: dict[str, int]


class PooledItems:
    """An async context manager that owns the batches of every model.

    max_batch, max_wait_s: see `ItemBatcher`.
    """

    def __init__(
        self, models: PoolingModels, *, max_batch: int = 64, max_wait_s: float = 0.003
    ) -> None:
        self.models = models
        self._max_batch = max_batch
        self._max_wait_s = max_wait_s
        self._batchers: dict[_Key, ItemBatcher[Any, Any]] = {}
        # Equal keys are equal models; the latest is the one that is surely still there.
        self._embedders: dict[_Key, EmbeddingModel] = {}
        self._scorers: dict[_Key, ScoringModel] = {}
        self._group: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._group is not None
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(exc_type, exc, traceback)

    @property
    def statistics(self) -> dict[str, BatcherStatistics]:
        """Of each task and model, as `embed:MODEL`."""
        total: dict[str, BatcherStatistics] = {}
        for (task, name, _, _), batcher in self._batchers.items():
            one = total.setdefault(f"{task}:{name}", BatcherStatistics())
            one.num_items += batcher.statistics.num_items
            one.num_shared += batcher.statistics.num_shared
            one.num_computed += batcher.statistics.num_computed
            one.num_batches += batcher.statistics.num_batches
        return total

    async def embed(
        self, tenant: str, model: EmbeddingModel, texts: Sequence[str], *, truncate: bool = False
    ) -> PooledAnswer[Vector]:
        """One vector for each text. Raises NodeFailed."""

        key = ("embed", model.name, model.revision, truncate)
        self._embedders[key] = model

        async def work(items: Sequence[str]) -> list[Computed[Vector]]:
            return await self._embedders[key].embed(items, truncate=truncate)

        return _answer(await self._batcher(key, work).submit(tenant, texts))

    async def score(
        self, tenant: str, model: ScoringModel, pairs: Sequence[Pair], *, truncate: bool = False
    ) -> PooledAnswer[float]:
        """One score for each pair. Raises NodeFailed."""
        key = ("score", model.name, model.revision, truncate)
        self._scorers[key] = model

        async def work(items: Sequence[Pair]) -> list[Computed[float]]:
            return await self._scorers[key].score(items, truncate=truncate)

        return _answer(await self._batcher(key, work).submit(tenant, pairs))

    def _batcher(self, key: _Key, work: Any) -> ItemBatcher[Any, Any]:
        batcher = self._batchers.get(key)
        if batcher is None:
            assert self._group is not None, "used outside of its context"
            batcher = ItemBatcher(
                work, self._group, max_batch=self._max_batch, max_wait_s=self._max_wait_s
            )
            self._batchers[key] = batcher
        return batcher


def _answer(items: list[Batched[Computed[V]]]) -> PooledAnswer[V]:
    num_tokens = sum(item.value.num_tokens for item in items)
    num_cached = sum(item.value.num_tokens for item in items if item.is_shared)
    return PooledAnswer(
        values=[item.value.value for item in items],
        usage={
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "cached_tokens": num_cached,
        },
    )
