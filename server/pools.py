"""The pooling models that are served, beside or instead of the generative one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from server.demo_model import DEMO_EMBEDDING_MODEL_NAME, ensure_demo_embedding_model
from server.gateway import model_not_found, unix_s
from server.model_cache import Progress
from server.model_source import ResolvedModel, resolve_model
from spot.engines.base import EngineStatus
from spot.engines.codec import PoolingCard
from spot.engines.pooling import EmbedResult, ScoreResult
from spot.errors import NotSupported

_DEMO_NAMES = ("demo", DEMO_EMBEDDING_MODEL_NAME)


class Pooler(Protocol):
    """What the endpoints need of a pooling engine; `spot.engines.pooling.PoolingEngine` is one."""

    @property
    def status(self) -> EngineStatus: ...

    @property
    def card(self) -> PoolingCard | None: ...

    async def wait_ready(self) -> PoolingCard: ...

    async def embed(
        self,
        inputs: Sequence[str] | Sequence[list[int]],
        *,
        dimensions: int | None = None,
        truncate_to: int | None = None,
    ) -> EmbedResult: ...

    async def score(
        self, pairs: Sequence[tuple[str, str]], *, truncate_to: int | None = None
    ) -> ScoreResult: ...


@dataclass(slots=True)
class PooledModel:
    """One pooling model under its served names; the first is its id in answers without one.

    folder: with its files, if they are on this machine.
    """

    names: list[str]
    engine: Pooler
    folder: Path | None = None
    created: int = field(default_factory=unix_s)


@dataclass(slots=True)
class Pools:
    """The embedding model and the cross-encoder, if they are served."""

    embedding: PooledModel | None = None
    rerank: PooledModel | None = None

    @property
    def models(self) -> list[PooledModel]:
        return [model for model in (self.embedding, self.rerank) if model is not None]

    @property
    def cards(self) -> list[tuple[str, int]]:
        """Names and creation times, for the list of models."""
        return [(name, model.created) for model in self.models for name in model.names]

    def for_embedding(self, name: str | None, generative: Sequence[str]) -> tuple[PooledModel, str]:
        """The model for an embedding request, and the name to answer with.

        generative: names of the generative model. Raises NotSupported, ModelNotFound.
        """
        self._check_name(name, generative, "embeddings", "--embedding-model", self.embedding)
        model = self.embedding
        if self.rerank is not None and name and name in self.rerank.names:
            raise NotSupported(
                f"The model '{name}' scores pairs of texts; it gives no embeddings. {_hint(model)}",
                param="model",
            )
        if model is None:
            raise NotSupported(_START_WITH.format("embedding", "--embedding-model"), param="model")
        return model, name or model.names[0]

    def for_scores(self, name: str | None, generative: Sequence[str]) -> tuple[PooledModel, str]:
        """The model for reranking and scores: the cross-encoder unless another one is named or it
        is not served; the embedding model's score is the cosine. As `for_embedding`."""
        default = self.rerank or self.embedding
        self._check_name(name, generative, "scores", "--rerank-model", default)
        model = next((item for item in self.models if name in item.names), default)
        if model is None:
            raise NotSupported(
                _START_WITH.format("reranking", "--rerank-model (or --embedding-model)"),
                param="model",
            )
        return model, name or model.names[0]

    def _check_name(
        self,
        name: str | None,
        generative: Sequence[str],
        what: str,
        option: str,
        instead: PooledModel | None,
    ) -> None:
        pooled = [item for item, _ in self.cards]
        if not name or name in pooled:
            return
        if name not in generative:
            raise model_not_found(name, [*generative, *pooled])
        advice = _hint(instead) or f"Start the server with {option} to serve a model for that."
        raise NotSupported(
            f"The model '{name}' only generates text; it gives no {what}. {advice}", param="model"
        )


_START_WITH = "This server has no {0} model; start it with {1} to serve one."


def _hint(model: PooledModel | None) -> str:
    return f"Ask for the model '{model.names[0]}'." if model is not None else ""


def resolve_pooling_model(
    model: str,
    *,
    name: str | None = None,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    **hub: Any,
) -> ResolvedModel:
    """As `resolve_model`, where "demo" means the bundled embedding model. Raises ModelUnavailable.

    hub: `revision` and `token`.
    """
    if model in _DEMO_NAMES:
        path = ensure_demo_embedding_model(progress=progress, cache_dir=cache_dir)
        return ResolvedModel(path, name or DEMO_EMBEDDING_MODEL_NAME, is_demo=True)
    return resolve_model(model, name=name, progress=progress, cache_dir=cache_dir, **hub)
