"""What is replayed is what the engine said, and nothing else is replayed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.app import HttpOptions
from spot.engines.scripted import Faults
from spot.kept_outputs import KeptOutputs
from tests.harness import Server, chat_body, serving, until

HEADER = "x-shuntyard-shared"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHATS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"n": 2, "seed": 7, "temperature": 1.0},
    {"logprobs": True, "top_logprobs": 2},
    {"prompt_logprobs": 1},
    {"tools": [TOOL], "tool_choice": "none"},
    {"response_format": {"type": "json_object"}},
    {"return_token_ids": True},
]


def keeping(**options: Any) -> KeptOutputs:
    return KeptOutputs(**{"ttl_s": 3600, "max_bytes": 2**20, **options})


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("The answer is 42. Bye.", kept_outputs=keeping()) as running:
        yield running


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> str:
    """Another one for each test."""
    return str(request.node.name)


def same(answer: dict[str, Any]) -> dict[str, Any]:
    """What does not name the one answer."""
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


def num_run(server: Server) -> int:
    return len(server.engine.submitted)


@pytest.mark.parametrize("fields", CHATS)
def test_a_replay_is_what_the_engine_said(
    server: Server, prompt: str, fields: dict[str, Any]
) -> None:
    fields = {"temperature": 0, **fields}
    num_choices = fields.get("n", 1)
    first = server.chat(prompt, **fields)
    before = num_run(server)
    second = server.chat(prompt, **fields)
    assert num_run(server) == before
    assert ";cache" not in first.headers.get(HEADER, "")
    assert second.headers[HEADER] == f"{num_choices};cache={num_choices}"
    assert same(second.json()) == same(first.json())


@pytest.mark.parametrize("fields", [one for one in CHATS if "prompt_logprobs" not in one])
def test_a_replay_streams(server: Server, prompt: str, fields: dict[str, Any]) -> None:
    fields = {"temperature": 0, **fields}
    num_choices = fields.get("n", 1)
    first = server.chat(prompt, **fields).json()
    before = num_run(server)
    streamed = server.stream_chat(prompt, stream_options={"include_usage": True}, **fields)
    assert num_run(server) == before
    assert streamed.headers[HEADER] == f"{num_choices};cache={num_choices}"
    assert streamed.is_done
    assert streamed.usage == first["usage"]
    for choice in first["choices"]:
        index = choice["index"]
        assert streamed.text(index) == choice["message"]["content"]
        assert streamed.finish_reasons(index) == [choice["finish_reason"]]
        if choice["logprobs"] is not None:
            pieces = [piece["logprobs"] for piece in streamed.choices(index)]
            entries = [entry for piece in pieces if piece for entry in piece["content"]]
            assert entries == choice["logprobs"]["content"]


def test_a_replay_calls_the_same_tools() -> None:
    with serving('[{"name": "f", "parameters": {"a": 1}}]', kept_outputs=keeping()) as server:
        fields = {"temperature": 0, "tools": [TOOL], "tool_choice": "required"}
        first, second = (server.chat(**fields).json()["choices"][0] for _ in range(2))
        streamed = server.stream_chat(**fields)
        assert num_run(server) == 1
        (call,), (again,) = (one["message"]["tool_calls"] for one in (first, second))
        (piece,) = streamed.tool_calls()
        assert call["function"] == again["function"] == piece["function"]
        assert call["function"]["name"] == "f"
        # Calls are this answer's own.
        assert len({one["id"] for one in (call, again, piece)}) == 3
        reasons = [first["finish_reason"], second["finish_reason"], *streamed.finish_reasons()]
        assert reasons == ["tool_calls"] * 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Say it", "logprobs": 1}),
        ("/v1/completions", {"prompt": [[500, 501], [500, 502]], "echo": True}),
        ("/v1/responses", {"input": "Say it", "store": False}),
    ],
)
def test_other_endpoints_replay_as_well(server: Server, path: str, body: dict[str, Any]) -> None:
    body = {"temperature": 0, **body}
    first = server.post(path, body).json()
    before = num_run(server)
    second = server.post(path, body)
    assert num_run(server) == before
    assert ";cache=" in second.headers[HEADER]
    assert second.json()["usage"] == first["usage"]
    if path == "/v1/completions":
        assert second.json()["choices"] == first["choices"]
    else:
        texts = [answer["output"][0]["content"] for answer in (first, second.json())]
        assert texts[0] == texts[1]


def test_a_stop_string_cuts_a_replay_as_it_cuts_the_engine(server: Server, prompt: str) -> None:
    """Stop strings are not the engine's: what is asked for without one serves those with one."""
    server.chat(prompt, temperature=0)
    before = num_run(server)
    cut = server.chat(prompt, temperature=0, stop=["42"])
    assert num_run(server) == before
    assert cut.headers[HEADER] == "1;cache=1"
    choice = cut.json()["choices"][0]
    assert choice["message"]["content"] == "The answer is "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "42")
    run = server.chat(f"{prompt}, again", temperature=0, stop=["42"])
    assert same(run.json())["choices"] == same(cut.json())["choices"]
    assert run.json()["usage"]["completion_tokens"] == cut.json()["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 2},
        {"stop": ["42"]},
        {"temperature": 0.7},
        {"temperature": 0, "cache_salt": "first"},
    ],
)
def test_what_was_cut_sampled_or_salted_is_run_again(
    server: Server, prompt: str, fields: dict[str, Any]
) -> None:
    before = num_run(server)
    server.chat(prompt, **{"temperature": 0, **fields})
    if "cache_salt" in fields:
        fields = {**fields, "cache_salt": "second"}
    second = server.chat(prompt, **{"temperature": 0, **fields})
    assert num_run(server) == before + 2
    assert HEADER not in second.headers


