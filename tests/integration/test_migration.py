"""What clients get from two real engines in float32 when one is killed under them: the same."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tests.clients.live_server import LiveServer, live_server
from tests.harness import until

pytestmark = [pytest.mark.engine, pytest.mark.contract, pytest.mark.timeout(600)]

SEEDED = {"seed": 7, "temperature": 0.8, "ignore_eos": True, "max_tokens": 60}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "person", "parameters": SCHEMA}}
CASES: dict[str, dict[str, Any]] = {
    "n=3": {**SEEDED, "n": 3},
    "penalties": {**SEEDED, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "logprobs": {**SEEDED, "logprobs": True, "top_logprobs": 2},
    "bias and min_tokens": {**SEEDED, "logit_bias": {"28": 3}, "min_tokens": 40},
    "stop": {**SEEDED, "stop": [" the", "."], "min_tokens": 30},
    "schema": {
        "max_tokens": 80,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
    },
    "named tool": {
        "max_tokens": 80,
        "temperature": 0,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "person"}},
    },
    "echo": {**SEEDED, "prompt": "Once upon a time", "echo": True, "logprobs": 1},
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("--pipelines", "2", "--dtype", "float32") as running:
        until(lambda: states(running) == ["serving", "serving"], within_s=300)
        yield running


def states(server: LiveServer) -> list[str]:
    return [item["state"] for item in server.http.get("/admin/pipelines").json()]


def ask(server: LiveServer, fields: dict[str, Any], *, stream: bool) -> tuple[Any, int]:
    """All that a client can see, without ids and times, and how often it moved."""
    path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
    body = dict(fields)
    if "prompt" not in fields:
        body["messages"] = [{"role": "user", "content": "Tell me of a person."}]
    if not stream:
        response = server.http.post(path, json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        moved = int(response.headers["x-shuntyard-migrations"])
        choices = [_plain(choice) for choice in answer["choices"]]
        return (choices, answer["usage"]["completion_tokens"]), moved
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = server.http.post(path, json=body)
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert not any("error" in chunk for chunk in chunks), chunks[-1]
    usage, moved = chunks[-1]["usage"], chunks[-1]["shuntyard"]["migrations"]
    return (_joined(chunks), usage["completion_tokens"]), moved


def _joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Choices by index. How text is cut into chunks depends on time, and does not count."""
    joined: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        whole = joined.setdefault(
            choice["index"], {"text": "", "arguments": "", "logprobs": [], "finish": []}
        )
        delta = choice.get("delta", {})
        whole["text"] += choice.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            whole["arguments"] += call["function"]["arguments"]
        entries = choice.get("logprobs") or {}
        values = [entry["logprob"] for entry in entries.get("content") or []]
        whole["logprobs"] += _plain(values or entries.get("token_logprobs") or [])
        if choice["finish_reason"]:
            whole["finish"].append((choice["finish_reason"], choice.get("stop_reason")))
    return joined


def _plain(value: Any) -> Any:
    """Without ids, and with log probabilities as exact as float32 makes them over batches."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if name != "id"}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return pytest.approx(value, abs=2e-3) if isinstance(value, float) else value


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_killed_pipeline_changes_nothing(server: LiveServer, stream: bool) -> None:
    if server.process is None:
        pytest.skip("the server was not started here")
    until(lambda: states(server) == ["serving", "serving"], within_s=300)

    def run(fields: dict[str, Any]) -> tuple[Any, int]:
        return ask(server, fields, stream=stream)

    with ThreadPoolExecutor(len(CASES)) as pool:
        wholes = list(pool.map(run, CASES.values()))
        futures = [pool.submit(run, fields) for fields in CASES.values()]
        until(lambda: server.num_running >= len(CASES), within_s=30)
        time.sleep(1.0)
        busiest = max(
            server.http.get("/admin/pipelines").json(), key=lambda item: int(item["running"])
        )
        for pid in busiest["pids"]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        answers = [future.result() for future in futures]
    for name, (whole, _), (answer, _) in zip(CASES, wholes, answers, strict=True):
        assert answer == whole, name
    if stream:  # else the header says it of the first token only
        assert sum(moved for _, moved in answers) > 0
