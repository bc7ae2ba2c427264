"""`/v1/responses`: shapes by the official package's types, event order, what is stored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseItemList,
    ResponseStreamEvent,
)
from pydantic import BaseModel, TypeAdapter

from server.app import HttpOptions
from server.gateway import ChatOptions
from server.protocol.response_object import InputItemList, ResponseEvent, ResponseObject
from server.sampling import SamplingDefaults
from spot.engines.scripted import Faults
from spot.engines.vllm_compat.parsers import load_parser_factory
from spot.errors import EngineFailed
from tests.fakes import ThinkSource
from tests.harness import Server, demo_tokenizer, http_request, serving, until

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "42"}
TERMINAL = ("response.completed", "response.incomplete", "response.failed")
MISSING, VALUE = "missing_required_parameter", "invalid_value"
INT64_MAX = 2**63 - 1

_event = TypeAdapter[Any](ResponseStreamEvent)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("The answer.", names=("demo", "alias")) as running:
        yield running


def create(server: Server, given: Any = "Hi", **fields: Any) -> dict[str, Any]:
    """The response object, checked by the package's types and by ours."""
    answer = server.post(PATH, {"input": given, **fields})
    assert answer.status_code == 200, answer.text
    return checked(answer.json())


def checked(response: dict[str, Any]) -> dict[str, Any]:
    Response.model_validate(response, strict=True)
    ResponseObject.model_validate(response, extra="forbid")
    return response


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each checked by the package's types and by ours."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = []
    assert answer.text.endswith("\n\n")
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(events)
        _event.validate_python(event, strict=True)
        ResponseEvent.model_validate(event, extra="forbid")
        events.append(event)
    return events


def stream(server: Server, given: Any = "Hi", **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream that ends well, in the right order."""
    events = events_of(server.post(PATH, {"input": given, "stream": True, **fields}))
    check_order(events)
    return events


def check_order(events: list[dict[str, Any]]) -> None:
    """Begins and ends as it must; each `added` is closed by its `done`; deltas are the whole."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in TERMINAL
    assert sum(kind in TERMINAL for kind in kinds) == 1
    ids = {event["response"]["id"] for event in events if "response" in event}
    assert len(ids) == 1
    open_things: list[tuple[str, Any]] = []
    done: list[Any] = []
    text = ""
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(done)
        if kind == "output_item.added":
            assert not open_things
            open_things.append(("output_item", event["item"]["id"]))
            text = ""
            continue
        name, item_id = open_things[-1]
        assert (event["item"]["id"] if "item" in event else event["item_id"]) == item_id
        if kind == "content_part.added":
            assert name == "output_item"
            open_things.append(("content_part", item_id))
        elif kind.endswith(".delta"):
            assert name == ("output_item" if "arguments" in kind else "content_part")
            text += event["delta"]
        elif kind.endswith(("text.done", "arguments.done")):
            assert event.get("text", event.get("arguments")) == text
        else:
            assert kind == f"{name}.done"
            open_things.pop()
            if name == "output_item":
                done.append(event["item"])
    assert not open_things
    assert events[-1]["response"]["output"] == done


def output_text(response: dict[str, Any]) -> str:
    return Response.model_validate(response).output_text


def kinds_of(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def without_ids(item: Any) -> Any:
    if isinstance(item, dict):
        changing = ("id", "call_id", "created_at", "completed_at")
        return {key: without_ids(value) for key, value in item.items() if key not in changing}
    return [without_ids(value) for value in item] if isinstance(item, list) else item


def prompt(server: Server) -> str:
    """The text of the last prompt that the engine was given."""
    return server.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids)


# Answers


def test_a_whole_answer(server: Server) -> None:
    response = create(server, instructions="Be kind.", metadata={"a": "b"}, user="u")
    assert response["id"].startswith("resp_")
    assert response["object"] == "response"
    assert response["status"] == "completed"
    assert response["model"] == "demo"
    assert (response["error"], response["incomplete_details"]) == (None, None)
    assert response["instructions"] == "Be kind."
    assert response["metadata"] == {"a": "b"}
    (message,) = response["output"]
    assert message["id"].startswith("msg_")
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert message["content"] == [
        {"type": "output_text", "text": "The answer.", "annotations": [], "logprobs": []}
    ]
    usage = response["usage"]
    assert usage["input_tokens"] == len(server.engine.submitted[-1].prompt_token_ids)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_a_stream_says_the_same_as_a_whole_answer(server: Server) -> None:
    events = stream(server)
    deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert "".join(deltas) == "The answer."
    assert len(deltas) > 1
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["usage"] is None
    assert without_ids(events[-1]["response"]) == without_ids(create(server))


def test_settings_are_echoed() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9)
    with serving("hi", defaults=defaults) as server:
        plain = create(server)
        assert (plain["temperature"], plain["top_p"]) == (0.6, 0.9)
        assert plain["tools"] == []
        assert (plain["tool_choice"], plain["parallel_tool_calls"]) == ("auto", True)
        assert plain["text"]["format"] == {"type": "text"}
        assert (plain["truncation"], plain["store"]) == ("disabled", True)
        schema = {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}
        fields = {
            "temperature": 0.0,
            "top_p": 0,
            "tools": [{**TOOL, "description": "does it", "strict": True}],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "text": {"format": schema, "verbosity": "low"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "truncation": "auto",
            "max_output_tokens": 7,
            "store": False,
            "prompt_cache_key": "k",
            "safety_identifier": "s",
            "top_logprobs": 3,
        }
        echoed = create(server, **fields)
        assert {name: echoed[name] for name in fields} == fields
        choice = {"type": "function", "name": "f"}
        assert create(server, tools=[TOOL], tool_choice=choice)["tool_choice"] == choice


def test_sampling_reaches_the_engine(server: Server) -> None:
    create(server, temperature=0.3, top_k=5, seed=7, max_output_tokens=9, min_tokens=1)
    sampling = server.engine.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.3, 5, 7)
    assert (sampling.max_tokens, sampling.min_tokens) == (9, 1)