def test_what_failed_is_run_again() -> None:
    with serving("Hi.", kept_outputs=keeping(), faults=Faults(fail_at_token=1)) as server:
        assert server.chat(temperature=0).status_code == 500
        server.engine.faults = Faults()
        answer = server.chat(temperature=0)
        assert HEADER not in answer.headers
        assert answer.json()["choices"][0]["message"]["content"] == "Hi."


def test_tenants_do_not_meet() -> None:
    http = HttpOptions(api_keys={"sk-a": "alice", "sk-b": "bob"})
    with serving("Hi.", http=http, salt_secret=b"s", kept_outputs=keeping()) as server:
        alice, bob = ({"authorization": f"Bearer sk-{name}"} for name in "ab")
        body = chat_body(temperature=0)
        path = "/v1/chat/completions"
        headers = [server.post(path, body, headers=one).headers for one in (alice, bob, alice)]
        assert [one.get(HEADER) for one in headers] == [None, None, "1;cache=1"]


def test_replays_are_counted_apart(server: Server, prompt: str) -> None:
    name = "shuntyard_shared_generations_total"
    before = server.metric(name, how="cache"), server.metric(name, how="inflight")
    for _ in range(2):
        server.chat(prompt, temperature=0, n=2)
    after = server.metric(name, how="cache"), server.metric(name, how="inflight")
    # The second choice of the first answer shares its first one's generation.
    assert (after[0] - before[0], after[1] - before[1]) == (2, 1)


def test_a_replay_waits_for_no_seat(server: Server, prompt: str) -> None:
    server.chat(prompt, temperature=0)
    before = server.metric("vllm:request_queue_time_seconds_count")
    server.chat(prompt, temperature=0)
    assert server.metric("vllm:request_queue_time_seconds_count") == before


def test_other_pipelines_may_say_something_else() -> None:
    kept = keeping()
    with serving("Hi.", spare=True, kept_outputs=kept) as server:
        server.chat(temperature=0)
        assert server.chat(temperature=0).headers[HEADER] == "1;cache=1"
        server.call(server.fleet.remove_pipeline, "spare")
        until(lambda: "spare" not in server.fleet.statuses())
        assert HEADER not in server.chat(temperature=0).headers


def test_a_replay_is_journaled_as_any_answer(tmp_path: Path) -> None:
    with serving("Hello there.", journal=tmp_path, kept_outputs=keeping()) as server:
        path, body = "/v1/chat/completions", chat_body(temperature=0)
        server.chat(temperature=0)
        first, again = (
            server.stream(path, body, headers={"x-request-id": "mine"}) for _ in range(2)
        )
        assert first.headers[HEADER] == "1;cache=1"
        assert HEADER not in again.headers
        assert again.text() == first.text() == "Hello there."
