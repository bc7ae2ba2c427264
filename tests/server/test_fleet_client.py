"""The fleet's commands against a running server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import pytest

from server import cli
from server.fleet_client import seconds
from tests.harness import Server, until
from tests.server.endpoints.test_admin import admin_server, states


@pytest.fixture
def server() -> Iterator[Server]:
    with admin_server("secret") as running:
        running.http.headers["authorization"] = "Bearer secret"
        yield running


def run(server: Server, *arguments: str, key: str = "secret") -> int:
    return cli.main([*arguments, "--url", server.url, "--admin-key", key])


@pytest.mark.parametrize(
    ("text", "expected"), [("90", 90.0), ("120s", 120.0), ("2m", 120.0), ("1h", 3600.0), ("0", 0.0)]
)
def test_times_are_read(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "2 days", "nan", "1e3"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no time"):
        seconds(text)


def test_pipelines_are_listed(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "pipelines") == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split()[:3] == ["ID", "ENGINE", "STATE"]
    assert "spare" in shown
    assert run(server, "pipelines", "--json") == 0
    assert [item["id"] for item in json.loads(capsys.readouterr().out)] == ["first", "spare"]


def test_a_pipeline_is_drained_and_another_removed(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "drain", "first", "--deadline", "5s") == 0
    assert "nothing ran on it" in capsys.readouterr().out
    until(lambda: states(server) == {"spare": "serving"})
    assert run(server, "remove", "spare") == 0
    until(lambda: states(server) == {})


@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        (["remove", "nope"], "secret", "There is no pipeline nope; there is: first, spare."),
        (["drain", "a b"], "secret", "There is no pipeline a b"),
        (["pipelines"], "wrong", "admin key"),
    ],
)
def test_mistakes_are_told_in_a_line(
    server: Server,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    key: str,
    says: str,
) -> None:
    assert run(server, *arguments, key=key) == 1
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_server_that_is_not_there_is_said_to_be_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pipelines", "--url", "http://127.0.0.1:9"]) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_the_metrics_speak_of_every_pipeline(server: Server) -> None:
    from server.fleet_metrics import FleetMetrics

    server.gateway.metrics.registry.register(FleetMetrics(server.fleet))
    assert server.chat("Hi", max_tokens=3).status_code == 200
    text = server.http.get("/metrics").text
    assert 'shuntyard_pipeline_serving{pipeline="first"} 1.0' in text
    assert 'shuntyard_pipeline_tokens_total{pipeline="first"} 3.0' in text
    assert "shuntyard_migrations_total 0.0" in text