def test_stop_strings_end_an_answer(server: Server) -> None:
    response = create(server, stop=["answer"])
    assert output_text(response) == "The "
    assert response["status"] == "completed"


def test_a_cut_answer_is_incomplete_and_so_is_its_last_item(server: Server) -> None:
    for response in (
        create(server, max_output_tokens=1),
        stream(server, max_output_tokens=1)[-1]["response"],
    ):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][-1]["status"] == "incomplete"
        assert response["completed_at"] is None
        assert response["usage"]["output_tokens"] == 1


def test_an_empty_answer_has_an_empty_message() -> None:
    with serving("") as server:
        for response in (create(server), stream(server)[-1]["response"]):
            assert output_text(response) == ""
            assert kinds_of(response) == ["message"]


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
def test_reasoning_is_an_item_of_its_own(tokens_per_step: int) -> None:
    chat = ChatOptions(has_reasoning_parser=True, parsers=ThinkSource())
    text = "<think>because of this</think>\n\nthe answer"
    with serving(text, chat=chat, tokens_per_step=tokens_per_step) as server:
        for response in (create(server), stream(server)[-1]["response"]):
            reasoning, message = response["output"]
            assert reasoning["content"] == [{"type": "reasoning_text", "text": "because of this"}]
            assert reasoning["summary"] == []
            assert message["content"][0]["text"] == "\n\nthe answer"
            assert response["usage"]["output_tokens_details"]["reasoning_tokens"] >= 3
        hidden = create(server, include_reasoning=False)
        assert kinds_of(hidden) == ["message"]
        cut = create(server, max_output_tokens=6)
        assert [item["status"] for item in cut["output"]] == ["incomplete"]
        assert kinds_of(cut) == ["reasoning"]


def test_logprobs_come_with_the_text() -> None:
    with serving(None, step_time_s=0) as server:
        fields = {
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "max_output_tokens": 8,
            "seed": 1,
        }
        whole = create(server, **fields)
        (part,) = whole["output"][0]["content"]
        assert len(part["logprobs"]) == 8
        assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
        assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
        events = stream(server, **fields)
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [e for delta in deltas for e in delta["logprobs"]] == part["logprobs"]
        assert create(server, max_output_tokens=3)["output"][0]["content"][0]["logprobs"] == []


# Input


def test_instructions_come_first(server: Server) -> None:
    create(server, [{"role": "user", "content": "first"}], instructions="Be kind.")
    assert prompt(server).index("Be kind.") < prompt(server).index("first")


def test_a_text_and_a_message_are_the_same(server: Server) -> None:
    prompts = []
    for text in (
        "Hello you",
        [{"role": "user", "content": "Hello you"}],
        [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "Hello you"}],
            }
        ],
    ):
        create(server, text)
        prompts.append(prompt(server))
    assert len(set(prompts)) == 1


