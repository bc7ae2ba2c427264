"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.protocol.responses import ModelCards
from tests.harness import Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    names = ("demo", "org/demo", "a b", "ä")
    with serving("x", names=names, further_models=[("embedder", 7)]) as running:
        yield running


def test_every_served_name_has_a_card(server: Server) -> None:
    answer = server.http.get("/v1/models").json()
    ModelCards.model_validate(answer)
    assert answer["object"] == "list"
    assert [card["id"] for card in answer["data"]] == ["demo", "org/demo", "a b", "ä", "embedder"]
    for card in answer["data"]:
        assert card["object"] == "model"
        assert card["owned_by"]
        assert isinstance(card["created"], int)
    assert answer["data"][0]["max_model_len"] == 4096
    assert answer["data"][1]["root"] == "demo"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/models/demo", "demo"),
        ("/models/demo", "demo"),
        ("/v1/models/demo/", "demo"),
        ("/v1/models/org/demo", "org/demo"),
        ("/v1/models/org%2Fdemo", "org/demo"),
        ("/v1/models/a%20b", "a b"),
        ("/v1/models/%C3%A4", "ä"),
        ("/v1/models/embedder", "embedder"),
    ],
)
def test_one_model_by_its_id(server: Server, path: str, name: str) -> None:
    response = server.http.get(path)
    assert response.status_code == 200
    assert response.json()["id"] == name


@pytest.mark.parametrize("name", ["other", "Demo", "demo/x", "org", "%2e%2e", "x" * 5000])
def test_an_unknown_id_lists_what_is_served(server: Server, name: str) -> None:
    response = server.http.get(f"/v1/models/{name}")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'org/demo'" in error["message"]
    assert len(response.content) < 2000


def test_models_cannot_be_deleted(server: Server) -> None:
    response = server.http.delete("/v1/models/demo")
    assert response.status_code == 405
    assert "GET" in response.headers["allow"]
