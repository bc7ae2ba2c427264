"""Workflow templates over HTTP, without a database. With one: tests/integration."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import Server, serving

PATH = "/v1/workflow-templates"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(script="Hello there.") as server:
        yield server


def test_shipped_ones_are_listed_and_shown(server: Server) -> None:
    cards = server.http.get(PATH).json()
    assert cards["object"] == "list"
    names = [card["name"] for card in cards["data"]]
    assert "rag" in names
    for name in names:
        whole = server.http.get(f"{PATH}/{name}").json()
        assert whole["object"] == "workflow.template"
        assert (whole["version"], whole["created_at"]) == (0, None)
        assert whole["document"]["name"] == name
    assert server.http.get(f"{PATH}/rag?version=0").json() == server.http.get(f"{PATH}/rag").json()


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        (f"{PATH}/rga", 404, "template_not_found"),
        (f"{PATH}/rag?version=1", 404, "template_not_found"),
        (f"{PATH}/rag?version=x", 400, "invalid_value"),
        (f"{PATH}/rag?version={'9' * 99}", 400, "invalid_value"),
    ],
)
def test_what_is_not_there(server: Server, path: str, status: int, code: str) -> None:
    answer = server.http.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_without_a_database_nothing_can_be_stored(server: Server) -> None:
    assert server.http.put(f"{PATH}/mine", json={"nodes": []}).status_code == 405
    assert server.http.delete(f"{PATH}/mine").status_code == 405
    assert "put" not in server.http.get("/openapi.json").json()["paths"][f"{PATH}/{{name}}"]


def test_a_run_of_a_template_is_a_run(server: Server) -> None:
    body = {"workflow": "map-reduce-summary", "inputs": {"text": "One. Two."}}
    run = server.post("/v1/workflows", body).json()
    assert (run["status"], run["name"]) == ("completed", "map-reduce-summary")
    assert run["outputs"] == {"answer": "Hello there."}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"workflow": "rag", "nodes": []}, "workflow"),
        ({"workflow": "map-reduce-summary"}, "inputs"),
        ({"workflow": "map-reduce-summary", "inputs": {"text": "x", "y": 1}}, "inputs"),
        ({"workflow": 1}, "workflow"),
    ],
)
def test_what_cannot_stand_together_is_refused(
    server: Server, body: dict[str, object], param: str
) -> None:
    answer = server.post("/v1/workflows", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_key_stands_for_one_template(server: Server) -> None:
    headers = {"Idempotency-Key": "one template"}
    inputs = {"text": "One."}
    first = server.post(
        "/v1/workflows", {"workflow": "map-reduce-summary", "inputs": inputs}, headers=headers
    )
    assert first.status_code == 200
    other = server.post(
        "/v1/workflows", {"workflow": "map-reduce-summary@0", "inputs": inputs}, headers=headers
    )
    assert other.status_code == 409