def test_an_answers_output_can_be_sent_back(server: Server) -> None:
    first = create(server, "One")
    history = [{"role": "user", "content": "One"}, *first["output"]]
    create(server, [*history, {"role": "user", "content": "Two"}])
    assert prompt(server).index("One") < prompt(server).index("The answer.")
    assert prompt(server).index("The answer.") < prompt(server).index("Two")


def test_too_long_is_refused_unless_it_may_be_truncated() -> None:
    with serving("ok", max_model_len=400) as server:
        turns = [{"role": "user", "content": f"turn {n} " + "word " * 50} for n in range(20)]
        items = [{"role": "system", "content": "Be kind."}, *turns]
        answer = server.post(PATH, {"input": items})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["param"] == "input"
        create(server, items, truncation="auto")
        assert "Be kind." in prompt(server)
        assert "turn 19" in prompt(server)
        assert "turn 0 " not in prompt(server)
        assert len(server.engine.submitted[-1].prompt_token_ids) <= 300
        huge = [{"role": "user", "content": "word " * 1000}]
        answer = server.post(PATH, {"input": huge, "truncation": "auto"})
        assert answer.json()["error"]["code"] == "context_length_exceeded"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", VALUE),
    ({"input": 5}, "input", VALUE),
    ({"input": []}, "input", VALUE),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", VALUE),
    ({"input": [5]}, "input.0", VALUE),
    ({"input": [{}]}, "input.0.type", MISSING),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0.type", VALUE),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", VALUE),
    ({"input": [{"role": "user"}]}, "input.0.content", MISSING),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content.0.type",
        "not_supported",
    ),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id", MISSING),
    ({"input": [RESULT]}, "input.0.call_id", VALUE),
    ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input.0.id", VALUE),
    ({"model": "other"}, "model", "model_not_found"),
    ({"instructions": 5}, "instructions", VALUE),
    ({"max_output_tokens": 0}, "max_output_tokens", VALUE),
    ({"max_output_tokens": "7"}, "max_output_tokens", VALUE),
    ({"max_output_tokens": INT64_MAX}, "max_output_tokens", VALUE),
    ({"temperature": 2.1}, "temperature", VALUE),
    ({"temperature": True}, "temperature", VALUE),
    ({"top_p": -0.1}, "top_p", VALUE),
    ({"top_logprobs": 21}, "top_logprobs", VALUE),
    ({"stream": "yes"}, "stream", VALUE),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options", VALUE),
    ({"store": "yes"}, "store", VALUE),
    ({"metadata": {"a": 1}}, "metadata.a", VALUE),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata", VALUE),
    ({"include": ["everything"]}, "include.0", VALUE),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", VALUE),
    ({"tools": [{"type": "function"}]}, "tools.0.name", MISSING),
    ({"tools": [{**TOOL, "parameters": 5}]}, "tools.0.parameters", VALUE),
    (
        {"tools": [{**TOOL, "parameters": {"$defs": 5}}], "tool_choice": "required"},
        "tools.0.parameters.$defs",
        VALUE,
    ),
    ({"tools": [TOOL]}, "tool_choice", "unsupported_value"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice", VALUE),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice.name",
        VALUE,
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", VALUE),
    ({"tool_choice": "required"}, "tool_choice", VALUE),
    ({"text": {"format": {"type": "xml"}}}, "text.format", VALUE),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name", MISSING),
    ({"text": {"format": {"type": "json_schema", "name": "s"}}}, "text.format.schema", MISSING),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", VALUE),
    ({"truncation": "middle"}, "truncation", VALUE),
    ({"background": True}, "background", VALUE),
    ({"conversation": "conv_1"}, "conversation", VALUE),
    ({"prompt": {"id": "p"}}, "prompt", VALUE),
    ({"n": 2}, "n", VALUE),
    ({"response_format": {"type": "json_object"}}, "response_format", VALUE),
    ({"previous_response_id": "resp_x"}, "previous_response_id", "previous_response_not_found"),
    ({"previous_response_id": 5}, "previous_response_id", VALUE),
    ({"guided_json": {}, "functions": [1]}, "guided_json", "unsupported_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_what_is_refused(
    server: Server, fields: dict[str, Any], param: str, code: str, streamed: bool
) -> None:
    if streamed and "stream_options" in fields:
        pytest.skip("allowed in streams")
    num_before = len(server.engine.submitted)
    answer = server.post(PATH, {"input": "Hi", "stream": streamed, **fields})
    error = answer.json()["error"]
    assert answer.status_code == (404 if code == "model_not_found" else 400), error
    assert (error["param"], error["code"]) == (param, code), error
    for word in ("messages", "response_format", "max_completion_tokens", "json_schema."):
        assert word not in error["message"] or word in fields
    assert len(server.engine.submitted) == num_before


@pytest.mark.parametrize(
    "fields",
    [
        {"model": None},
        {"model": ""},
        {"model": "alias"},
        {"input": ""},
        {"instructions": None},
        {"tools": []},
        {"tools": [], "tool_choice": "auto"},
        {"tools": None, "tool_choice": None},
        {"background": False, "conversation": None, "prompt": None},
        {"metadata": None, "include": None, "text": None, "reasoning": None, "store": None},
        {"text": {}, "reasoning": {}},
        {"text": {"format": None, "verbosity": "high"}},
        {"include": ["reasoning.encrypted_content"]},
        {"service_tier": "flex", "prompt_cache_retention": "24h", "max_tool_calls": 3},
        {"input": [{"role": "user", "content": "a"}, {"type": "reasoning", "summary": []}]},
        {"input": [{"role": "user", "content": "a", "phase": "commentary"}], "unknown": 1},
        {"input": [{"role": "user", "content": "a"}, CALL, RESULT]},
        {"n": 1, "response_format": None},
    ],
    ids=str,
)
def test_what_is_accepted(server: Server, fields: dict[str, Any]) -> None:
    assert output_text(create(server, **fields)) == "The answer."


def test_a_body_without_input_lacks_it(server: Server) -> None:
    error = server.post(PATH, {}).json()["error"]
    assert (error["param"], error["code"]) == ("input", MISSING)


# Tools


def test_a_required_call_and_its_result() -> None:
    calls = '[{"name": "f", "parameters": {"a": 1}}, {"name": "f", "parameters": {}}]'
    with serving(calls) as server:
        for response in (
            create(server, tools=[TOOL], tool_choice="required"),
            stream(server, tools=[TOOL], tool_choice="required")[-1]["response"],
        ):
            assert kinds_of(response) == ["function_call", "function_call"]
            assert [json.loads(item["arguments"]) for item in response["output"]] == [{"a": 1}, {}]
            assert response["status"] == "completed"
            first, second = (item["call_id"] for item in response["output"])
            assert first != second
        results = [
            {"type": "function_call_output", "call_id": first, "output": "forty-two"},
            {
                "type": "function_call_output",
                "call_id": second,
                "output": [{"type": "input_text", "text": "forty-three"}],
            },
        ]
        create(
            server, results, tools=[TOOL], tool_choice="none", previous_response_id=response["id"]
        )
        assert "forty-two" in prompt(server)
        assert "forty-three" in prompt(server)


def test_at_most_one_call_if_asked_for() -> None:
    calls = '[{"name": "f", "parameters": {}}, {"name": "f", "parameters": {}}]'
    with serving(calls) as server:
        fields = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        assert kinds_of(create(server, **fields)) == ["function_call"]
        assert kinds_of(stream(server, **fields)[-1]["response"]) == ["function_call"]


def test_a_named_call() -> None:
    with serving('{"a": 1}') as server:
        fields = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}
        for response in (create(server, **fields), stream(server, **fields)[-1]["response"]):
            (call,) = response["output"]
            assert (call["name"], call["arguments"]) == ("f", '{"a": 1}')


