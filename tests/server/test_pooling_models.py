"""Served pooling models as workflows see them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from server.pooling_metrics import PoolingMetrics
from server.pooling_models import ServedPoolingModels, _shares, fingerprint
from server.pools import PooledModel, Pools
from spot.engines.base import EngineStatus
from spot.engines.codec import PoolingCard
from spot.engines.pooling import EmbedResult, InputTooLong, ScoreResult
from spot.errors import EngineFailed, EngineUnavailable, Overloaded
from workflows.errors import NodeFailed
from workflows.pooling import BadItem

pytestmark = pytest.mark.anyio


class Pooler:
    status = EngineStatus("ready")
    card: PoolingCard | None = PoolingCard("embed", 3, 16, 100)

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.may_start = anyio.Event()
        self.starts_with = self.card
        self.truncations: list[Any] = []

    async def wait_ready(self) -> PoolingCard:
        await self.may_start.wait()
        if self.starts_with is None:
            raise EngineFailed("no such model")
        self.card = self.starts_with
        return self.card

    async def embed(self, inputs: Sequence[Any], **options: Any) -> EmbedResult:
        self.truncations.append(options["truncate_to"])
        if self.error is not None:
            raise self.error
        return EmbedResult(np.ones((len(inputs), 3), np.float32), [2] * len(inputs))

    async def score(self, pairs: Sequence[Any], **options: Any) -> ScoreResult:
        return ScoreResult([0.5] * len(pairs), 10)


@pytest.fixture
def pooler() -> Pooler:
    return Pooler()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def models_of(pools: Pools, registry: CollectorRegistry) -> ServedPoolingModels:
    return ServedPoolingModels(pools, ["writer"], PoolingMetrics(registry))


async def test_an_embedding_model_describes_itself(
    pooler: Pooler, registry: CollectorRegistry, tmp_path: Path
) -> None:
    (tmp_path / "weights").write_bytes(b"1")
    models = models_of(Pools(PooledModel(["mini", "alias"], pooler, tmp_path)), registry)
    model = await models.embedding("alias")
    assert (model.name, model.dimension, model.max_tokens) == ("mini", 3, 16)
    assert model.revision == fingerprint(tmp_path)
    assert model.tokenizer_file is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert model.tokenizer_file == tmp_path / "tokenizer.json"
    answers = await model.embed(["a", "b"], truncate=False)
    assert [one.num_tokens for one in answers] == [2, 2]
    await model.embed(["a"], truncate=True)
    assert pooler.truncations == [None, -1]
    labels = {"model_name": "mini"}
    assert registry.get_sample_value("shuntyard_pooling_inputs_total", labels) == 3
    assert registry.get_sample_value("shuntyard_pooling_tokens_total", labels) == 6


async def test_a_batchs_tokens_are_shared_out(pooler: Pooler, registry: CollectorRegistry) -> None:
    models = models_of(Pools(rerank=PooledModel(["ranker"], pooler)), registry)
    model = await models.scoring(None)
    answers = await model.score([("a", "b"), ("a", "bbbbbbb"), ("", "")], truncate=False)
    assert sum(one.num_tokens for one in answers) == 10
    assert [one.value for one in answers] == [0.5] * 3
    assert model.revision == "unknown"


@pytest.mark.parametrize("weights", [[], [0], [1, 2, 3], [5, 0, 5], [1] * 7])
def test_shares_add_up(weights: list[int]) -> None:
    shares = _shares(100, weights)
    assert len(shares) == len(weights)
    assert sum(shares) == (100 if weights else 0)
    assert min(shares, default=0) >= 0


async def test_failures(pooler: Pooler, registry: CollectorRegistry) -> None:
    model = await models_of(Pools(PooledModel(["mini"], pooler)), registry).embedding(None)
    pooler.error = InputTooLong(index=1, num_tokens=20, max_model_len=16)
    with pytest.raises(BadItem) as bad:
        await model.embed(["a", "b"], truncate=False)
    assert (bad.value.index, bad.value.failure.is_retryable) == (1, False)
    for error in (Overloaded("full"), EngineUnavailable("starting")):
        pooler.error = error
        with pytest.raises(NodeFailed) as caught:
            await model.embed(["a"], truncate=False)
        assert caught.value.is_retryable


async def test_what_is_not_served_is_told(pooler: Pooler, registry: CollectorRegistry) -> None:
    with pytest.raises(NodeFailed, match="--embedding-model"):
        await models_of(Pools(), registry).embedding(None)
    models = models_of(Pools(PooledModel(["mini"], pooler)), CollectorRegistry())
    with pytest.raises(NodeFailed, match="does not exist"):
        await models.scoring("other")
    pooler.card = pooler.starts_with = None
    pooler.may_start.set()
    with pytest.raises(NodeFailed) as caught:
        await models.embedding(None)
    assert caught.value.is_retryable


async def test_a_model_that_starts_is_waited_for(
    pooler: Pooler, registry: CollectorRegistry
) -> None:
    models = models_of(Pools(PooledModel(["mini"], pooler)), registry)
    pooler.card = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(models.embedding, None)
        tasks.start_soon(models.scoring, None)
        await anyio.wait_all_tasks_blocked()
        pooler.may_start.set()
    impatient = ServedPoolingModels(
        models._pools, [], PoolingMetrics(CollectorRegistry()), patience_s=0.0
    )
    pooler.card, pooler.may_start = None, anyio.Event()
    with pytest.raises(NodeFailed):
        await impatient.embedding(None)


def test_a_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    def made(name: str, files: dict[str, bytes]) -> str:
        for file, content in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return fingerprint(tmp_path / name)

    weights = bytes(20_000_000)
    tuned = bytearray(weights)
    tuned[::1000] = b"\1" * len(tuned[::1000])
    model = {"model.safetensors": weights, "1_Pooling/config.json": b"{}"}
    first = made("a", model)
    assert made("b", model) == first
    assert made("c", {**model, "model.safetensors": bytes(tuned)}) != first
    assert made("d", {**model, "1_Pooling/config.json": b"[]"}) != first
    assert made("e", {**model, "model.safetensors": weights[1:]}) != first
    assert made("f", {"model.safetensors": weights, "2_Pooling/config.json": b"{}"}) != first
    beside = ("README.md", ".cache/x.json", "onnx/model.bin", "shuntyard-manifest.json")
    assert made("g", {**model, **dict.fromkeys(beside, b"x")}) == first
