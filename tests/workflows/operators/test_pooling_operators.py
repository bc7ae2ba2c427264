"""embed and rerank with models that do what a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from tests.workflows.pooling_fakes import FakeModels, Runs, context, real_slots, vector_of
from workflows.errors import NodeFailed
from workflows.operators.embed import EmbedOperator, EmbedParams
from workflows.operators.rerank import RerankOperator, RerankParams
from workflows.pooled_items import PooledItems

pytestmark = pytest.mark.anyio


@pytest.fixture
def models() -> FakeModels:
    return FakeModels()


class Items(PooledItems):
    """Pooled items with slots."""

    def __init__(self, models: FakeModels, runs: Runs) -> None:
        super().__init__(models)
        self.runs = runs


@pytest.fixture
async def items(models: FakeModels) -> AsyncIterator[Items]:
    async with real_slots() as runs:
        yield Items(models, runs)


async def embed(items: Items, tenant: str = "t", **params: Any) -> Any:
    checked = EmbedParams.model_validate(params)
    with items.runs.job(tenant) as job:
        return await EmbedOperator(items).run(checked, context(tenant, job=job))


async def rerank(items: Items, **params: Any) -> Any:
    checked = RerankParams.model_validate(params)
    with items.runs.job() as job:
        return await RerankOperator(items).run(checked, context(job=job))


async def test_one_text_and_several(items: Items) -> None:
    expected = [vector_of(text, 4).astype(float).tolist() for text in ("a", "bc")]
    one = await embed(items, input="a")
    assert one.output == {"embedding": expected[0], "embeddings": expected[:1], "model": "fake"}
    two = await embed(items, input=["a", "bc"])
    assert two.output["embeddings"] == expected
    assert two.usage == {"prompt_tokens": 3, "total_tokens": 3, "cached_tokens": 0}


async def test_nodes_of_different_runs_are_one_batch(items: Items, models: FakeModels) -> None:
    results: dict[int, Any] = {}

    async def node(number: int) -> None:
        results[number] = await embed(items, input=[f"own {number}", "common"])

    async with anyio.create_task_group() as tasks:
        for number in range(10):
            tasks.start_soon(node, number)
    assert len(models.model.calls) == 1
    assert len(models.model.calls[0]) == 11
    assert sum(one.usage["cached_tokens"] for one in results.values()) == 9 * len("common")
    statistics = items.statistics["embed:fake"]
    assert (statistics.num_items, statistics.num_computed, statistics.num_batches) == (20, 11, 1)


async def test_tenants_share_no_item(items: Items, models: FakeModels) -> None:
    async with anyio.create_task_group() as tasks:
        for tenant in ("a", "b"):

            async def node(tenant: str = tenant) -> None:
                assert (await embed(items, tenant, input="x")).usage["cached_tokens"] == 0

            tasks.start_soon(node)
    assert models.model.calls == [["x", "x"]]


async def test_one_bad_text_fails_its_node_only(items: Items, models: FakeModels) -> None:
    models.model.failures["bad"] = NodeFailed("too long", code="too_long", is_retryable=False)
    outcomes = {}

    async def node(text: str) -> None:
        try:
            outcomes[text] = bool(await embed(items, input=text))
        except NodeFailed as failure:
            outcomes[text] = failure.code

    async with anyio.create_task_group() as tasks:
        for text in ("a", "bad", "c"):
            tasks.start_soon(node, text)
    assert outcomes == {"a": True, "bad": "too_long", "c": True}


async def test_documents_come_by_score_and_equal_ones_as_they_came(items: Items) -> None:
    documents = ["aa", {"text": "b", "id": 7}, {"text": "cccc"}, "dd"]
    result = await rerank(items, query="q", documents=documents)
    assert result.output["results"] == [
        {"index": 2, "score": 4.0, "document": {"text": "cccc"}},
        {"index": 0, "score": 2.0, "document": "aa"},
        {"index": 3, "score": 2.0, "document": "dd"},
        {"index": 1, "score": 1.0, "document": {"text": "b", "id": 7}},
    ]
    assert result.output["documents"] == [{"text": "cccc"}, "aa", "dd", {"text": "b", "id": 7}]
    assert result.output["texts"] == ["cccc", "aa", "dd", "b"]
    assert result.usage["prompt_tokens"] == 4


async def test_only_the_best_are_kept(items: Items) -> None:
    documents = ["a", "bb", "ccc"]
    top = await rerank(items, query="q", documents=documents, top_n=1)
    assert top.output["texts"] == ["ccc"]
    good = await rerank(items, query="q", documents=documents, min_score=2)
    assert good.output["texts"] == ["ccc", "bb"]
    none = await rerank(items, query="q", documents=[])
    assert none.output["results"] == []


async def test_a_document_without_a_text_is_named(items: Items) -> None:
    for document in ({"title": "x"}, {"text": 1}, 5, None):
        with pytest.raises(NodeFailed, match=r"params\.documents\.1"):
            await rerank(items, query="q", documents=["a", document])


async def test_an_unknown_model_is_an_error(items: Items) -> None:
    with pytest.raises(NodeFailed, match="no model other"):
        await embed(items, input="a", model="other")


@pytest.mark.parametrize("wrong", [{"input": []}, {"input": 5}, {"input": [5]}, {}, {"x": 1}])
def test_wrong_parameters(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        EmbedParams.model_validate(wrong)
