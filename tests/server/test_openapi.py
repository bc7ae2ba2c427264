"""The OpenAPI document: complete, valid, and served like everything else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jsonschema  # type: ignore[import-untyped]
import pytest
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.routing import Route

from server.app import HttpOptions, build_app
from server.endpoints.collections import collection_routes
from server.endpoints.pooling import pooling_routes
from server.errors import _KINDS, describe
from server.gateway import Admission, Gateway, ServedModel
from server.metrics import Metrics
from server.openapi import ADMIN_TABLE, STORE_TABLE, TABLE, template
from server.pools import Pools
from server.protocol.responses import ErrorType
from server.sse import StreamKeeper
from spot.engines.scripted import ScriptedEngine
from spot.errors import ContextLengthExceeded, InvalidRequest
from tests.harness import Server, demo_tokenizer, serving
from workflows.stores.collections import CollectionStore
from workflows.stores.database import Database

KEY = "sk-test"


def application(options: HttpOptions | None = None) -> FastAPI:
    engine = ScriptedEngine(vocab_size=8, eos_token_id=0)
    gateway = Gateway(
        model=ServedModel(names=["demo"], tokenizer=demo_tokenizer(), engine=engine),
        metrics=Metrics("demo"),
        admission=Admission(max_requests=1, max_queue=1),
        keeper=StreamKeeper(keep_alive_s=0, stalled_reader_s=1),
        version="1.2.3",
    )
    store = CollectionStore(Database(folder=Path("never-opened")))
    routes = [*pooling_routes(gateway, Pools()), *collection_routes(store)]
    return build_app(gateway, options=options, further_routes=routes)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return application().openapi()


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    with serving("Hello.", http=HttpOptions(api_keys={KEY: "test"})) as server:
        yield server


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def resolve(document: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in item:
        target: Any = document
        for part in item["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        item = target
    return item


def test_every_route_is_documented_and_nothing_else(document: dict[str, Any]) -> None:
    documented = {(method, path) for method, path, _ in operations(document)}
    routed = {
        (method, template(route.path))
        for route in application().routes
        if isinstance(route, Route) and route.include_in_schema
        for method in (route.methods or set()) - {"HEAD"}
    }
    aliases = {(method, path) for method, path in routed if (method, f"/v1{path}") in routed}
    assert documented == routed - aliases


def test_an_operation_without_a_route_is_left_out() -> None:
    app = application()
    app.router.routes[:] = [r for r in app.routes if getattr(r, "path", "") != "/v1/completions"]
    document = app.openapi()
    assert "/v1/completions" not in document["paths"]
    assert "CompletionRequest" not in document["components"]["schemas"]


def test_pooling_is_documented_only_where_it_is_served() -> None:
    with serving("Hello.") as server:
        paths = server.http.get("/openapi.json").json()["paths"]
    assert "/v1/embeddings" not in paths
    assert "/v1/models" in paths


def test_operation_ids_are_unique() -> None:
    tables = (*TABLE, *STORE_TABLE, *ADMIN_TABLE)
    ids = [operation.id for operation in tables]
    assert len(set(ids)) == len(ids)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    def walk(item: Any) -> None:
        if isinstance(item, dict):
            if isinstance(item.get("$ref"), str):
                resolve(document, item)
            for value in item.values():
                walk(value)
        elif isinstance(item, list):
            for value in item:
                walk(value)

    walk(document)


def test_every_schema_is_valid_json_schema(document: dict[str, Any]) -> None:
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_field_of_a_request_says_what_it_does() -> None:
    silent = [
        f"{operation.path}: {name}"
        for operation in TABLE
        if operation.request is not None
        for name, info in operation.request.model_fields.items()
        if not info.description
    ]
    assert silent == []


def test_examples_fit_their_models() -> None:
    for operation in TABLE:
        if operation.request is not None:
            assert operation.example is not None, operation.path
            operation.request.model_validate(operation.example)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_both_kinds_of_success_are_described(document: dict[str, Any], path: str) -> None:
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}
    data = content["text/event-stream"]["itemSchema"]["properties"]["data"]
    chunk, done = data["anyOf"]
    assert done == {"const": "[DONE]"}
    assert [item["$ref"].rpartition("/")[2] for item in chunk["contentSchema"]["anyOf"]] == [
        {"/v1/completions": "CompletionChunk"}.get(path, "ChatCompletionChunk"),
        "ErrorResponse",
    ]


def test_every_error_of_every_operation_is_the_envelope(document: dict[str, Any]) -> None:
    for _, path, operation in operations(document):
        statuses = set(operation["responses"]) - {"200"}
        assert {"405", "500"} <= statuses, path
        if "requestBody" in operation:
            assert {"400", "404", "408", "413", "415", "429", "503"} <= statuses, path
        for status in statuses:
            response = resolve(document, operation["responses"][status])
            schema = response["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorResponse"}
            assert "x-request-id" in response["headers"]


def test_every_status_that_an_error_can_have_is_documented(document: dict[str, Any]) -> None:
    documented = {int(name.removeprefix("Error")) for name in document["components"]["responses"]}
    assert {status for status, _, _ in _KINDS.values()} == documented


def test_every_type_that_an_error_can_have_is_documented() -> None:
    assert {kind for _, kind, _ in _KINDS.values()} == set(get_args(ErrorType))
    for error in (InvalidRequest("x"), ContextLengthExceeded("x", param=None)):
        assert describe(error).type in get_args(ErrorType)


def test_required_fields_and_enumerations_are_there(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert set(schemas["ChatCompletion"]["required"]) >= {
        "id",
        "object",
        "created",
        "model",
        "choices",
        "usage",
    }
    assert schemas["ChatCompletion"]["properties"]["object"]["const"] == "chat.completion"
    assert set(schemas["ChatMessage"]["required"]) == {"role", "content", "refusal"}
    reasons = schemas["ChatChoice"]["properties"]["finish_reason"]["enum"]
    assert set(reasons) == {"stop", "length", "tool_calls"}
    assert schemas["ChatCompletionRequest"]["required"] == ["messages"]
    assert set(schemas["ErrorDetail"]["required"]) == {"message", "type", "param", "code"}


def test_models_have_names_of_their_own(document: dict[str, Any]) -> None:
    """Two models of one name would get names with their module's path."""
    assert not [name for name in document["components"]["schemas"] if "__" in name]


