"""embed, ingest, search and rerank with MiniLM and Postgres, beside the pooling endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest

from server.app import build_app
from server.endpoints.pooling import pooling_routes
from server.gateway import Admission, Gateway, ServedModel
from server.item_metrics import ItemMetrics
from server.logs import RequestLog
from server.metrics import Metrics
from server.pooling_metrics import PoolingMetrics
from server.pooling_models import ServedPoolingModels
from server.pools import PooledModel, Pools, resolve_pooling_model
from server.sse import StreamKeeper
from server.workflow_resources import WorkflowResources
from spot.engines.pooling import PoolingConfig, PoolingEngine
from spot.engines.scripted import ScriptedEngine
from tests.harness import demo_tokenizer
from tests.postgres import data_folder
from workflows.outbound.addresses import AddressPolicy
from workflows.stores.database import Database

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(300)]

CATS = "A cat is a small animal that people keep at home. It purrs."
BANKS = "Shares of the bank fell sharply on Monday, and its chairman resigned."
PARIS = "Paris is the capital of France. It lies on the Seine."


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


class Served:
    """The application, and what it works with."""

    def __init__(self, http: httpx.AsyncClient, resources: WorkflowResources) -> None:
        self._http = http
        self.resources = resources

    async def post(self, path: str, body: Any) -> Any:
        answer = await self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def get(self, path: str) -> str:
        return (await self._http.get(path)).text

    async def node(self, op: str, **params: Any) -> Any:
        """The one node of a run."""
        run = await self.post("/v1/workflows", {"nodes": [{"id": "n", "op": op, "params": params}]})
        return run["nodes"]["n"]


@pytest.fixture(scope="module")
async def served() -> AsyncIterator[Served]:
    model = resolve_pooling_model("demo")
    gateway = Gateway(
        model=ServedModel(
            ["demo"], demo_tokenizer(), ScriptedEngine(vocab_size=64, eos_token_id=0)
        ),
        metrics=Metrics("demo"),
        admission=Admission(max_requests=100, max_queue=100),
        keeper=StreamKeeper(keep_alive_s=0, stalled_reader_s=60),
        version="0.0-test",
    )
    metrics = PoolingMetrics(gateway.metrics.registry)
    async with PoolingEngine(PoolingConfig(str(model.path)), on_line=print) as engine:
        with anyio.fail_after(250):
            await engine.wait_ready()
        pools = Pools(embedding=PooledModel(["mini"], engine, Path(model.path)))
        with data_folder() as folder:
            async with WorkflowResources(
                ServedPoolingModels(pools, ["demo"], metrics),
                database=Database(folder=folder),
                identities={},
                http_policy=AddressPolicy(),
                searxng_url=None,
            ) as resources:
                gateway.metrics.registry.register(ItemMetrics(resources.items))
                app = build_app(
                    gateway,
                    log=RequestLog(enabled=False),
                    further_routes=pooling_routes(gateway, pools, metrics),
                    resources=resources,
                )
                client = httpx.AsyncClient(
                    transport=httpx.ASGITransport(app=app), base_url="http://test", timeout=60
                )
                async with gateway.workflows, client:
                    yield Served(client, resources)


async def test_the_node_embeds_as_the_endpoint_does(served: Served) -> None:
    texts = [CATS, BANKS, "hi"]
    endpoint = await served.post("/v1/embeddings", {"model": "mini", "input": texts})
    node = await served.node("embed", input=texts)
    assert node["status"] == "completed"
    for one, other in zip(endpoint["data"], node["output"]["embeddings"], strict=True):
        np.testing.assert_allclose(one["embedding"], other, atol=1e-5)
    assert node["usage"]["prompt_tokens"] == endpoint["usage"]["prompt_tokens"]
    assert node["output"]["model"] == "mini"


async def test_a_node_says_that_some_of_its_items_were_anothers(served: Served) -> None:
    nodes: list[Any] = []

    async def embed(*texts: str) -> None:
        nodes.append(await served.node("embed", input=list(texts)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(embed, CATS * 3, BANKS * 3)
        tasks.start_soon(embed, BANKS * 3, PARIS * 3)
    assert sorted(node["shared"] for node in nodes) == ["item", "none"]
    assert sorted(node["usage"]["cached_tokens"] > 0 for node in nodes) == [False, True]


async def test_the_node_ranks_as_the_endpoint_does(served: Served) -> None:
    documents = [BANKS, PARIS, CATS]
    body = {"query": "What is the capital of France?", "documents": documents}
    endpoint = await served.post("/v1/rerank", body)
    node = await served.node("rerank", **body)
    assert [one["index"] for one in node["output"]["results"]] == [
        one["index"] for one in endpoint["results"]
    ]
    for one, other in zip(endpoint["results"], node["output"]["results"], strict=True):
        assert one["relevance_score"] == pytest.approx(other["score"], abs=1e-5)
    assert node["output"]["documents"][0] == PARIS


async def test_a_question_finds_its_document(served: Served) -> None:
    run = await served.post(
        "/v1/workflows",
        {
            "inputs": {"question": "What is the capital of France?"},
            "nodes": [
                {
                    "id": "ingest",
                    "op": "ingest",
                    "params": {
                        "collection": "facts",
                        "documents": [CATS, {"id": "paris", "text": PARIS}, BANKS * 20],
                    },
                },
                {
                    "id": "search",
                    "op": "search",
                    "depends_on": ["ingest"],
                    "params": {"collection": "facts", "query": "{{ inputs.question }}"},
                },
                {
                    "id": "rerank",
                    "op": "rerank",
                    "params": {
                        "query": "{{ inputs.question }}",
                        "documents": "{{ nodes.search.output.results }}",
                        "top_n": 2,
                    },
                },
            ],
        },
    )
    assert run["status"] == "completed", run
    outputs = {name: node["output"] for name, node in run["nodes"].items()}
    assert outputs["ingest"]["num_chunks"] > 3  # the long one was cut by tokens
    assert outputs["search"]["results"][0]["document_id"] == "paris"
    assert outputs["rerank"]["documents"][0]["document_id"] == "paris"
    scores = [one["score"] for one in outputs["search"]["results"]]
    assert scores == sorted(scores, reverse=True)


async def test_concurrent_nodes_are_batched_and_equal_texts_computed_once(served: Served) -> None:
    await served.node("embed", input="first")
    before = served.resources.items.statistics["embed:mini"]
    nodes: list[Any] = []

    async def one(number: int) -> None:
        texts = [f"own number {number}", f"common number {number % 5}"]
        nodes.append(await served.node("embed", input=texts))

    async with anyio.create_task_group() as tasks:
        for number in range(40):
            tasks.start_soon(one, number)
    after = served.resources.items.statistics["embed:mini"]
    assert all(node["status"] == "completed" for node in nodes)
    assert after.num_items - before.num_items == 80
    assert after.num_batches - before.num_batches < 20
    assert after.num_computed - before.num_computed < 80
    assert sum(node["usage"]["cached_tokens"] for node in nodes) > 0
    metrics = await served.get("/metrics")
    assert 'shuntyard_pooling_inputs_total{model_name="mini"}' in metrics
    labels = 'model_name="mini",task="embed"'
    assert f"shuntyard_workflow_items_total{{{labels}}} {float(after.num_items)}" in metrics
    assert f"shuntyard_workflow_batches_total{{{labels}}}" in metrics


async def test_one_text_that_is_too_long_fails_alone(served: Served) -> None:
    nodes: dict[str, Any] = {}

    async def one(name: str, text: str) -> None:
        nodes[name] = await served.node("embed", input=[text])

    async with anyio.create_task_group() as tasks:
        for name, text in (("a", "fine"), ("long", "word " * 400), ("b", "good")):
            tasks.start_soon(one, name, text)
    assert (nodes["a"]["status"], nodes["b"]["status"]) == ("completed", "completed")
    assert nodes["long"]["status"] == "failed"
    assert "maximum context length is 256 tokens" in nodes["long"]["error"]["message"]
    cut = await served.node("embed", input="word " * 400, truncate=True)
    assert cut["usage"]["prompt_tokens"] == 256


async def test_another_model_is_told(served: Served) -> None:
    node = await served.node("embed", input="a", model="demo")
    assert "Ask for the model 'mini'" in node["error"]["message"]
    node = await served.node("rerank", query="a", documents=["b"], model="none")
    assert node["error"]["code"] == "model_not_found"
