"""Texts to vectors and pairs to scores, for all runs together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from workflows.item_batcher import Batched, BatcherStatistics, ItemBatcher
from workflows.operators.base import NodeContext
from workflows.pooling import Computed, EmbeddingModel, Pair, PoolingModels, ScoringModel, Vector

V = TypeVar("V")
_Key = tuple[str, str, str, bool]


@dataclass(frozen=True, slots=True)
class PooledAnswer(Generic[V]):
    """One value for each item. usage: of tokens; `cached_tokens` were computed for someone else,
    as were num_shared of the values."""

    values: list[V]
    usage: dict[str, int]
    num_shared: int = 0


class PooledItems:
    """The items of every model."""

    def __init__(self, models: PoolingModels) -> None:
        self.models = models
        self._batchers: dict[_Key, ItemBatcher[Any, Any]] = {}
        # Equal keys are equal models; the latest is the one that is surely still there.
        self._embedders: dict[_Key, EmbeddingModel] = {}
        self._scorers: dict[_Key, ScoringModel] = {}

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
        self,
        context: NodeContext,
        model: EmbeddingModel,
        texts: Sequence[str],
        *,
        truncate: bool = False,
    ) -> PooledAnswer[Vector]:
        """One vector for each text. Raises NodeFailed."""

        key = ("embed", model.name, model.revision, truncate)
        self._embedders[key] = model

        async def work(items: Sequence[str]) -> list[Computed[Vector]]:
            return await self._embedders[key].embed(items, truncate=truncate)

        batcher = self._batcher(key, work, resource="embed", chars=len)
        return _answer(await batcher.submit(context.job, context.tenant, texts))

    async def score(
        self,
        context: NodeContext,
        model: ScoringModel,
        pairs: Sequence[Pair],
        *,
        truncate: bool = False,
    ) -> PooledAnswer[float]:
        """One score for each pair. Raises NodeFailed."""
        key = ("score", model.name, model.revision, truncate)
        self._scorers[key] = model

        async def work(items: Sequence[Pair]) -> list[Computed[float]]:
            return await self._scorers[key].score(items, truncate=truncate)

        batcher = self._batcher(key, work, resource="rerank", chars=_chars)
        return _answer(await batcher.submit(context.job, context.tenant, pairs))

    def _batcher(
        self, key: _Key, work: Any, *, resource: str, chars: Callable[[Any], int]
    ) -> ItemBatcher[Any, Any]:
        batcher = self._batchers.get(key)
        if batcher is None:
            _, name, revision, truncate = key
            profile = f"{resource}:{name}#{revision}{'-cut' if truncate else ''}"
            batcher = ItemBatcher(work, resource=resource, profile=profile, chars=chars)
            self._batchers[key] = batcher
        return batcher


def _chars(pair: Pair) -> int:
    return len(pair[0]) + len(pair[1])


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
        num_shared=sum(item.is_shared for item in items),
    )
