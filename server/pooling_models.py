"""The served pooling models, as workflows use them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Final

import anyio.to_thread

from server.engine_waiting import wait_started
from server.model_cache import MANIFEST_NAME
from server.pooling_metrics import PoolingMetrics
from server.pools import PooledModel, Pools
from server.workflow_failures import node_failed
from spot.engines.codec import PoolingCard
from spot.engines.pooling import InputTooLong
from spot.errors import EngineUnavailable, ShuntyardError
from workflows.pooling import BadItem, Computed, Pair, Vector

_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 64 * 1024
_SUFFIXES: Final = (".json", ".txt", ".model", ".safetensors", ".bin", ".pt")
_OTHER_RUNTIMES: Final = ("onnx", "openvino")


class ServedPoolingModels:
    """Implements `workflows.pooling.PoolingModels`.

    generative: names of the generative model, for errors that help. patience_s: how long work waits
    for an engine that starts.
    """

    def __init__(
        self,
        pools: Pools,
        generative: Sequence[str],
        metrics: PoolingMetrics,
        *,
        patience_s: float = 120.0,
    ) -> None:
        self._patience_s = patience_s
        self._pools = pools
        self._generative = generative
        self._metrics = metrics

    async def embedding(self, name: str | None) -> ServedEmbeddingModel:
        """Raises NodeFailed."""
        with _as_node_failure():
            model, _ = self._pools.for_embedding(name, self._generative)
            await wait_started(model.engine, self._patience_s)
            return ServedEmbeddingModel(model, await _revision(model), _card(model), self._metrics)

    async def scoring(self, name: str | None) -> ServedScoringModel:
        """Raises NodeFailed."""
        with _as_node_failure():
            model, _ = self._pools.for_scores(name, self._generative)
            await wait_started(model.engine, self._patience_s)
            return ServedScoringModel(model, await _revision(model), self._metrics)


class ServedEmbeddingModel:
    """Implements `workflows.pooling.EmbeddingModel`."""

    def __init__(
        self, model: PooledModel, revision: str, card: PoolingCard, metrics: PoolingMetrics
    ) -> None:
        self._model = model
        self._metrics = metrics
        self.name = model.names[0]
        self.revision = revision
        self.dimension = card.dimension
        self.max_tokens = card.max_model_len

    @property
    def tokenizer_file(self) -> Path | None:
        folder = self._model.folder
        file = None if folder is None else folder / "tokenizer.json"
        return file if file is not None and file.is_file() else None

    async def embed(self, texts: Sequence[str], *, truncate: bool) -> list[Computed[Vector]]:
        """Raises BadItem, NodeFailed."""
        with _as_node_failure():
            result = await self._model.engine.embed(texts, truncate_to=-1 if truncate else None)
        self._metrics.count(self._model, num_inputs=len(texts), num_tokens=sum(result.num_tokens))
        return [
            Computed(vector, num_tokens)
            for vector, num_tokens in zip(result.vectors, result.num_tokens, strict=True)
        ]


class ServedScoringModel:
    """Implements `workflows.pooling.ScoringModel`."""

    def __init__(self, model: PooledModel, revision: str, metrics: PoolingMetrics) -> None:
        self._model = model
        self._metrics = metrics
        self.name = model.names[0]
        self.revision = revision

    async def score(self, pairs: Sequence[Pair], *, truncate: bool) -> list[Computed[float]]:
        """Raises BadItem, NodeFailed. The model counts a batch's tokens; a pair's are its share."""
        with _as_node_failure():
            result = await self._model.engine.score(pairs, truncate_to=-1 if truncate else None)
        self._metrics.count(self._model, num_inputs=len(pairs), num_tokens=result.num_tokens)
        shares = _shares(result.num_tokens, [len(left) + len(right) for left, right in pairs])
        return [Computed(score, share) for score, share in zip(result.scores, shares, strict=True)]


def _shares(total: int, weights: Sequence[int]) -> list[int]:
    """`total` divided by weight into whole numbers that add up to it."""
    whole = sum(weights) or 1
    shares, given, passed = [], 0, 0
    for weight in weights:
        passed += weight
        upto = total * passed // whole
        shares.append(upto - given)
        given = upto
    if shares:
        shares[-1] += total - given
    return shares


def _card(model: PooledModel) -> PoolingCard:
    card = model.engine.card
    if card is None:
        raise EngineUnavailable(f"The model is {model.engine.status.state}.")
    return card


async def _revision(model: PooledModel) -> str:
    if model.folder is None:
        return "unknown"
    return await anyio.to_thread.run_sync(fingerprint, model.folder)


@lru_cache(maxsize=8)
def fingerprint(folder: Path) -> str:
    """Tells models apart by the files that make their vectors: names, sizes and contents.

    Of large files 64 samples are read: fine-tuning changes weights everywhere.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        path = file.relative_to(folder)
        if not _counts(path) or not file.is_file():
            continue
        name, size = path.as_posix(), file.stat().st_size
        digest.update(f"{len(name)}:{name}:{size}:".encode())
        with file.open("rb") as content:
            for start in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)):
                content.seek(start)
                digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _counts(path: Path) -> bool:
    """Whether a file of a model can change its vectors."""
    if path.suffix not in _SUFFIXES or path.name == MANIFEST_NAME:
        return False
    return not any(part.startswith(".") or part in _OTHER_RUNTIMES for part in path.parts)


@contextmanager
def _as_node_failure() -> Iterator[None]:
    try:
        yield
    except InputTooLong as error:
        raise BadItem(error.index, node_failed(error)) from None
    except ShuntyardError as error:
        raise node_failed(error) from None
