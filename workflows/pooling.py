"""What workflows need of embedding and scoring models. The server has them, and implements this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from workflows.errors import NodeFailed

V = TypeVar("V")

Pair = tuple[str, str]
Vector = NDArray[np.float32]


class BadItem(Exception):
    """Item number `index` of a batch cannot be worked on; nothing is known of the others."""

    def __init__(self, index: int, failure: NodeFailed) -> None:
        super().__init__(failure.message)
        self.index = index
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Computed(Generic[V]):
    """What a model made of one item, and of how many tokens."""

    value: V
    num_tokens: int


class EmbeddingModel(Protocol):
    """A model that turns texts into vectors.

    revision: changes whenever its vectors may. max_tokens: of one text, special tokens included.
    tokenizer_file: a `tokenizer.json`, if it has one.
    """

    @property
    def name(self) -> str: ...

    @property
    def revision(self) -> str: ...

    @property
    def dimension(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def tokenizer_file(self) -> Path | None: ...

    async def embed(self, texts: Sequence[str], *, truncate: bool) -> list[Computed[Vector]]:
        """truncate: cut what is too long. Raises BadItem, NodeFailed."""
        ...


class ScoringModel(Protocol):
    """A model that says how well two texts go together, the higher the better."""

    @property
    def name(self) -> str: ...

    @property
    def revision(self) -> str: ...

    async def score(self, pairs: Sequence[Pair], *, truncate: bool) -> list[Computed[float]]:
        """As `EmbeddingModel.embed`."""
        ...


class PoolingModels(Protocol):
    """The models that there are. Without a name, the one that is meant for the task."""

    async def embedding(self, name: str | None) -> EmbeddingModel:
        """Raises NodeFailed if there is none, or none of that name, or it is not ready."""
        ...

    async def scoring(self, name: str | None) -> ScoringModel:
        """Raises NodeFailed."""
        ...
