"""ingest and search on a real Postgres, with vectors that a test can foresee; and the API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import pytest

from server.app import HttpOptions, build_app
from server.endpoints.collections import collection_routes
from server.gateway import Admission, Gateway, ServedModel
from server.logs import RequestLog
from server.metrics import Metrics
from server.sse import StreamKeeper
from server.workflow_resources import WorkflowResources
from spot.engines.scripted import ScriptedEngine
from tests.harness import demo_tokenizer
from tests.postgres import data_folder
from tests.workflows.pooling_fakes import FakeModel, FakeModels, context, vector_of
from workflows.errors import NodeFailed
from workflows.operators.ingest import IngestOperator, IngestParams
from workflows.operators.search import SearchOperator, SearchParams
from workflows.outbound.addresses import AddressPolicy
from workflows.stores.database import Database

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

CHARACTERS = {"unit": "characters", "size": 20, "overlap": 0}


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def resources() -> AsyncIterator[WorkflowResources]:
    with data_folder() as folder:
        async with WorkflowResources(
            FakeModels(),
            database=Database(folder=folder),
            identities={"key-1": "key:abc"},
            http_policy=AddressPolicy(),
            searxng_url=None,
        ) as resources:
            yield resources


class Operators:
    """ingest and search for one tenant."""

    def __init__(self, resources: WorkflowResources, tenant: str) -> None:
        self._resources = resources
        self.tenant = tenant
        models = resources.items.models
        assert isinstance(models, FakeModels)
        models.model = FakeModel()
        self.model = models.model

    async def ingest(self, *documents: Any, **params: Any) -> Any:
        given = {"collection": "c", "documents": list(documents), "chunk": CHARACTERS, **params}
        operator = IngestOperator(self._resources.items, self._resources.store)
        return await operator.run(IngestParams.model_validate(given), context(self.tenant))

    async def search(self, **params: Any) -> Any:
        operator = SearchOperator(self._resources.items, self._resources.store)
        checked = SearchParams.model_validate({"collection": "c", **params})
        return await operator.run(checked, context(self.tenant))


@pytest.fixture
def operators(resources: WorkflowResources, request: pytest.FixtureRequest) -> Operators:
    return Operators(resources, request.node.name)


async def test_what_was_ingested_is_found(operators: Operators) -> None:
    first = await operators.ingest(
        "A text alone.", {"id": "two", "text": "The second one. It has more.", "metadata": {"a": 1}}
    )
    assert first.output["collection"] == "c"
    assert {name: first.output[name] for name in ("epoch", "num_documents", "changed")} == {
        "epoch": 1,
        "num_documents": 2,
        "changed": 2,
    }
    assert first.output["num_chunks"] == 3
    assert first.output["document_ids"][1] == "two"
    assert first.usage["prompt_tokens"] > 0
    found = await operators.search(query="It has more.", top_k=2)
    best = found.output["results"][0]
    assert best == {
        "id": "two#1",
        "document_id": "two",
        "chunk_index": 1,
        "text": "It has more.",
        "score": pytest.approx(1.0),
        "metadata": {"a": 1},
    }
    assert found.output["texts"][0] == "It has more."
    assert (found.output["epoch"], len(found.output["results"])) == (1, 2)
    filtered = await operators.search(query="It has more.", filter={"a": {"gt": 1}})
    assert filtered.output["texts"] == []
    near = await operators.search(query="It has more.", min_score=0.999)
    assert near.output["texts"] == ["It has more."]


async def test_a_vector_finds_what_its_text_finds(operators: Operators) -> None:
    await operators.ingest("Something to find.", "And something else.")
    vector = vector_of("Something to find.", 4).astype(float).tolist()
    found = await operators.search(embedding=vector, top_k=1)
    assert found.output["texts"] == ["Something to find."]
    assert found.usage == {}


async def test_the_same_again_embeds_nothing(operators: Operators) -> None:
    documents = ["One.", {"id": "b", "text": "Two."}]
    await operators.ingest(*documents)
    num_calls = len(operators.model.calls)
    again = await operators.ingest(*documents)
    assert (again.output["epoch"], again.output["changed"]) == (1, 0)
    assert len(operators.model.calls) == num_calls
    changed = await operators.ingest(*documents[:1], {"id": "b", "text": "Other."})
    assert (changed.output["epoch"], changed.output["changed"]) == (2, 1)
    assert operators.model.calls[-1] == ["Other."]
    found = await operators.search(query="x")
    assert sorted(found.output["texts"]) == ["One.", "Other."]


async def test_another_chunking_or_other_metadata_is_a_change(operators: Operators) -> None:
    document = {"id": "a", "text": "One sentence here. Another one there."}
    await operators.ingest(document)
    coarse = {"unit": "characters", "size": 100, "overlap": 0}
    assert (await operators.ingest(document, chunk=coarse)).output["changed"] == 1
    document["metadata"] = {"x": [1, {"y": None}]}
    assert (await operators.ingest(document, chunk=coarse)).output["changed"] == 1
    found = await operators.search(query="x")
    assert found.output["texts"] == ["One sentence here. Another one there."]
    assert found.output["results"][0]["metadata"] == {"x": [1, {"y": None}]}


async def test_equal_nodes_at_once_store_once(operators: Operators) -> None:
    results = []

    async def node() -> None:
        results.append((await operators.ingest("One.", "Two.")).output)

    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(node)
    assert sum(one["changed"] for one in results) == 2
    assert {one["epoch"] for one in results} == {1}


async def test_a_search_behind_an_ingest_is_another_one(
    operators: Operators, resources: WorkflowResources
) -> None:
    operator = SearchOperator(resources.items, resources.store)
    params = SearchParams(collection="c", query="One.")
    await operators.ingest("One.")
    before = operator.identity(params)
    assert operator.identity(params) == before
    await operators.ingest("Two.")
    after = operator.identity(params)
    assert after != before
    await resources.store.delete_documents(operators.tenant, "c", ["none"])
    assert operator.identity(params) != after


async def test_failures_have_their_codes(operators: Operators) -> None:
    async def code_of(work: Any) -> str:
        with pytest.raises(NodeFailed) as caught:
            await work
        assert not caught.value.is_retryable
        return caught.value.code

    assert await code_of(operators.search(query="x")) == "collection_not_found"
    await operators.ingest("One.")
    assert await code_of(operators.search(embedding=[1.0])) == "collection_mismatch"
    assert await code_of(operators.search(embedding=[1e300] * 4)) == "invalid_params"
    assert await code_of(operators.search(query="x", filter={"a": []})) == "invalid_filter"
    assert await code_of(operators.ingest("a\0b")) == "invalid_params"
    assert await code_of(operators.ingest({"text": "a", "metadata": {"x": ["\0"]}})) == (
        "invalid_params"
    )
    same = [{"id": "i", "text": "a"}, {"id": "i", "text": "b"}]
    assert await code_of(operators.ingest(*same)) == "invalid_params"
    assert await code_of(operators.ingest("x", metric="ip")) == "collection_mismatch"
    operators.model.revision = "2"
    assert await code_of(operators.search(query="x")) == "collection_mismatch"
    num_calls = len(operators.model.calls)
    assert await code_of(operators.ingest("Two.")) == "collection_mismatch"
    assert len(operators.model.calls) == num_calls  # before anything was embedded


async def test_a_failed_embedding_stores_nothing(operators: Operators) -> None:
    operators.model.failures["bad"] = NodeFailed("down", code="down", is_retryable=True)
    with pytest.raises(NodeFailed, match="down"):
        await operators.ingest("good", "bad")
    with pytest.raises(NodeFailed, match="no collection"):
        await operators.search(query="good")


@pytest.mark.parametrize(
    "wrong",
    [
        {"query": "a", "embedding": [1.0]},
        {},
        {"query": "a", "top_k": 0},
        {"query": "a", "top_k": 1001},
        {"query": "a", "collection": ""},
        {"query": "a", "collection": "a/b"},
        {"query": "a", "collection": "x" * 129},
        {"embedding": [float("nan")]},
    ],
)
def test_wrong_parameters(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        SearchParams.model_validate({"collection": "c", **wrong})


def new_gateway() -> Gateway:
    engine = ScriptedEngine(vocab_size=64, eos_token_id=0)
    return Gateway(
        model=ServedModel(["demo"], demo_tokenizer(), engine),
        metrics=Metrics("demo"),
        admission=Admission(max_requests=100, max_queue=100),
        keeper=StreamKeeper(keep_alive_s=0, stalled_reader_s=60),
        version="0.0-test",
    )


@pytest.fixture(scope="module")
async def http(resources: WorkflowResources) -> AsyncIterator[httpx.AsyncClient]:
    gateway = new_gateway()
    app = build_app(
        gateway,
        options=HttpOptions(api_keys={"sk-a": "a", "sk-b": "b", "sk-c": "key-1"}),
        log=RequestLog(enabled=False),
        further_routes=collection_routes(resources.store),
        resources=resources,
    )
    transport = httpx.ASGITransport(app=app)
    async with (
        gateway.workflows,
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield client


class Api:
    def __init__(self, http: httpx.AsyncClient, key: str) -> None:
        self._http = http
        self._headers = {"Authorization": f"Bearer {key}"}

    async def __call__(self, method: str, path: str, *, status: int = 200, **options: Any) -> Any:
        answer = await self._http.request(method, path, headers=self._headers, **options)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def run(self, *nodes: dict[str, Any], **fields: Any) -> Any:
        return await self("POST", "/v1/workflows", json={"nodes": list(nodes), **fields})


def ingest_node(*documents: Any, collection: str = "docs") -> dict[str, Any]:
    params = {"collection": collection, "documents": list(documents), "chunk": CHARACTERS}
    return {"id": "ingest", "op": "ingest", "params": params}


async def test_a_workflow_sees_what_it_has_stored(http: httpx.AsyncClient) -> None:
    api = Api(http, "sk-a")
    search = {
        "id": "search",
        "op": "search",
        "depends_on": ["ingest"],
        "params": {"collection": "docs", "query": "{{ inputs.question }}", "top_k": 2},
    }
    rerank = {
        "id": "rerank",
        "op": "rerank",
        "params": {"query": "q", "documents": "{{ nodes.search.output.results }}", "top_n": 1},
    }
    documents = ["Find me, please.", {"text": "{{ inputs.text }}", "metadata": {"n": 1}}]
    run = await api.run(
        ingest_node(*documents),
        search,
        rerank,
        inputs={"question": "Find me, please.", "text": "Or me."},
        outputs={"best": "{{ nodes.rerank.output.documents[0].document_id }}"},
    )
    assert run["status"] == "completed", run
    nodes = run["nodes"]
    assert nodes["search"]["output"]["epoch"] == nodes["ingest"]["output"]["epoch"] == 1
    assert nodes["search"]["output"]["texts"] == ["Find me, please.", "Or me."]
    assert run["outputs"]["best"] == nodes["search"]["output"]["results"][0]["document_id"]


async def test_equal_searches_of_concurrent_runs_are_one(http: httpx.AsyncClient) -> None:
    api = Api(http, "sk-a")
    await api.run(ingest_node("Find me, please.", collection="shared"))
    params = {"collection": "shared", "query": "Find me, please."}
    search = {"id": "s", "op": "search", "params": params, "cache": {"ttl_s": 60}}
    runs: list[Any] = []

    async def one() -> None:
        runs.append(await api.run(search))

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(one)
    kinds = sorted(run["nodes"]["s"]["shared"] for run in runs)
    assert kinds == ["inflight"] * 4 + ["none"]
    assert {tuple(run["nodes"]["s"]["output"]["texts"]) for run in runs} == {("Find me, please.",)}
    assert (await api.run(search))["nodes"]["s"]["shared"] == "cache"
    await api.run(ingest_node("Find me, please!", collection="shared"))
    again = (await api.run(search))["nodes"]["s"]
    assert again["shared"] == "none"
    assert len(again["output"]["texts"]) == 2


async def test_tenants_share_what_they_call_public_but_no_collections(
    http: httpx.AsyncClient,
) -> None:
    mine, yours = Api(http, "sk-a"), Api(http, "sk-b")
    public = {"share": {"scope": "public"}, "cache": {"ttl_s": 60}}
    search = {"id": "s", "op": "search", "params": {"collection": "docs", "query": "x"}, **public}
    refused = await mine("POST", "/v1/workflows", status=400, json={"nodes": [search]})
    (problem,) = refused["error"]["details"]
    assert problem["path"] == "nodes.0.share.scope"
    embed = {"id": "e", "op": "embed", "params": {"input": "All ask this."}}
    runs = [
        await mine.run({**embed, **public}),
        await yours.run({**embed, **public}),
        await yours.run(embed),
    ]
    assert [run["nodes"]["e"]["shared"] for run in runs] == ["none", "cache", "none"]
    assert runs[0]["outputs"] == runs[1]["outputs"]
    assert runs[1]["usage"]["total_tokens"] == 0


async def test_collections_can_be_seen_and_deleted(http: httpx.AsyncClient) -> None:
    mine, yours = Api(http, "sk-b"), Api(http, "sk-c")
    assert await mine("GET", "/v1/collections") == {"object": "list", "data": []}
    for api in (mine, yours):
        node = ingest_node({"id": "x", "text": "X."}, {"id": "y", "text": "Y."}, collection="one")
        assert (await api.run(node))["status"] == "completed"
    await mine.run(ingest_node("Z.", collection="two"))
    listed = await mine("GET", "/v1/collections")
    assert [one["name"] for one in listed["data"]] == ["one", "two"]
    card = await mine("GET", "/v1/collections/one")
    assert card == listed["data"][0]
    assert {key: card[key] for key in ("object", "dimension", "metric", "embedder", "epoch")} == {
        "object": "collection",
        "dimension": 4,
        "metric": "cosine",
        "embedder": "fake",
        "epoch": 1,
    }
    assert (card["num_documents"], card["num_chunks"]) == (2, 2)
    gone = await mine("DELETE", "/v1/collections/one/documents?id=x&id=none")
    assert gone == {
        "object": "collection.documents",
        "name": "one",
        "epoch": 2,
        "deleted": ["x"],
    }
    await mine("DELETE", "/v1/collections/one/documents", status=400)
    assert await mine("DELETE", "/v1/collections/two") == {
        "object": "collection",
        "name": "two",
        "deleted": True,
    }
    error = await mine("GET", "/v1/collections/two", status=404)
    assert error["error"]["code"] == "collection_not_found"
    await mine("DELETE", "/v1/collections/%00", status=404)
    await mine("DELETE", "/v1/collections", status=400)
    emptied = await mine("DELETE", "/v1/collections?all=true")
    assert [one["name"] for one in emptied["data"]] == ["one"]
    assert (await yours("GET", "/v1/collections/one"))["num_documents"] == 2


async def test_a_tenant_without_a_name_is_known_by_its_key(
    http: httpx.AsyncClient, resources: WorkflowResources
) -> None:
    await Api(http, "sk-c").run(ingest_node("Mine.", collection="kept"))

    async def tenants(connection: Any) -> set[str]:
        cursor = await connection.execute("SELECT tenant FROM shuntyard.collections")
        return {row[0] for row in await cursor.fetchall()}

    stored = await resources.database.run(tenants)
    assert "key:abc" in stored
    assert "key-1" not in stored


async def test_without_a_store_the_rest_still_works(http: httpx.AsyncClient) -> None:
    """A database that is not there: 503, and its address is no client's business."""
    async with WorkflowResources(
        FakeModels(),
        database=Database(url="postgresql://user:secret@127.0.0.1:9/none"),
        identities={},
        http_policy=AddressPolicy(),
        searxng_url=None,
    ) as resources:
        gateway = new_gateway()
        app = build_app(
            gateway,
            log=RequestLog(enabled=False),
            further_routes=collection_routes(resources.store),
            resources=resources,
        )
        transport = httpx.ASGITransport(app=app)
        async with (
            gateway.workflows,
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            api = Api(client, "")
            error = await api("GET", "/v1/collections", status=503)
            assert error["error"]["code"] == "store_unavailable"
            embed = {"id": "e", "op": "embed", "params": {"input": "a"}, "on_error": "fail"}
            assert (await api.run(embed))["status"] == "completed"
            run = await api.run(ingest_node("a"))
            assert run["status"] == "failed"
            assert run["error"]["code"] == "store_unavailable"
            assert "127.0.0.1" not in str(run) + str(error)
