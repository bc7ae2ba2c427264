"""`model="workflow:NAME"` in chat completions, with what ships and stored documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from spot.engines.scripted import Faults
from tests.harness import Server, serving, until
from workflows import library

SUMMARY = "workflow:map-reduce-summary"
ASK = [{"role": "user", "content": "One. Two."}]
TYPED = ("question", "messages", "temperature", "seed", "other")
MINE: dict[str, dict[str, Any]] = {
    "echo": {
        "nodes": [
            {
                "id": "a",
                "op": "template",
                "params": {"value": ["{{ inputs.question }}", "{{ inputs.messages }}"]},
            }
        ],
        "outputs": {"answer": "{{ nodes.a.output.value | tojson }}"},
    },
    "two": {"nodes": [{"id": i, "op": "llm", "params": {"prompt": i}} for i in ("a", "b")]},
    "long": {
        "nodes": [
            {"id": "a", "op": "llm", "params": {"prompt": "x", "ignore_eos": True}},
        ],
        "outputs": "a",
    },
    "again": {
        "nodes": [
            {
                "id": "a",
                "op": "llm",
                "params": {"prompt": "x"},
                "retry": {"max_attempts": 2, "backoff_s": 0},
            }
        ],
        "outputs": "a",
    },
    "fails": {
        "nodes": [{"id": "a", "op": "template", "params": {"value": "{{ inputs.missing }}"}}],
    },
    "typed": {
        "input_schema": {
            "type": "object",
            "properties": {
                "question": {"type": "string"},
                "messages": {"type": "array"},
                "temperature": {"type": "number", "default": 7},
                "seed": {"type": "integer", "default": 3},
                "other": {"type": "string"},
            },
            "additionalProperties": False,
        },
        "nodes": [
            {
                "id": "a",
                "op": "template",
                "params": {"value": {name: "{{ inputs." + name + " }}" for name in TYPED}},
            }
        ],
        "outputs": {"answer": "{{ nodes.a.output.value | tojson }}"},
    },
}


@pytest.fixture(autouse=True)
def documents(monkeypatch: pytest.MonkeyPatch) -> None:
    every = {**library.shipped_templates(), **{n: {"description": n, **d} for n, d in MINE.items()}}
    monkeypatch.setattr(library, "shipped_templates", lambda: every)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(script="Hello there, you.", keep_alive_s=0.2) as server:
        yield server


def chat(server: Server, name: str, **body: Any) -> Any:
    body = {"model": f"workflow:{name}", "messages": ASK, **body}
    return server.post("/v1/chat/completions", body)


def content(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def chunks(server: Server, name: str, **body: Any) -> list[dict[str, Any]]:
    streamed = server.stream(
        "/v1/chat/completions", {"model": f"workflow:{name}", "messages": ASK, **body}
    )
    assert streamed.status == 200
    assert streamed.events[-1] == "[DONE]"
    return [json.loads(event) for event in streamed.events[:-1]]


def test_the_answer_is_a_chat_completion(server: Server) -> None:
    body = chat(server, "map-reduce-summary").json()
    assert body["object"] == "chat.completion"
    assert body["model"] == SUMMARY
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hello there, you.",
        "refusal": None,
    }
    assert choice["finish_reason"] == "stop"
    run = server.http.get(f"/v1/workflows/{body['workflow_run_id']}").json()
    assert body["usage"]["total_tokens"] == run["usage"]["total_tokens"]


def test_the_answers_node_streams_and_no_other(server: Server) -> None:
    found = chunks(server, "map-reduce-summary", stream_options={"include_usage": True})
    *parts, end, usage = found
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    texts = [one["choices"][0]["delta"]["content"] for one in parts[1:]]
    assert len(texts) > 2
    assert "".join(texts) == "Hello there, you."
    assert end["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 0
    assert {one["id"] for one in found} == {end["id"]}


def test_what_is_made_of_more_comes_in_one_piece(server: Server) -> None:
    parts = chunks(server, "two")
    texts = [one["choices"][0]["delta"].get("content") for one in parts]
    assert json.loads("".join(filter(None, texts))).keys() == {"a", "b"}


def test_declared_inputs_come_from_the_request_and_from_inputs(server: Server) -> None:
    messages = [{"role": "system", "content": "Be kind."}, *ASK]
    answer = chat(
        server, "typed", messages=messages, temperature=0.5, top_p=0.1, inputs={"other": "x"}
    )
    assert json.loads(content(answer)) == {
        "question": "One. Two.",
        "messages": messages,
        "temperature": 0.5,
        "seed": 3,
        "other": "x",
    }


def test_without_a_schema_the_question_and_the_messages_are_inputs(server: Server) -> None:
    seen = json.loads(content(chat(server, "echo")))
    assert seen == ["One. Two.", ASK]


@pytest.mark.parametrize(
    ("name", "body", "status", "param"),
    [
        ("nothing", {}, 404, "model"),
        ("", {}, 404, "model"),
        ("echo", {"n": 2}, 400, "n"),
        ("echo", {"logprobs": True}, 400, "logprobs"),
        ("echo", {"inputs": []}, 400, "inputs"),
        ("typed", {"inputs": {"nope": 1}}, 400, "inputs"),
        ("echo", {"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("fails", {}, 400, None),
        ("fails", {"stream": True}, 400, None),
    ],
)
def test_what_cannot_be_is_a_plain_error(
    server: Server, name: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    answer = chat(server, name, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_an_engine_that_is_gone_is_worth_another_try() -> None:
    with serving(faults=Faults(die_at_token=0)) as server:
        answer = chat(server, "long")
        assert answer.status_code in (500, 503)
        assert answer.json()["error"]["type"] == "server_error"


def test_a_client_that_leaves_ends_the_run() -> None:
    with serving(step_time_s=0.01) as server:
        body = {"model": "workflow:long", "messages": ASK, "stream": True}
        with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_lines())
        until(lambda: server.engine.stats.running + server.engine.stats.waiting == 0)


def test_another_try_says_nothing_twice_and_its_failure_ends_the_stream() -> None:
    with serving(script="Hello there, you.", faults=Faults(fail_at_token=2)) as server:
        *parts, end = chunks(server, "again")
        texts = [one["choices"][0]["delta"].get("content", "") for one in parts]
        assert "Hello there, you.".startswith("".join(texts))
        assert "".join(texts)
        assert end["error"]["type"] == "server_error"
        assert end["error"]["message"].startswith("The workflow failed: node a: ")