@pytest.mark.parametrize("tokens_per_step", [1, 4, 100])
def test_calls_that_the_model_chooses(tokens_per_step: int) -> None:
    tokenizer = demo_tokenizer()
    chat = ChatOptions(
        enable_auto_tool_choice=True,
        has_tool_parser=True,
        parsers=load_parser_factory("hermes", None, tokenizer.hf),
    )
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    with serving(f"Well.\n{call}\n{call}", chat=chat, tokens_per_step=tokens_per_step) as server:
        for response in (
            create(server, tools=[TOOL]),
            stream(server, tools=[TOOL])[-1]["response"],
        ):
            assert kinds_of(response) == ["message", "function_call", "function_call"]
            assert output_text(response).strip() == "Well."
            assert json.loads(response["output"][1]["arguments"]) == {"a": 1}
        cut = create(server, tools=[TOOL], max_output_tokens=20)
        assert (cut["status"], cut["output"][-1]["status"]) == ("incomplete", "incomplete")


# Failures


def test_a_failure_before_the_first_output_is_a_plain_error() -> None:
    with serving("word " * 20, faults=Faults(fail_at_token=0)) as server:
        for streamed in (False, True):
            answer = server.post(PATH, {"input": "Hi", "stream": streamed})
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "engine_failed"


def test_a_failure_later_is_an_error_event_and_a_failed_response() -> None:
    with serving("word " * 20, faults=Faults(fail_at_token=5)) as server:
        events = events_of(server.post(PATH, {"input": "Hi", "stream": True}))
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-2:] == ["error", "response.failed"]
        assert sum(kind in TERMINAL for kind in kinds) == 1
        assert events[-2]["code"] == "engine_failed"
        failed = checked(events[-1]["response"])
        assert failed["status"] == "failed"
        assert failed["error"]["code"] == "server_error"
        assert failed["output"][0]["status"] == "incomplete"
        assert output_text(failed).startswith("word word")
        assert server.http.get(f"{PATH}/{failed['id']}").json() == failed
        assert server.post(PATH, {"input": "Hi"}).status_code == 500


