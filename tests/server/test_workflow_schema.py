"""The published JSON Schema, held against the documents that ship and against mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from server.pooling_models import ServedPoolingModels
from server.pools import Pools
from server.workflow_operators import operators_of
from server.workflow_resources import WorkflowResources
from tests.harness import serving
from workflows.checked import check_workflow
from workflows.errors import InvalidWorkflow
from workflows.json_schema import document_schema
from workflows.library import shipped_templates
from workflows.operators.base import Operator
from workflows.outbound.addresses import AddressPolicy
from workflows.stores.database import Database


@pytest.fixture(scope="module")
def operators() -> dict[str, Operator]:
    """All of them; nothing of what they need is started."""
    resources = WorkflowResources(
        ServedPoolingModels(Pools(), ["demo"], None),  # type: ignore[arg-type]
        database=Database(folder=Path("unused")),
        identities={},
        http_policy=AddressPolicy(),
        searxng_url=None,
    )
    with serving("x") as server:
        return {one.name: one for one in operators_of(server.gateway, resources)}


@pytest.fixture(scope="module")
def validator(operators: dict[str, Operator]) -> jsonschema_rs.Draft202012Validator:
    schema = document_schema(operators)
    jsonschema_rs.meta.validate(schema)
    return jsonschema_rs.Draft202012Validator(schema)


@pytest.mark.parametrize("name", sorted(shipped_templates()))
def test_what_ships_is_valid(
    name: str, operators: dict[str, Operator], validator: jsonschema_rs.Draft202012Validator
) -> None:
    document = shipped_templates()[name]
    check_workflow(document, operators)
    validator.validate(document)
    assert set(document["input_schema"]["properties"]) & {"question", "text"}


@pytest.mark.parametrize(
    "node",
    [
        {"id": "a", "op": "llm", "params": {}},
        {"id": "a", "op": "llm", "params": {"prompt": "x", "tmeperature": 0}},
        {"id": "a", "op": "llm", "params": {"prompt": "x", "temperature": "warm"}},
        {"id": "a", "op": "llm", "params": {"prompt": "x", "messages": []}},
        {"id": "a", "op": "lmm", "params": {"prompt": "x"}},
        {"id": "a b", "op": "template", "params": {"value": 1}},
        {"id": "a", "op": "template", "params": {"value": 1}, "when": 1},
        {"id": "a", "op": "map", "params": {"workflow": {"nodes": []}, "over": []}},
    ],
)
def test_it_finds_the_mistakes_that_the_server_finds(
    node: dict[str, Any],
    operators: dict[str, Operator],
    validator: jsonschema_rs.Draft202012Validator,
) -> None:
    document = {"nodes": [node]}
    assert not validator.is_valid(document)
    with pytest.raises(InvalidWorkflow):
        check_workflow(document, operators)


def test_a_template_may_stand_where_a_number_does(
    validator: jsonschema_rs.Draft202012Validator,
) -> None:
    params = {"prompt": "x", "temperature": "{{ inputs.t }}", "stop": ["{{ inputs.s }}"]}
    validator.validate({"nodes": [{"id": "a", "op": "llm", "params": params}]})


def test_it_is_published() -> None:
    with serving("x") as server:
        assert server.http.get("/v1/workflows/schema").json()["title"] == "Workflow"


def test_a_request_may_have_its_options_beside_the_document(
    operators: dict[str, Operator],
) -> None:
    beside = {"inputs": {"type": "object"}}
    validator = jsonschema_rs.Draft202012Validator(document_schema(operators, beside))
    node = {"id": "a", "op": "template", "params": {"value": 1}}
    validator.validate({"nodes": [node], "inputs": {}})
    assert not validator.is_valid({"nodes": [node], "input": {}})
    inner = {"id": "b", "op": "workflow", "params": {"workflow": {"nodes": [node], "inputs": {}}}}
    assert not validator.is_valid({"nodes": [inner]})
