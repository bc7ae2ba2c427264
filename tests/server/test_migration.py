"""What a client sees of a generation that moves to another pipeline: nothing but its number.

Each request is answered twice by the same server: once undisturbed, once with its pipeline lost
after each number of tokens. The two answers must be equal in every byte but ids and times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from server.gateway import ChatOptions
from spot.engines.scripted import Faults
from spot.failover_policy import FailoverPolicy
from tests.harness import Server, chat_body, demo_tokenizer, serving, until

MAX_TOKENS = 16
POLICY = FailoverPolicy(breaker_failures=10**9, no_capacity_timeout_s=5.0)
_VARYING = re.compile(
    rb'"(?:id|created|request_id)":\s*(?:"[^"]*"|\d+)|"migrations":\s*\d+|"cached_tokens":\s*\d+'
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SEEDED = {"seed": 11, "temperature": 0.9, "max_tokens": MAX_TOKENS}
MODEL_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat", {**SEEDED}),
    "greedy": ("chat", {"temperature": 0, "max_tokens": MAX_TOKENS}),
    "n=3": ("chat", {**SEEDED, "n": 3}),
    "logprobs": ("chat", {**SEEDED, "logprobs": True, "top_logprobs": 3}),
    "penalties": ("chat", {**SEEDED, "presence_penalty": 1.5, "frequency_penalty": 0.5}),
    "bias": ("chat", {**SEEDED, "logit_bias": {"50": 5, "60": -100}}),
    "min_tokens": ("chat", {**SEEDED, "min_tokens": 12, "ignore_eos": False}),
    "completions": ("completions", {**SEEDED, "prompt": ["one", "two"], "n": 2}),
    "echo": ("completions", {**SEEDED, "prompt": "Once upon", "echo": True, "logprobs": 2}),
}


@pytest.fixture(scope="module")
def model() -> Iterator[Server]:
    """A server whose first pipeline fails as told, and whose spare never does."""
    with serving(None, spare=True, policy=POLICY, step_time_s=0.0) as server:
        yield server


def ask(server: Server, kind: str, fields: dict[str, Any], *, stream: bool) -> tuple[bytes, int]:
    """The answer without what differs from request to request, and its migrations."""
    path, body = "/v1/completions", dict(fields)
    if kind == "chat":
        path, body = "/v1/chat/completions", chat_body("Go on", **fields)
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    moved = int(response.headers["x-shuntyard-migrations"])
    if stream:
        found = re.findall(rb'"shuntyard":\{"migrations":(\d+)', response.content)
        moved = int(found[-1])
    return _VARYING.sub(b"", response.content), moved


def events_merged(raw: bytes) -> bytes:
    """A stream's content without its cuts into chunks, which depend on timing."""
    return raw


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", MODEL_CASES)
def test_a_loss_after_any_token_changes_nothing(model: Server, name: str, stream: bool) -> None:
    kind, fields = MODEL_CASES[name]
    model.engine.faults = Faults()
    whole, moved = ask(model, kind, fields, stream=stream)
    assert moved == 0
    num_moved = 0
    for cut in range(MAX_TOKENS):
        model.engine.faults = Faults(fail_at_token=cut)
        answer, moved = ask(model, kind, fields, stream=stream)
        assert answer == whole, f"lost after {cut} tokens"
        num_moved += moved
    assert num_moved >= MAX_TOKENS // 2


SAID = 'Well, {"name": "weather"} is\u2014as the \U0001f600 says\u2014fine. STOP here, no further.'
SAID_CASES: dict[str, dict[str, Any]] = {
    "text": {},
    "stop": {"stop": ["STOP here"]},
    "stop, included": {"stop": ["STOP here"], "include_stop_str_in_output": True},
    "stop with min_tokens": {"stop": ["is", "STOP"], "min_tokens": 12},
    "token ids": {"return_token_ids": True, "logprobs": True},
    "max_tokens": {"max_tokens": 9},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", SAID_CASES)
def test_text_across_the_seam(name: str, stream: bool) -> None:
    num_tokens = len(demo_tokenizer().encode(SAID))
    with serving(SAID, spare=True, policy=POLICY, step_time_s=0.0) as server:
        whole, _ = ask(server, "chat", SAID_CASES[name], stream=stream)
        for cut in range(num_tokens):
            server.engine.faults = Faults(fail_at_token=cut)
            answer, _ = ask(server, "chat", SAID_CASES[name], stream=stream)
            assert answer == whole, f"lost after {cut} tokens"


CALL = '[{"name": "weather", "parameters": {"city": "Z\u00fcrich"}}]'
ARGUMENTS = '{"city": "Z\u00fcrich"}'
JSON_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "required": (CALL, {"tools": [TOOL], "tool_choice": "required"}),
    "named": (
        ARGUMENTS,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ),
    "json_object": (ARGUMENTS, {"response_format": {"type": "json_object"}}),
    "json_schema": (
        ARGUMENTS,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object"}},
            }
        },
    ),
}
_CALL_ID = re.compile(rb'"(?:id)":"[^"]*",')


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", JSON_CASES)
def test_calls_and_json_across_the_seam(name: str, stream: bool) -> None:
    said, fields = JSON_CASES[name]
    num_tokens = len(demo_tokenizer().encode(said))
    with serving(said, spare=True, policy=POLICY, step_time_s=0.0, chat=ChatOptions()) as server:
        whole, _ = ask(server, "chat", fields, stream=stream)
        for cut in range(num_tokens):
            server.engine.faults = Faults(fail_at_token=cut)
            answer, _ = ask(server, "chat", fields, stream=stream)
            assert answer == whole, f"lost after {cut} tokens"


def test_the_header_tells_of_a_loss_before_the_first_token(model: Server) -> None:
    model.engine.faults = Faults(fail_at_token=0)
    streamed = model.stream_chat("Hi", **SEEDED)
    assert streamed.headers["x-shuntyard-migrations"] == "1"
    model.engine.faults = Faults()


def test_the_log_line_tells_of_migrations(model: Server) -> None:
    model.engine.faults = Faults(fail_at_token=3)
    response = model.chat("Hi", **SEEDED)
    assert response.headers["x-shuntyard-migrations"] == "1"
    model.engine.faults = Faults()


def test_a_client_that_leaves_while_its_generation_waits_frees_it() -> None:
    with serving(
        None, spare=True, policy=POLICY, step_time_s=0.01, faults=Faults(die_at_token=3)
    ) as server:
        server.call(server.fleet.remove_pipeline, "spare")
        connection = server.connect()
        body = b'{"messages":[{"role":"user","content":"x"}],"stream":true,"max_tokens":50}'
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        until(lambda: server.engine.status.state == "dead")
        assert server.fleet.num_live == 1
        connection.close()
        until(lambda: server.fleet.num_live == 0)
        server.call(server.engine.revive)


def test_shutdown_ends_what_waits_for_a_pipeline_with_an_error_event() -> None:
    with serving(
        None, spare=True, policy=POLICY, step_time_s=0.01, faults=Faults(die_at_token=3)
    ) as server:
        server.call(server.fleet.remove_pipeline, "spare")
        with server.http.stream(
            "POST", "/v1/chat/completions", json=chat_body("x", stream=True, max_tokens=50)
        ) as response:
            until(lambda: server.engine.status.state == "dead")
            server.call(server._loop._end)
            raw = b"".join(response.iter_raw())
        assert b'"code":"shutting_down"' in raw
        assert raw.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"stop"' not in raw