def test_a_failure_behind_a_comment_still_begins_a_response() -> None:
    faults = Faults(stall_at_token=0)
    with serving("word", faults=faults, keep_alive_s=0.05) as server:
        request = {"input": "Hi", "stream": True}
        with server.http.stream("POST", PATH, json=request) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith(":")
            server.call(server.gateway.end_all, EngineFailed("The engine is gone."))
            rest = "\n".join(lines)
        kinds = [line for line in rest.split("\n") if line.startswith("event: ")]
        assert kinds == [
            "event: response.created",
            "event: response.in_progress",
            "event: error",
            "event: response.failed",
        ]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stall_at_token", [0, 3])
def test_a_client_that_leaves_stops_its_answer(streamed: bool, stall_at_token: int) -> None:
    with serving("word " * 20, faults=Faults(stall_at_token=stall_at_token)) as server:
        body = json.dumps({"input": "Hi", "stream": streamed}).encode()
        with server.connect() as connection:
            connection.sendall(http_request(PATH, body))
            until(lambda: server.engine.stats.running == 1)
        until(lambda: len(server.engine.aborted) == 1)
        until(lambda: server.load == 0)


# What is stored


def test_a_response_can_be_retrieved_and_deleted(server: Server) -> None:
    for response in (create(server), stream(server)[-1]["response"]):
        path = f"{PATH}/{response['id']}"
        assert server.http.get(path).json() == response
        assert server.http.delete(path).json() == {
            "id": response["id"],
            "object": "response",
            "deleted": True,
        }
        for answer in (server.http.get(path), server.http.delete(path)):
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "response_not_found"


def test_what_is_not_to_be_stored_is_not(server: Server) -> None:
    response = create(server, store=False)
    assert server.http.get(f"{PATH}/{response['id']}").status_code == 404
    answer = server.post(PATH, {"input": "Hi", "previous_response_id": response["id"]})
    assert answer.json()["error"]["code"] == "previous_response_not_found"


def test_a_conversation_goes_on(server: Server) -> None:
    first = create(server, "One", instructions="Be kind.")
    second = create(server, "Two", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    text = prompt(server)
    assert text.index("One") < text.index("The answer.") < text.index("Two")
    assert "Be kind." not in text, "instructions are not carried over"
    server.http.delete(f"{PATH}/{first['id']}")
    stream(server, "Three", previous_response_id=second["id"])
    text = prompt(server)
    assert text.index("One") < text.index("Two") < text.index("Three")


def test_input_items_come_in_pages(server: Server) -> None:
    first = create(server, "One")
    items = [{"role": "user", "content": "Two"}, CALL, RESULT]
    second = create(server, items, previous_response_id=first["id"])
    path = f"{PATH}/{second['id']}/input_items"
    whole = server.http.get(path, params={"order": "asc"}).json()
    ResponseItemList.model_validate(whole, strict=True)
    InputItemList.model_validate(whole, extra="forbid")
    assert [item["type"] for item in whole["data"]] == [
        "message",
        "message",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert whole["has_more"] is False
    assert server.http.get(path).json()["data"] == whole["data"][::-1]
    seen = list(server.openai().responses.input_items.list(second["id"], limit=2, order="asc"))
    assert [item.id for item in seen] == [item["id"] for item in whole["data"]]


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "0"},
        {"limit": "101"},
        {"limit": "x"},
        {"limit": ""},
        {"order": "up"},
        {"after": "x"},
    ],
    ids=str,
)
def test_bad_pages_are_refused(server: Server, query: dict[str, str]) -> None:
    response = create(server)
    answer = server.http.get(f"{PATH}/{response['id']}/input_items", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(query))


