"""Workflows as YAML."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.asgi import MAX_YAML_BYTES
from tests.harness import Server, serving

PATH = "/v1/workflows"
DOCUMENT = """
nodes:
  - id: a
    op: template
    params: {value: {1: 2024-01-02, big: 1%s, text: "{{ inputs.q }}"}}   # a number as key, a date
inputs: {q: hi}
""" % ("0" * 30)
BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{two}: &{two} [{','.join([f'*{one}'] * 10)}]\n"
    for one, two in zip("abcdefgh", "bcdefghi", strict=True)
)
LONG_ALIASES = f"a: &a {'x' * 50_000}\nb: [{','.join(['*a'] * 1000)}]\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(script="Hello.") as server:
        yield server


def post(server: Server, text: str | bytes, kind: str = "application/yaml") -> httpx.Response:
    return server.http.post(PATH, content=text, headers={"Content-Type": kind})


@pytest.mark.parametrize("kind", ["application/yaml", "text/yaml; charset=utf-8"])
def test_a_body_may_be_yaml(server: Server, kind: str) -> None:
    run = post(server, DOCUMENT, kind).json()
    assert run["status"] == "completed"
    assert run["outputs"]["a"]["value"] == {"1": "2024-01-02", "big": 1e30, "text": "hi"}


@pytest.mark.parametrize(
    ("text", "status", "part"),
    [
        ("nodes: [", 400, "not a YAML document"),
        ("", 400, "not null"),
        ("- 1", 400, "object"),
        ("a: 1\na: 2", 400, "not a YAML document"),
        ("x: !!python/object/apply:os.system [ls]", 400, "not a YAML document"),
        ("x: !!binary aGk=", 400, "JSON has not"),
        ("x: &x [*x]", 400, "not a YAML document"),
        ("x: .nan", 400, "JSON has not"),
        ("2024-01-02: 1", 400, "JSON has not"),
        (b"\xff\xfe\xff", 400, "UTF-8"),
        (BOMB, 400, "aliases"),
        (LONG_ALIASES, 400, "aliases"),
        ("x" * (MAX_YAML_BYTES + 1), 413, "limit"),
    ],
)
def test_what_is_no_workflow_is_refused(
    server: Server, text: str | bytes, status: int, part: str
) -> None:
    answer = post(server, text)
    assert answer.status_code == status, answer.text
    assert part in answer.json()["error"]["message"]


def test_other_endpoints_take_json_only(server: Server) -> None:
    chat: Any = server.http.post(
        "/v1/chat/completions", content="a: 1", headers={"Content-Type": "application/yaml"}
    )
    assert chat.status_code == 415