def test_without_keys_nothing_asks_for_one(document: dict[str, Any]) -> None:
    for _, path, operation in operations(document):
        assert "security" not in operation, path
        assert "401" not in operation["responses"], path


def test_with_keys_all_but_the_open_paths_ask_for_one() -> None:
    options = HttpOptions(api_keys={KEY: "test"}, open_metrics=False)
    document = application(options).openapi()
    unguarded = {path for _, path, item in operations(document) if "security" not in item}
    assert unguarded == {"/health", "/ready", "/version"}
    for _, path, operation in operations(document):
        assert ("401" in operation["responses"]) == (path not in unguarded)
    schemes = document["components"]["securitySchemes"]
    assert schemes["bearer"]["scheme"] == "bearer"


@pytest.mark.parametrize("path", ["/openapi.json", "/docs", "/redoc"])
def test_the_pages_are_guarded_when_there_are_keys(keyed: Server, path: str) -> None:
    refused = keyed.http.get(path)
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    allowed = keyed.http.get(path, headers={"Authorization": f"Bearer {KEY}"})
    assert allowed.status_code == 200
    assert allowed.headers["x-request-id"]
    wrong_method = keyed.http.post(path, headers={"Authorization": f"Bearer {KEY}"})
    assert wrong_method.status_code == 405
    assert wrong_method.json()["error"]["code"] == "method_not_allowed"


def test_the_document_is_served_as_it_is(keyed: Server) -> None:
    served = keyed.http.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert served["openapi"].startswith("3.1")
    assert served["info"]["title"] == "Shuntyard"
    assert served["info"]["version"] == "0.0-test"
    assert "/v1/chat/completions" in served["paths"]


def test_the_pages_can_be_turned_off() -> None:
    with serving("Hello.", http=HttpOptions(docs=False)) as server:
        for path in ("/openapi.json", "/docs", "/redoc"):
            answer = server.http.get(path)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "route_not_found"


def test_a_path_prefix_is_the_documents_server() -> None:
    with serving("Hello.", http=HttpOptions(root_path="/llm")) as server:
        assert server.http.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]


def test_bodies_are_models() -> None:
    for operation in TABLE:
        if operation.method == "POST" and not operation.path.endswith("/cancel"):
            assert operation.request is not None
            assert issubclass(operation.request, BaseModel)
