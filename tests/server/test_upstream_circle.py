"""Two servers that are each other's upstream: noticed when they are joined, and by each request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.routing import BaseRoute

from server.endpoints.admin import AdminGate, admin_routes
from server.gateway import Gateway
from server.protocol.admin import NewPipeline
from spot.engines.upstream import UpstreamConfig, UpstreamEngine
from spot.fleet import PipelineSpec
from tests.harness import Server, chat_body, serving, until


@contextmanager
def yard(name: str, *, misstated: str | None = None) -> Iterator[Server]:
    """A server with engines of its own, to which upstreams can be added.

    misstated: what it says of itself to upstreams, if not its name.
    """

    async def new_upstream(wanted: NewPipeline) -> PipelineSpec:
        assert wanted.upstream is not None
        config = UpstreamConfig(
            wanted.upstream, own_instance=misstated or name, health_interval_s=0.05
        )
        return PipelineSpec("upstream", UpstreamEngine(config), 1e9)

    def routes(gateway: Gateway) -> list[BaseRoute]:
        fleet: Any = gateway.model.engine
        return admin_routes(fleet, AdminGate(None), new_upstream)

    with serving(None, spare=True, further_routes=routes, instance=name) as server:
        yield server


def join(front: Server, behind: Server) -> dict[str, Any]:
    """Make one server the upstream of another. Returns how it looks once that is decided."""
    answer = front.post("/admin/pipelines", {"upstream": behind.url})
    assert answer.status_code < 300, answer.text

    def joined() -> dict[str, Any]:
        return dict(front.http.get("/admin/pipelines/upstream").json())

    until(lambda: joined()["state"] == "serving" or "only one" in joined()["detail"], within_s=10)
    return joined()


def part(server: Server) -> None:
    """Take the upstream away, so that no server waits for the other at the end."""
    server.http.delete("/admin/pipelines/upstream")
    until(lambda: "upstream" not in server.fleet.state.pipelines, within_s=10)


def test_the_second_of_two_does_not_take_the_first_for_its_upstream() -> None:
    with yard("a") as a, yard("b") as b:
        assert join(a, b)["state"] == "serving"
        assert a.http.get("/version").json()["upstreams"] == ["b"]
        refused = join(b, a)
        assert refused["state"] == "starting"
        assert "only one can be the other's upstream" in refused["detail"]
        assert a.chat("x", max_tokens=5).status_code == 200
        assert b.chat("x", max_tokens=5).status_code == 200
        part(a)
        part(b)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_comes_back_ends_with_an_error_that_says_so(stream: bool) -> None:
    with yard("a") as a, yard("b", misstated="unknown") as b:
        assert join(a, b)["state"] == "serving"
        assert join(b, a)["state"] == "serving"  # it was not noticed
        answer = a.post("/v1/chat/completions", chat_body("x", max_tokens=5, stream=stream))
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["code"] == "upstream_circle"
        assert "been at this server before" in error["message"]
        part(b)
        assert a.chat("x", max_tokens=5).status_code == 200
        part(a)


def test_a_chain_of_servers_is_no_circle() -> None:
    with yard("a") as a, yard("b") as b, yard("c") as c:
        assert join(b, c)["state"] == "serving"
        assert join(a, b)["state"] == "serving"
        assert a.http.get("/version").json()["upstreams"] == ["b", "c"]
        assert a.chat("x", max_tokens=5).status_code == 200
        assert "only one can be" in join(c, a)["detail"]
        for server in (a, b, c):
            part(server)