def test_an_item_can_be_referred_to(server: Server) -> None:
    first = create(server, "One")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    create(server, [reference, {"role": "user", "content": "Two"}])
    assert "The answer." in prompt(server)


def test_nothing_can_be_cancelled(server: Server) -> None:
    response = create(server)
    assert server.post(f"{PATH}/{response['id']}/cancel", {}).status_code == 400
    assert server.post(f"{PATH}/resp_other/cancel", {}).status_code == 404
    assert server.post(PATH + "/{response_id}/cancel", {}).status_code == 404


def test_a_stored_response_is_not_streamed(server: Server) -> None:
    response = create(server)
    answer = server.http.get(f"{PATH}/{response['id']}", params={"stream": "true"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream"


def test_other_methods_are_named(server: Server) -> None:
    answer = server.http.put(f"{PATH}/resp_x")
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) >= {"GET", "DELETE"}


def test_tenants_are_strangers() -> None:
    with serving("ok", http=HttpOptions(api_keys={"sk-a": "a", "sk-b": "b"})) as server:
        mine, theirs = server.openai(api_key="sk-a"), server.openai(api_key="sk-b")
        response = mine.responses.create(model="demo", input="Hi")
        assert mine.responses.retrieve(response.id).id == response.id
        for attempt in (
            lambda: theirs.responses.retrieve(response.id),
            lambda: theirs.responses.delete(response.id),
            lambda: theirs.responses.cancel(response.id),
            lambda: theirs.responses.input_items.list(response.id),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
        with pytest.raises(openai.BadRequestError, match="not found"):
            theirs.responses.create(model="demo", input="Hi", previous_response_id=response.id)
        assert mine.responses.retrieve(response.id).id == response.id


# The official package


class Answered(BaseModel):
    word: str
    number: int


def test_parse_and_stream_with_a_type() -> None:
    with serving('{"word": "yes", "number": 3}') as server:
        client = server.openai()
        parsed = client.responses.parse(model="demo", input="Hi", text_format=Answered)
        assert parsed.output_parsed == Answered(word="yes", number=3)
        structured = server.engine.submitted[-1].sampling.structured
        assert structured is not None
        assert isinstance(structured.json_schema, dict)
        assert set(structured.json_schema["properties"]) == {"word", "number"}
        with client.responses.stream(model="demo", input="Hi", text_format=Answered) as events:
            kinds = [event.type for event in events]
            assert events.get_final_response().output_parsed == Answered(word="yes", number=3)
        assert kinds[-1] == "response.completed"


def test_the_stream_helper_follows_text(server: Server) -> None:
    with server.openai().responses.stream(model="demo", input="Hi") as events:
        snapshots = [e.snapshot for e in events if e.type == "response.output_text.delta"]
        assert events.get_final_response().output_text == "The answer."
    assert snapshots[-1] == "The answer."


def test_the_stream_helper_follows_calls() -> None:
    with serving('[{"name": "f", "parameters": {"a": 1}}]') as server:
        with server.openai().responses.stream(
            model="demo", input="Hi", tools=[{**TOOL, "strict": False}], tool_choice="required"
        ) as events:
            snapshots = [
                e.snapshot for e in events if e.type == "response.function_call_arguments.delta"
            ]
            (call,) = events.get_final_response().output
        assert snapshots[-1] == '{"a": 1}'
        assert call.type == "function_call"


def test_the_package_sees_a_failure() -> None:
    with serving("word " * 20, faults=Faults(fail_at_token=5)) as server:
        events = list(server.openai().responses.create(model="demo", input="Hi", stream=True))
        assert [event.type for event in events[-2:]] == ["error", "response.failed"]


def test_paths_work_without_the_version(server: Server) -> None:
    response = server.post("/responses", {"input": "Hi"}).json()
    assert server.http.get(f"/responses/{response['id']}").json() == response
