"""Health, readiness, load, version and metrics, while things go well and while they do not."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.version import INSTANCE
from spot.engines.base import EngineStats
from spot.engines.scripted import Faults
from tests.harness import chat_body, http_request, serving, until


def test_health_is_empty_and_ready_says_who() -> None:
    with serving("x") as server:
        health = server.http.get("/health")
        assert (health.status_code, health.content) == (200, b"")
        ready = server.http.get("/ready")
        assert ready.json() == {"status": "ready", "model": "demo"}
        assert server.http.get("/version").json() == {
            "version": "0.0-test",
            "instance": INSTANCE,
            "upstreams": [],
        }
        assert server.http.get("/load").json() == {"server_load": 0}


def test_a_dead_engine_is_told_everywhere() -> None:
    with serving("x") as server:
        server.call(server.engine.die)
        for response in (
            server.http.get("/health"),
            server.http.get("/ready"),
            server.chat(),
            server.stream_chat(),
        ):
            status = getattr(response, "status_code", None) or response.status
            assert status == 503
            assert response.headers["retry-after"]
        assert server.chat().json()["error"]["code"] == "engine_unavailable"
        assert server.metric("shuntyard_engine_up") == 0
        server.call(server.engine.revive)
        assert server.http.get("/health").status_code == 200
        assert server.chat().status_code == 200
        assert server.metric("shuntyard_engine_up") == 1


def test_health_answers_while_the_engine_is_stuck() -> None:
    with serving("x", faults=Faults(stall_at_token=0)) as server:
        with server.connect() as connection:
            body = json.dumps(chat_body()).encode()
            connection.sendall(http_request("/v1/chat/completions", body))
            until(lambda: server.load == 1)
            assert server.http.get("/health").status_code == 200
            assert server.http.get("/load").json() == {"server_load": 1}
        until(lambda: server.load == 0)


def test_a_server_that_shuts_down_is_not_ready_but_alive() -> None:
    with serving("x") as server:
        server.gateway.admission.closed = True
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/ready").status_code == 503
        response = server.chat()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"


@pytest.mark.parametrize("path", ["/metrics", "/metrics/"])
def test_metrics_are_prometheus_text(path: str) -> None:
    with serving("a b") as server:
        server.chat()
        response = server.http.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        names = {family.name for family in text_string_to_metric_families(response.text)}
        assert {
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "vllm:prompt_tokens",
            "vllm:generation_tokens",
            "vllm:time_to_first_token_seconds",
            "vllm:request_success",
            "shuntyard_requests",
        } <= names


def test_the_load_of_the_engine_is_shown() -> None:
    with serving("x", faults=Faults(stall_at_token=0), max_num_seqs=1) as server:
        body = json.dumps(chat_body(n=3)).encode()
        with server.connect() as connection:
            connection.sendall(http_request("/v1/chat/completions", body))
            until(lambda: server.engine.stats == EngineStats(running=1, waiting=2))
            assert server.metric("vllm:num_requests_running") == 1
            assert server.metric("vllm:num_requests_waiting") == 2
            assert server.metric("shuntyard_requests_in_flight") == 1
        until(lambda: server.load == 0)
        assert len(server.engine.aborted) == 3


def test_one_request_alone_may_bring_more_than_the_queue_takes() -> None:
    with serving("x", max_num_seqs=1, max_queue=0) as server:
        assert server.chat(n=5).status_code == 200


def test_a_full_queue_is_a_429_before_any_work() -> None:
    with serving("x", faults=Faults(stall_at_token=0), max_num_seqs=2, max_queue=1) as server:
        body = json.dumps(chat_body(n=3)).encode()
        with server.connect() as connection:
            connection.sendall(http_request("/v1/chat/completions", body))
            until(lambda: len(server.engine.submitted) == 3)
            for response in (server.chat(), server.chat(stream=True)):
                assert response.status_code == 429
                assert response.json()["error"]["code"] == "overloaded"
                assert int(response.headers["retry-after"]) >= 1
            assert len(server.engine.submitted) == 3
        until(lambda: server.load == 0)
        assert server.metric("shuntyard_requests_total", outcome="rejected") == 2
