"""The admin API: who may use it, and what it does to pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.app import HttpOptions
from server.endpoints.admin import AdminGate, admin_routes
from server.protocol.admin import NewPipeline
from spot.engines.scripted import ScriptedEngine
from spot.fleet import Fleet, PipelineSpec
from tests.harness import Server, serving, until


async def one_more(wanted: NewPipeline) -> PipelineSpec:
    engine = ScriptedEngine(vocab_size=49152, eos_token_id=2)
    return PipelineSpec(wanted.id or "more", engine, wanted.weight)


def admin_server(key: str | None = None, **options: Any) -> Any:
    def routes(gateway: Any) -> Any:
        assert isinstance(gateway.model.engine, Fleet)
        return admin_routes(gateway.model.engine, AdminGate(key), one_more)

    return serving(None, spare=True, further_routes=routes, **options)


@pytest.fixture
def server() -> Iterator[Server]:
    with admin_server(step_time_s=0.01) as running:
        yield running


def states(server: Server) -> dict[str, str]:
    return {item["id"]: item["state"] for item in server.http.get("/admin/pipelines").json()}


def test_pipelines_are_listed_with_their_load(server: Server) -> None:
    first, spare = server.http.get("/admin/pipelines").json()
    assert (first["id"], first["engine"], first["state"]) == ("first", "scripted", "serving")
    assert first["resume"] == "exact"
    assert first["seats"] == 256
    assert spare["weight"] == 1.0
    assert server.http.get("/admin/pipelines/spare").json() == spare


def test_a_drained_pipeline_finishes_and_goes(server: Server) -> None:
    with server.http.stream(
        "POST",
        "/v1/completions",
        json={"prompt": "x", "max_tokens": 40, "stream": True, "ignore_eos": True},
    ) as response:
        lines = response.iter_lines()
        next(lines)
        answer = server.http.post("/admin/pipelines/first/drain", json={"deadline_s": 30})
        assert answer.status_code == 202
        assert answer.json()["state"] == "draining"
        assert answer.json()["running"] == 1
        assert list(lines)[-2] == "data: [DONE]"
    until(lambda: states(server) == {"spare": "serving"})


def test_draining_needs_no_body(server: Server) -> None:
    assert server.http.post("/admin/pipelines/first/drain").status_code == 202
    until(lambda: states(server) == {"spare": "serving"})


def test_a_removed_pipeline_is_gone_and_its_generations_go_on(server: Server) -> None:
    with server.http.stream(
        "POST",
        "/v1/completions",
        json={"prompt": "x", "max_tokens": 40, "stream": True, "ignore_eos": True, "seed": 1},
    ) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.http.delete("/admin/pipelines/first").status_code == 200
        assert list(lines)[-2] == "data: [DONE]"
    until(lambda: states(server) == {"spare": "serving"})
    assert server.fleet.num_migrations == 1


def test_pipelines_are_added_and_weighted(server: Server) -> None:
    answer = server.http.post("/admin/pipelines", json={"id": "third", "weight": 2})
    assert answer.status_code == 201
    assert answer.json()["weight"] == 2
    until(lambda: states(server)["third"] == "serving")
    assert server.http.patch("/admin/pipelines/third", json={"weight": 5}).json()["weight"] == 5


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "", {"id": "first"}, 400, "id"),
        ("POST", "", {"id": "a b"}, 400, "id"),
        ("POST", "", {"wieght": 2}, 400, "wieght"),
        ("POST", "", {"weight": 0}, 400, "weight"),
        ("POST", "", {"weight": "NaN"}, 400, "weight"),
        ("PATCH", "/first", {}, 400, "weight"),
        ("PATCH", "/first", {"weight": -1}, 400, "weight"),
        ("PATCH", "/nope", {"weight": 1}, 404, None),
        ("DELETE", "/nope", None, 404, None),
        ("POST", "/nope/drain", {}, 404, None),
        ("POST", "/first/drain", {"deadline_s": -1}, 400, "deadline_s"),
        ("PUT", "/first", {}, 405, None),
        ("POST", "", {"weight": True}, 400, "weight"),
    ],
)
def test_mistakes_are_named(
    server: Server, method: str, path: str, body: Any, status: int, param: str | None
) -> None:
    answer = server.http.request(method, f"/admin/pipelines{path}", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


def test_events_are_numbered_and_resumed(server: Server) -> None:
    def read(last: str | None, count: int) -> list[str]:
        headers = {} if last is None else {"Last-Event-ID": last}
        found: list[str] = []
        with server.http.stream("GET", "/admin/events", headers=headers) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line.startswith(("id: ", "event: ")):
                    found.append(line)
                if len(found) == 2 * count:
                    return found
        return found

    first = read(None, 4)
    assert first[:2] == ["id: 1", "event: added"]
    server.http.patch("/admin/pipelines/first", json={"weight": 7})
    assert read("4", 1) == ["id: 5", "event: weight"]
    assert read("9" * 20, 1) == ["id: 1", "event: added"]  # of another run of the server


@pytest.mark.parametrize("event_id", ["+9999", "-1", "1_0", "x", "1.0", "9" * 21, "\u00b2"])
def test_what_is_no_number_of_an_event_is_refused(server: Server, event_id: str) -> None:
    headers = [(b"last-event-id", event_id.encode("latin-1"))]
    answer = server.http.get("/admin/events", headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Last-Event-ID"
    assert "whole numbers" in answer.json()["error"]["message"]


def test_a_number_that_is_taken_as_a_name_is_passed_over() -> None:
    names = iter(["first", "spare", "third"])

    async def numbered(wanted: NewPipeline) -> PipelineSpec:
        engine = ScriptedEngine(vocab_size=49152, eos_token_id=2)
        return PipelineSpec(next(names), engine)

    def routes(gateway: Any) -> Any:
        return admin_routes(gateway.model.engine, AdminGate(None), numbered)

    with serving(None, spare=True, further_routes=routes) as server:
        assert server.http.post("/admin/pipelines", json={}).json()["id"] == "third"


def test_with_every_pipeline_draining_the_server_is_not_healthy(server: Server) -> None:
    with server.http.stream(
        "POST",
        "/v1/completions",
        json={"prompt": "x", "max_tokens": 100, "stream": True, "ignore_eos": True},
    ) as response:
        lines = response.iter_lines()
        next(lines)
        for name in ("spare", "first"):
            server.http.post(f"/admin/pipelines/{name}/drain", json={"deadline_s": None})
        for path in ("/health", "/ready"):
            answer = server.http.get(path)
            assert answer.status_code == 503, path
        refused = server.complete("y")
        assert refused.status_code == 503
        assert "every pipeline is being drained" in refused.json()["error"]["message"]
        assert list(lines)[-2] == "data: [DONE]"


def test_what_is_gone_takes_no_orders(server: Server) -> None:
    pipeline = server.fleet.state.pipelines["first"]
    server.call(lambda: setattr(pipeline, "state", "gone"))
    for method, path, body in (
        ("POST", "/drain", {}),
        ("PATCH", "", {"weight": 1}),
        ("DELETE", "", None),
    ):
        answer = server.http.request(method, f"/admin/pipelines/first{path}", json=body)
        assert answer.status_code == 404, method
    server.call(lambda: setattr(pipeline, "state", "serving"))


def test_the_admin_key_lets_in_and_api_keys_do_not() -> None:
    with admin_server("secret", http=HttpOptions(api_keys={"sk-user": "user"})) as server:
        url = "/admin/pipelines"
        bare = httpx.Client(base_url=server.url)
        assert bare.get(url).status_code == 401
        assert bare.get(url, headers={"authorization": "Bearer sk-user"}).status_code == 401
        assert bare.get(url, headers={"authorization": "Bearer secret"}).status_code == 200
        assert bare.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 401
        bare.close()


def test_without_an_admin_key_no_api_key_is_asked_for_on_this_machine() -> None:
    with admin_server(None, http=HttpOptions(api_keys={"sk-user": "user"})) as server:
        bare = httpx.Client(base_url=server.url)
        assert bare.get("/admin/pipelines").status_code == 200
        bare.close()


@pytest.mark.parametrize("name", ["host", "origin", "x-forwarded-for", "forwarded", "via"])
def test_without_a_key_web_pages_and_proxies_are_kept_out(server: Server, name: str) -> None:
    answer = server.http.get("/admin/pipelines", headers={name: "evil.example"})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "forbidden"


@pytest.mark.parametrize(
    ("client", "passes"),
    [
        ("127.0.0.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("nonsense", False),
    ],
)
def test_loopback_is_told_by_the_address(client: str, passes: bool) -> None:
    scope: dict[str, Any] = {"client": (client, 1), "headers": []}
    if passes:
        AdminGate(None).check(scope)
    else:
        with pytest.raises(Exception, match="this machine only"):
            AdminGate(None).check(scope)
