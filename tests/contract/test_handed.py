"""Public bug reports about other servers, as tests of this one. Each test is named after its row.

The engine is scripted, so that a test can make it say, fail or stall as the report needs it.
"""

from __future__ import annotations

import base64
import copy
import importlib
import importlib.util
import json
import logging
import resource
import socket
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response

from server.app import HttpOptions
from server.endpoints.pooling import pooling_routes
from server.gateway import ChatOptions
from server.pools import PooledModel, Pools
from server.sampling import SamplingDefaults
from server.text.tokenizer import ChatTokenizer
from spot.engines.base import EngineStatus
from spot.engines.pooling import EmbedResult, ScoreResult
from spot.engines.scripted import Faults
from spot.engines.vllm_compat.parsers import load_parser_factory
from tests.fakes import ThinkSource
from tests.harness import (
    Server,
    byte_tokens,
    chat_body,
    http_request,
    say_each,
    serving,
    until,
)

pytestmark = pytest.mark.contract

USER = [{"role": "user", "content": "Hi"}]
USAGE = {"stream_options": {"include_usage": True}}
EMOJI = "안녕하세요! 👩‍👩‍👧‍👦 grüßt 😀😀 — 東京"


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    """A server that answers in a few words; for tests that change nothing about it."""
    with serving("The answer is plain.", names=("demo", "org/demo")) as server:
        yield server


@pytest.fixture(scope="module")
def seeded() -> Iterator[Server]:
    """A server with the seeded model: logits, sampling and log probabilities mean something."""
    with serving(None, step_time_s=0) as server:
        yield server


def invalid(response: httpx.Response, *, param: str | None = None) -> dict[str, Any]:
    """The error of a 400 in the envelope."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) - {"details"} == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    return dict(error)


def prompt_text(server: Server) -> str:
    """The prompt that the engine got last."""
    return server.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids)


@contextmanager
def abandoned(server: Server, raw: bytes, *, until_bytes: int = 0) -> Iterator[socket.socket]:
    """A client that sends a request, reads a little, and is gone after the block."""
    with server.connect() as connection:
        connection.sendall(raw)
        received = 0
        while received < until_bytes:
            received += len(connection.recv(65536))
        yield connection


# Streaming shape


def test_h01_engine_failure_mid_stream_is_an_error_frame() -> None:
    with serving("one two three four five", faults=Faults(die_at_token=3)) as server:
        stream = server.stream_chat()
        assert stream.status == 200
        assert stream.text() == "one two three"
        assert stream.error is not None
        assert stream.error["type"] == "server_error"
        assert stream.error["code"] == "engine_failed"
        assert stream.is_done
        assert stream.finish_reasons() == []


def test_h01_engine_failure_reaches_the_official_client() -> None:
    with serving("one two three four five", faults=Faults(die_at_token=3)) as server:
        chunks = server.openai().chat.completions.create(model="demo", messages=USER, stream=True)
        with pytest.raises(openai.APIError) as caught:
            list(chunks)
        assert "engine died" in caught.value.message


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_h02_usage_comes_in_a_chunk_of_its_own_after_the_finish(
    plain: Server, endpoint: str
) -> None:
    send = plain.stream_chat if endpoint == "chat" else plain.stream_complete
    stream = send(**USAGE)
    *_, finish, last = stream.chunks
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert finish.get("usage") is None
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == (
        last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
    )
    assert [chunk for chunk in stream.chunks if chunk.get("usage")] == [last]
    whole = plain.chat() if endpoint == "chat" else plain.complete()
    assert last["usage"] == whole.json()["usage"]


@pytest.mark.parametrize("streams", [False, True])
def test_h03_chat_n_is_honoured(tokenizer: ChatTokenizer, streams: bool) -> None:
    texts = ["first", "second choice", "the third choice"]
    with serving(say_each(tokenizer, *texts)) as server:
        if not streams:
            choices = server.chat(n=3).json()["choices"]
            assert [choice["index"] for choice in choices] == [0, 1, 2]
            assert [choice["message"]["content"] for choice in choices] == texts
            return
        stream = server.stream_chat(n=3)
        for index, text in enumerate(texts):
            pieces = stream.choices(index)
            assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in piece["delta"] for piece in pieces[1:])
            assert stream.text(index) == text
            assert stream.finish_reasons(index) == ["stop"]
            assert pieces[-1]["finish_reason"] == "stop"
        assert stream.choices(3) == []
        assert stream.is_done


def test_h04_failure_after_the_first_chunks_ends_with_error_and_done() -> None:
    with serving("one two three four", faults=Faults(fail_at_token=2)) as server:
        for stream in (server.stream_chat(**USAGE), server.stream_complete(**USAGE)):
            assert stream.text() == "one two"
            assert stream.error is not None
            assert stream.error["message"]
            assert stream.usage is None
            assert stream.is_done
        response = server.chat()
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_failed"


def test_h05_no_usage_chunk_unless_asked_for(plain: Server) -> None:
    for fields in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        for stream in (plain.stream_chat(**fields), plain.stream_complete(**fields)):
            assert stream.is_done
            assert all(chunk["choices"] for chunk in stream.chunks)


# Unicode


def test_h06_tokens_of_broken_utf8_do_not_end_the_request(tokenizer: ChatTokenizer) -> None:
    smile, han = "😀".encode(), "한".encode()
    broken = b"ok " + smile[:2] + smile + b"\x80\x80" + han[:1] + b"a" + han + smile[:3] + b" end"
    with serving(byte_tokens(tokenizer, broken)) as server:
        text = server.chat().json()["choices"][0]["message"]["content"]
        assert text == broken.decode("utf-8", "replace")
        stream = server.stream_chat()
        assert stream.text() == text
        assert stream.finish_reasons() == ["stop"]
        assert server.complete(max_tokens=100, logprobs=0).json()["choices"][0]["text"] == text


@pytest.mark.parametrize("escape", ["\\ud83d", "\\ude00", "\\ude00\\ud83d", "a\\udcf0z"])
@pytest.mark.parametrize(
    ("path", "template"),
    [
        ("/v1/chat/completions", '{"messages":[{"role":"user","content":"emoji %s"}]}'),
        ("/v1/completions", '{"prompt":"emoji %s"}'),
        ("/v1/completions", '{"prompt":"x","model":"%s"}'),
        ("/v1/completions", '{"prompt":"x","stop":["%s"]}'),
        ("/tokenize", '{"prompt":"%s"}'),
    ],
)
def test_h07_a_lone_surrogate_is_the_callers_error(
    plain: Server, path: str, template: str, escape: str
) -> None:
    body = (template % escape).encode()
    response = plain.http.post(path, content=body, headers={"content-type": "application/json"})
    invalid(response)


@pytest.mark.parametrize("tokens_per_step", [1, 2, 5])
def test_h08_characters_are_streamed_whole(tokens_per_step: int) -> None:
    with serving(EMOJI, tokens_per_step=tokens_per_step) as server:
        whole = server.chat().json()["choices"][0]["message"]["content"]
        assert whole == EMOJI
        for stream in (server.stream_chat(), server.stream_complete(max_tokens=500)):
            assert "\ufffd" not in stream.raw.decode()
            assert stream.text() == EMOJI


# Stop strings


@pytest.mark.parametrize("tokens_per_step", [1, 3, 50])
@pytest.mark.parametrize("stop", [["END"], "END"])
def test_h09_stop_text_is_excluded_or_included_once(stop: Any, tokens_per_step: int) -> None:
    with serving("before END after END", tokens_per_step=tokens_per_step) as server:
        for include, expected in ((False, "before "), (True, "before END")):
            fields = {"stop": stop, "include_stop_str_in_output": include}
            chat = server.chat(**fields).json()["choices"][0]
            assert chat["message"]["content"] == expected
            assert (chat["finish_reason"], chat["stop_reason"]) == ("stop", "END")
            assert server.stream_chat(**fields).text() == expected
            completion = server.complete(max_tokens=50, **fields).json()["choices"][0]
            assert completion["text"] == expected
            assert completion["finish_reason"] == "stop"
            stream = server.stream_complete(max_tokens=50, logprobs=1, **fields)
            assert stream.text() == expected
            assert stream.finish_reasons() == ["stop"]


def test_h09_stop_ends_the_generation_in_the_engine() -> None:
    with serving("a END " + "b " * 2000) as server:
        usage = server.chat(stop="END").json()["usage"]
        assert usage["completion_tokens"] < 10
        until(lambda: len(server.engine.aborted) == 1)


STOP_PREFIX_TEXT = "fine\nUse it\nUser: leak"


def test_h10_a_possible_stop_prefix_is_withheld_in_chat() -> None:
    with serving(STOP_PREFIX_TEXT) as server:
        stream = server.stream_chat(stop=["\nUser:"])
        assert stream.text() == "fine\nUse it"
        assert stream.finish_reasons() == ["stop"]
        assert server.stream_chat(stop=["\nUser: leaks"]).text() == STOP_PREFIX_TEXT


def test_h11_a_possible_stop_prefix_is_withheld_in_completions() -> None:
    with serving(STOP_PREFIX_TEXT) as server:
        stream = server.stream_complete(max_tokens=50, stop=["\nUser:"])
        assert stream.text() == "fine\nUse it"
        assert stream.finish_reasons() == ["stop"]
        unmatched = server.stream_complete(max_tokens=50, stop=["\nUser: leaks"])
        assert unmatched.text() == STOP_PREFIX_TEXT


@pytest.mark.parametrize("tokens_per_step", [1, 4])
def test_h12_stop_strings_look_at_visible_content_only(tokens_per_step: int) -> None:
    chat = ChatOptions(has_reasoning_parser=True, parsers=ThinkSource())
    text = "<think>first\n\nsecond</think>answer\n\nmore"
    with serving(text, chat=chat, tokens_per_step=tokens_per_step) as server:
        message = server.chat(stop=["\n\n"]).json()["choices"][0]["message"]
        assert message["content"] == "answer"
        assert message["reasoning"] == "first\n\nsecond"
        stream = server.stream_chat(stop=["\n\n"])
        assert stream.text() == "answer"
        assert stream.text(part="reasoning") == "first\n\nsecond"


# Token limits


def test_h13_echo_of_the_prompt_alone_with_logprobs(seeded: Server) -> None:
    fields = {"echo": True, "max_tokens": 0, "logprobs": 1}
    answer = seeded.complete("One two three", **fields).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "One two three"
    assert answer["usage"]["completion_tokens"] == 0
    assert "".join(choice["logprobs"]["tokens"]) == "One two three"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(isinstance(p, float) for p in choice["logprobs"]["token_logprobs"][1:])
    stream = seeded.stream_complete("One two three", **fields, **USAGE)
    assert stream.text() == "One two three"
    assert stream.usage == answer["usage"]


def test_h14_max_tokens_null_is_the_default(plain: Server) -> None:
    with serving("word " * 100) as server:
        for fields in ({"max_tokens": None}, {}):
            answer = server.complete(**fields).json()
            assert answer["usage"]["completion_tokens"] == 16
            assert answer["choices"][0]["finish_reason"] == "length"


def test_h15_max_tokens_is_an_upper_bound_not_a_reservation() -> None:
    with serving("word " * 200, max_model_len=100) as server:
        answer = server.complete([5] * 50, max_tokens=60).json()
        assert answer["usage"] == {
            "prompt_tokens": 50,
            "completion_tokens": 50,
            "total_tokens": 100,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert answer["choices"][0]["finish_reason"] == "length"
        chat = server.chat(max_completion_tokens=99).json()
        assert chat["usage"]["total_tokens"] == 100


# Log probabilities


def test_h16_echo_with_logprobs_and_top_k(seeded: Server) -> None:
    fields = {"echo": True, "logprobs": 1, "top_k": 1, "max_tokens": 4}
    response = seeded.complete("One two", **fields)
    assert response.status_code == 200
    logprobs = response.json()["choices"][0]["logprobs"]
    lengths = {len(values) for values in logprobs.values()}
    assert lengths == {len(seeded.tokenizer.encode("One two")) + 4}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]


def test_h17_completions_logprobs_hold_the_top_k_and_the_sampled_token(seeded: Server) -> None:
    fields = {"logprobs": 1, "temperature": 2.0, "seed": 7, "max_tokens": 64}
    whole = seeded.complete("Once", **fields).json()["choices"][0]["logprobs"]
    streamed = [
        piece["logprobs"]
        for piece in seeded.stream_complete("Once", **fields).choices()
        if piece["logprobs"]
    ]
    joined = {key: [v for block in streamed for v in block[key]] for key in whole}
    assert joined == whole
    outside = 0
    for token, logprob, top in zip(
        whole["tokens"], whole["token_logprobs"], whole["top_logprobs"], strict=True
    ):
        assert top[token] == logprob
        best = max(top.values())
        if logprob < best:
            outside += 1
            assert len(top) == 2
        else:
            assert len(top) == 1
    assert outside > 5, "the sampled token was never outside the top: nothing was tested"


# Tools

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"trigger": {"type": "boolean"}}},
        },
    }
    for name in ("f", "g")
]
CALL_TEXT = '<tool_call>\n{"name": "f", "arguments": {"trigger": true}}\n</tool_call>'
TWO_CALLS = CALL_TEXT + '\n<tool_call>\n{"name": "g", "arguments": {"x": [1, "}"]}}\n</tool_call>'
REQUIRED_TWO_CALLS = (
    '[{"name": "f", "parameters": {"trigger": true}}, {"name": "g", "parameters": {"x": [1, "}"]}}]'
)
NAMED_F = {"type": "function", "function": {"name": "f"}}


@contextmanager
def serving_tools(
    tokenizer: ChatTokenizer, text: str, *, thinks: bool = False, **options: Any
) -> Iterator[Server]:
    """A server with the Hermes parser, maybe behind a reasoning parser, whose model says `text`."""
    hermes = load_parser_factory("hermes", None, tokenizer.hf)
    chat = ChatOptions(
        enable_auto_tool_choice=True,
        has_tool_parser=True,
        has_reasoning_parser=thinks,
        parsers=ThinkSource(hermes) if thinks else hermes,
    )
    with serving(text, chat=chat, **options) as server:
        yield server


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and decoded arguments of an answer's calls."""
    return decoded(choice["message"].get("tool_calls", []))


def decoded(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in calls]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 4, 5, 100])
@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("auto", CALL_TEXT),
        ("required", '[{"name": "f", "parameters": {"trigger": true}}]'),
        (NAMED_F, '{"trigger": true}'),
    ],
)
def test_h18_arguments_are_the_same_at_any_chunking(
    tokenizer: ChatTokenizer, choice: Any, text: str, tokens_per_step: int
) -> None:
    with serving_tools(tokenizer, text, tokens_per_step=tokens_per_step) as server:
        fields = {"tools": TOOLS, "tool_choice": choice}
        answer = server.chat(**fields).json()["choices"][0]
        assert calls_of(answer) == [("f", {"trigger": True})]
        stream = server.stream_chat(**fields)
        assert decoded(stream.tool_calls()) == [("f", {"trigger": True})]
        assert stream.text() == ""
        expected = "stop" if choice == NAMED_F else "tool_calls"
        assert [answer["finish_reason"]] == stream.finish_reasons() == [expected]


@pytest.mark.parametrize("tokens_per_step", [1, 7, 100])
def test_h19_the_first_call_behind_reasoning_has_index_0(
    tokenizer: ChatTokenizer, tokens_per_step: int
) -> None:
    text = "<think>which one?</think>" + TWO_CALLS
    with serving_tools(tokenizer, text, thinks=True, tokens_per_step=tokens_per_step) as server:
        stream = server.stream_chat(tools=TOOLS)
        deltas = [choice["delta"] for choice in stream.choices()]
        indexes = [call["index"] for delta in deltas for call in delta.get("tool_calls", [])]
        assert indexes[0] == 0
        assert sorted(set(indexes)) == [0, 1]
        assert stream.text(part="reasoning") == "which one?"
        assert decoded(stream.tool_calls()) == [("f", {"trigger": True}), ("g", {"x": [1, "}"]})]
        message = server.chat(tools=TOOLS).json()["choices"][0]["message"]
        assert message["reasoning"] == "which one?"
        assert message["content"] is None
        assert len(message["tool_calls"]) == 2


def test_h20_two_streamed_calls_have_string_arguments_and_their_own_index(
    tokenizer: ChatTokenizer,
) -> None:
    for choice, text in (("auto", TWO_CALLS), ("required", REQUIRED_TWO_CALLS)):
        with serving_tools(tokenizer, text) as server:
            stream = server.stream_chat(tools=TOOLS, tool_choice=choice)
            assert len({chunk["id"] for chunk in stream.chunks}) == 1
            calls = stream.tool_calls()
            assert [call["function"]["name"] for call in calls] == ["f", "g"]
            assert decoded(calls) == [("f", {"trigger": True}), ("g", {"x": [1, "}"]})]
            assert len({call["id"] for call in calls}) == 2
            assert stream.finish_reasons() == ["tool_calls"]


@pytest.mark.parametrize(
    ("choice", "text"),
    [("auto", TWO_CALLS), ("required", REQUIRED_TWO_CALLS), (NAMED_F, '{"trigger": true, "x": 1}')],
)
def test_h21_a_cut_by_length_stays_visible_with_tools(
    tokenizer: ChatTokenizer, choice: Any, text: str
) -> None:
    with serving_tools(tokenizer, text) as server:
        for max_tokens in (1, 4, len(tokenizer.encode(text)) - 2):
            fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": max_tokens}
            answer = server.chat(**fields).json()["choices"][0]
            assert answer["finish_reason"] == "length"
            assert server.stream_chat(**fields).finish_reasons() == ["length"]


def test_h22_the_official_client_accumulates_streamed_calls_by_index(
    tokenizer: ChatTokenizer,
) -> None:
    with serving_tools(tokenizer, TWO_CALLS) as server:
        client = server.openai()
        with client.chat.completions.stream(model="demo", messages=USER, tools=TOOLS) as stream:
            final = stream.get_final_completion()
        calls = final.choices[0].message.tool_calls
        assert calls is not None
        assert [call.function.name for call in calls] == ["f", "g"]
        assert [json.loads(call.function.arguments) for call in calls] == [
            {"trigger": True},
            {"x": [1, "}"]},
        ]
        raw = server.stream_chat(tools=TOOLS)
        assert [call["id"] for call in raw.tool_calls()] != [call.id for call in calls]


@pytest.mark.parametrize(
    ("choice", "text"), [("auto", TWO_CALLS), ("required", REQUIRED_TWO_CALLS)]
)
def test_h23_parallel_tool_calls_false_means_one_call_at_most(
    tokenizer: ChatTokenizer, choice: str, text: str
) -> None:
    with serving_tools(tokenizer, text) as server:
        fields = {"tools": TOOLS, "tool_choice": choice}
        for parallel, expected in ((False, ["f"]), (True, ["f", "g"]), (None, ["f", "g"])):
            asked = {**fields, "parallel_tool_calls": parallel}
            whole = calls_of(server.chat(**asked).json()["choices"][0])
            assert [name for name, _ in whole] == expected
            stream = server.stream_chat(**asked)
            assert decoded(stream.tool_calls()) == whole
            assert stream.finish_reasons() == ["tool_calls"]


HISTORY_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}|"
    "{% for c in m.tool_calls or [] %}{{ c.id }}:{{ c.function.name }}:"
    "{{ c.function.arguments | tojson }}{% endfor %}|{{ m.tool_call_id }}]{% endfor %}"
)


def test_h24_debug_logging_does_not_change_the_request(
    tokenizer: ChatTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    shown = ChatTokenizer(tokenizer.hf, chat_template=HISTORY_TEMPLATE)
    with serving("ok", tokenizer=shown) as server:
        prompts = []
        for level in (logging.WARNING, logging.DEBUG):
            with caplog.at_level(level):
                body = {"messages": TOOL_ROUND_TRIP}
                assert server.post("/v1/chat/completions", body).status_code == 200
            prompts.append(prompt_text(server))
        assert prompts[0] == prompts[1]
        assert "[assistant||call_1:f:{}|]" in prompts[0]
        assert "[tool|42||call_1]" in prompts[0]


@pytest.mark.parametrize("missing", ["call", "answer", "both"])
def test_h25_a_history_with_null_ids_is_accepted(plain: Server, missing: str) -> None:
    call = {**CALL, "id": None} if missing in ("call", "both") else CALL
    answer_id = None if missing in ("answer", "both") else "call_1"
    messages = [
        {"role": "user", "content": "Call f."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": answer_id, "content": "42"},
    ]
    assert plain.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    assert "<|im_start|>tool\n42<|im_end|>" in prompt_text(plain)


# JSON, schemas, grammars


def test_h26_a_refused_constraint_is_the_callers_error_and_nobody_elses() -> None:
    with serving("fine") as server:
        server.engine.faults = Faults(refuse="The regex is not valid: nothing to repeat.")
        for stream in (False, True):
            response = server.chat(structured_outputs={"regex": "foo**"}, stream=stream)
            assert "regex" in invalid(response)["message"]
        assert server.engine.submitted[-1].sampling.structured is not None
        server.engine.faults = Faults()
        assert server.chat().json()["choices"][0]["message"]["content"] == "fine"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_json", {"type": "object"}),
        ("guided_json", {}),
        ("guided_regex", "a+"),
        ("guided_choice", ["a", "b"]),
        ("guided_grammar", "root ::= 'a'"),
        ("guided_json_object", True),
    ],
)
def test_h27_removed_constraint_fields_are_refused_aloud(
    plain: Server, field: str, value: Any
) -> None:
    for response in (plain.chat(**{field: value}), plain.complete(**{field: value})):
        error = invalid(response, param=field)
        assert "structured_outputs" in error["message"]


# Messages

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL_ROUND_TRIP = [
    {"role": "user", "content": "Call f."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "42"},
]


@pytest.mark.parametrize("content", ["", None])
def test_h28_an_empty_assistant_turn_is_accepted(plain: Server, content: str | None) -> None:
    messages = [*USER, {"role": "assistant", "content": content}, *USER]
    response = plain.post("/v1/chat/completions", {"messages": messages})
    assert response.status_code == 200
    assert "<|im_start|>assistant\n<|im_end|>" in prompt_text(plain)


def test_h29_null_content_with_tool_calls_passes_on_chat_and_tokenize(plain: Server) -> None:
    chat = plain.post("/v1/chat/completions", {"messages": TOOL_ROUND_TRIP})
    assert chat.status_code == 200
    tokenized = plain.post("/tokenize", {"messages": TOOL_ROUND_TRIP})
    assert tokenized.status_code == 200
    assert tokenized.json()["tokens"] == plain.engine.submitted[-1].prompt_token_ids
    assert tokenized.json()["count"] == chat.json()["usage"]["prompt_tokens"]


def test_h30_the_official_client_can_round_trip_a_tool_call(plain: Server) -> None:
    answer = plain.openai().chat.completions.create(model="demo", messages=TOOL_ROUND_TRIP)
    assert answer.choices[0].message.content == "The answer is plain."


def test_h31_the_tool_call_turn_is_kept(plain: Server) -> None:
    plain.post("/v1/chat/completions", {"messages": TOOL_ROUND_TRIP})
    assert (
        "Call f.<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n42<|im_end|>"
        in prompt_text(plain)
    )


def test_h32_a_developer_message_reaches_the_model(plain: Server) -> None:
    messages = [{"role": "developer", "content": "answer BANANA"}, *USER]
    assert plain.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    assert "<|im_start|>system\nanswer BANANA<|im_end|>" in prompt_text(plain)


# Prompts


@pytest.mark.parametrize("prompt", [[""], "", ["fine", ""], [[]], []])
def test_h33_an_empty_prompt_harms_nobody(prompt: Any) -> None:
    with serving("word " * 300, step_time_s=0.001) as server:
        body = json.dumps({**chat_body(), "stream": True, "max_tokens": 200}).encode()
        with server.connect() as other:
            other.sendall(http_request("/v1/chat/completions", body, headers=["Connection: close"]))
            other.recv(100)
            error = invalid(server.complete(prompt))
            assert error["param"].startswith("prompt")
            received = b""
            while data := other.recv(65536):
                received += data
        assert b"data: [DONE]" in received
        assert b'"error"' not in received


# Disconnects and accounting


class _BaseHttpNoOp(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)


class _PureNoOp:
    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


@pytest.mark.parametrize("middleware", [_PureNoOp, _BaseHttpNoOp])
@pytest.mark.parametrize("stream", [False, True])
def test_h34_a_hang_up_is_noticed_behind_middleware(middleware: Any, stream: bool) -> None:
    with serving(faults=Faults(stall_at_token=2), wrap=middleware) as server:
        body = json.dumps({**chat_body(), "stream": stream}).encode()
        with abandoned(server, http_request("/v1/chat/completions", body)):
            until(lambda: server.load == 1)
        until(lambda: server.load == 0)
        assert server.engine.aborted == [server.engine.submitted[0].id]


def test_h34_our_own_middleware_is_pure_asgi(plain: Server) -> None:
    import server.middleware as module

    classes = [item for item in vars(module).values() if isinstance(item, type)]
    assert not any(issubclass(item, BaseHTTPMiddleware) for item in classes)


def test_h35_usage_is_accounted_when_the_client_leaves_early() -> None:
    with serving("word " * 50, faults=Faults(stall_at_token=5)) as server:
        body = json.dumps({**chat_body(), "stream": True, **USAGE}).encode()
        with abandoned(server, http_request("/v1/chat/completions", body)):
            until(lambda: server.engine.submitted)
            (prompt,) = [g.prompt_token_ids for g in server.engine.submitted]
            until(lambda: server.engine.stats.running == 1)
            until(lambda: [len(job.output) for job in server.engine._running.values()] == [5])
        until(lambda: server.load == 0)
        until(lambda: server.metric("vllm:generation_tokens_total") == 5)
        assert server.metric("vllm:prompt_tokens_total") == len(prompt)
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 1


def test_h36_every_outcome_is_counted_and_the_sums_agree() -> None:
    with serving("a few words to say", faults=Faults(stall_at_token=3)) as server:
        body = json.dumps({**chat_body(), "stream": True}).encode()
        for number in range(5):
            with abandoned(server, http_request("/v1/chat/completions", body), until_bytes=600):
                until(lambda: server.load == 1)
            until(lambda: server.load == 0)
            until(lambda n=number: len(server.engine.aborted) == n + 1)
        server.engine.faults = Faults()
        assert server.chat().status_code == 200
        server.engine.faults = Faults(fail_at_token=1)
        assert server.chat().status_code == 500
        server.engine.faults = Faults()
        assert server.chat(temperature=9).status_code == 400
        outcomes = {
            outcome: server.metric(
                "shuntyard_requests_total", endpoint="/v1/chat/completions", outcome=outcome
            )
            for outcome in ("completed", "aborted", "failed", "client_error", "rejected")
        }
        assert outcomes == {
            "completed": 1, "aborted": 5, "failed": 1, "client_error": 1, "rejected": 0,
        }  # fmt: skip
        generated = 5 + 1 + 1
        assert server.metric("vllm:request_success_total") == generated
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 5
        assert server.metric("vllm:request_success_total", finished_reason="stop") == 1
        assert server.metric("vllm:request_success_total", finished_reason="error") == 1
        assert server.metric("vllm:e2e_request_latency_seconds_count") == generated
        assert server.metric("vllm:request_generation_tokens_count") == generated
        assert server.metric("vllm:request_generation_tokens_sum") == server.metric(
            "vllm:generation_tokens_total"
        )
        assert server.metric("vllm:request_prompt_tokens_sum") == server.metric(
            "vllm:prompt_tokens_total"
        )


# Concurrency and slow readers


def test_h37_a_slow_reader_does_not_pile_up_chunks(tokenizer: ChatTokenizer) -> None:
    num_tokens = 60_000
    (word,) = tokenizer.encode(" word")
    with serving(
        [word] * num_tokens,
        max_model_len=100_000,
        tokens_per_step=20,
        step_time_s=0,
        send_buffer=4096,
    ) as server:
        body = json.dumps(
            {"prompt": "x", "max_tokens": num_tokens, "stream": True, "logprobs": None, **USAGE}
        ).encode()
        request = http_request("/v1/completions", body, headers=["Connection: close"])
        with server.connect(receive_buffer=4096) as reader:
            reader.sendall(request)
            until(lambda: server.engine.submitted)
            until(lambda: server.engine.stats.running == 0, within_s=20)
            assert server.load == 1
            assert server.call(server.num_buffered_bytes) < 256 * 1024
            received = b""
            while data := reader.recv(1 << 20):
                received += data
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        events = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
        chunks = [json.loads(line.removeprefix(b"data: ")) for line in events]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        assert text == " word" * num_tokens
        assert chunks[-1]["usage"]["completion_tokens"] == num_tokens
        assert len(chunks) < num_tokens / 20


def test_h38_hundreds_of_connections_within_1024_descriptors_all_succeed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    connections: list[socket.socket] = []
    body = json.dumps({"prompt": "x", "max_tokens": 2, "stream": True}).encode()
    request = http_request("/v1/completions", body, headers=["Connection: close"])
    try:
        with serving("word word", step_time_s=0.05) as server:
            num_ok = 0
            for _ in range(2):
                for _ in range(400):
                    connections.append(server.connect(timeout_s=30))
                    connections[-1].sendall(request)
                for connection in connections:
                    received = b""
                    while data := connection.recv(65536):
                        received += data
                    num_ok += received.startswith(b"HTTP/1.1 200") and b"[DONE]" in received
                    connection.close()
                connections.clear()
            assert num_ok == 800
    finally:
        for connection in connections:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_h38_over_the_configured_limit_is_a_clean_429() -> None:
    with serving(faults=Faults(stall_at_token=0), max_requests=2) as server:
        body = json.dumps(chat_body()).encode()
        request = http_request("/v1/chat/completions", body)
        with abandoned(server, request), abandoned(server, request):
            until(lambda: server.load == 2)
            response = server.chat()
            assert response.status_code == 429
            assert response.json()["error"]["type"] == "rate_limit_error"
            assert int(response.headers["retry-after"]) >= 1
            assert server.http.get("/health").status_code == 200
        until(lambda: server.load == 0)
        server.engine.faults = Faults()
        assert server.chat(max_tokens=1).status_code == 200


# Errors and transport


def test_h39_an_unknown_model_names_what_is_served(plain: Server) -> None:
    for response in (
        plain.chat(model="x"),
        plain.chat(model="x", stream=True),
        plain.complete(model="x"),
        plain.http.get("/v1/models/x"),
    ):
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "'x'" in error["message"]
        assert "'demo', 'org/demo'" in error["message"]


def test_h40_the_official_client_can_retrieve_a_model_with_a_slash(plain: Server) -> None:
    client = plain.openai()
    model = client.models.retrieve("org/demo")
    assert (model.id, model.object) == ("org/demo", "model")
    assert {item.id for item in client.models.list()} == {"demo", "org/demo"}
    assert plain.http.get("/v1/models/org%2Fdemo").json()["id"] == "org/demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_h41_a_wrong_key_is_explained_to_the_official_client() -> None:
    with serving("hi", http=HttpOptions(api_keys={"right": "tenant"})) as server:
        with pytest.raises(openai.AuthenticationError) as caught:
            server.openai(api_key="wrong").models.list()
        assert "(no body)" not in caught.value.message
        assert "Incorrect API key" in caught.value.message
        assert caught.value.code == "invalid_api_key"
        assert caught.value.type == "authentication_error"
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        assert [m.id for m in server.openai(api_key="right").models.list()] == ["demo"]


def test_h42_a_chunked_request_body_is_read(plain: Server) -> None:
    body = json.dumps(chat_body()).encode()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 7):
            yield body[start : start + 7]

    response = plain.http.post(
        "/v1/chat/completions", content=pieces(), headers={"content-type": "application/json"}
    )
    assert response.request.headers["transfer-encoding"] == "chunked"
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "The answer is plain."


@pytest.mark.parametrize("body", [b"[1]", b'"x"', b"3", b"null", b"true", b"[]"])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
)
def test_h43_a_body_that_is_no_object_is_the_callers_error(
    plain: Server, path: str, body: bytes
) -> None:
    headers = {"content-type": "application/json"}
    error = invalid(plain.http.post(path, content=body, headers=headers))
    assert "object" in error["message"]


# Embeddings


class FakePooler:
    """Embeds a text as three numbers that float32 cannot hold exactly."""

    status = EngineStatus("ready")

    async def embed(self, inputs: Any, **options: Any) -> EmbedResult:
        rows = [[0.1, -1.0 / 3.0, float(len(item))] for item in inputs]
        return EmbedResult(np.array(rows, dtype=np.float32), [len(item) for item in inputs])

    async def score(self, pairs: Any, **options: Any) -> ScoreResult:
        raise AssertionError("not asked for")


@pytest.fixture(scope="module")
def embedding() -> Iterator[Server]:
    pools = Pools(embedding=PooledModel(["embedder"], FakePooler()))
    with serving("hi", further_routes=lambda gateway: pooling_routes(gateway, pools)) as server:
        yield server


def test_h44_base64_embeddings_are_strings(embedding: Server) -> None:
    body = {"model": "embedder", "input": ["ab", "abc"]}
    answer = embedding.post("/v1/embeddings", {**body, "encoding_format": "base64"}).json()
    assert [item["index"] for item in answer["data"]] == [0, 1]
    assert all(isinstance(item["embedding"], str) for item in answer["data"])
    for fields in ({}, {"encoding_format": "float"}, {"encoding_format": None}):
        floats = embedding.post("/v1/embeddings", {**body, **fields}).json()
        assert all(isinstance(item["embedding"], list) for item in floats["data"])


def test_h45_base64_is_little_endian_float32_and_other_formats_are_refused(
    embedding: Server,
) -> None:
    body = {"model": "embedder", "input": "abc"}
    for name in ("md5", "", "FLOAT", 3):
        response = embedding.post("/v1/embeddings", {**body, "encoding_format": name})
        invalid(response, param="encoding_format")
    answer = embedding.post("/v1/embeddings", {**body, "encoding_format": "base64"}).json()
    raw = base64.b64decode(answer["data"][0]["embedding"], validate=True)
    expected = struct.unpack("<3f", struct.pack("<3f", 0.1, -1.0 / 3.0, 3.0))
    assert struct.unpack("<3f", raw) == expected
    floats = embedding.post("/v1/embeddings", {**body, "encoding_format": "float"}).json()
    assert tuple(floats["data"][0]["embedding"]) == expected
    by_client = embedding.openai().embeddings.create(model="embedder", input="abc")
    assert tuple(by_client.data[0].embedding) == expected


# Reasoning


@pytest.mark.parametrize("emit_both", [True, False])
def test_h46_thinking_text_arrives_under_both_names(emit_both: bool) -> None:
    chat = ChatOptions(
        has_reasoning_parser=True, parsers=ThinkSource(), emit_reasoning_content=emit_both
    )
    names = ["reasoning", "reasoning_content"] if emit_both else ["reasoning"]
    with serving("<think>because of this</think>the answer", chat=chat) as server:
        message = server.chat().json()["choices"][0]["message"]
        assert message["content"] == "the answer"
        assert {name: message[name] for name in message if name.startswith("reasoning")} == (
            dict.fromkeys(names, "because of this")
        )
        stream = server.stream_chat()
        assert stream.text() == "the answer"
        deltas = [choice["delta"] for choice in stream.choices()]
        for name in names:
            assert stream.text(part=name) == "because of this"
        assert any("reasoning_content" in delta for delta in deltas) == emit_both
        kinds = [key for delta in deltas for key in delta if key in ("content", "reasoning")]
        assert kinds.index("reasoning") == 1, "after the role chunk's empty content"
        assert kinds[1:] == sorted(kinds[1:], reverse=True), "reasoning comes before content"


def test_h46_thinking_text_that_is_not_wanted_is_hidden() -> None:
    chat = ChatOptions(has_reasoning_parser=True, parsers=ThinkSource())
    with serving("<think>hidden thought</think>the answer", chat=chat) as server:
        fields = {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
        for raw in (server.chat(**fields).text, server.stream_chat(**fields).raw.decode()):
            assert "hidden" not in raw
            assert "thought" not in raw
            assert "answer" in raw


@pytest.fixture(scope="module")
def vllm_parsers() -> None:
    """vLLM's parsers, imported without its warnings; skips where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.parser")
        importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")


@pytest.mark.usefixtures("vllm_parsers")
@pytest.mark.filterwarnings("ignore:.*is deprecated in favor of.*:DeprecationWarning")
@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
def test_h46_thinking_text_arrives_through_vllms_own_parser(
    tokenizer: ChatTokenizer, tokens_per_step: int
) -> None:
    hf = copy.deepcopy(tokenizer.hf)
    hf.add_tokens(["<think>", "</think>"])
    chat = ChatOptions(
        has_reasoning_parser=True, parsers=load_parser_factory(None, "deepseek_r1", hf)
    )
    with serving(
        "<think>because\n\nof this</think>the answer\n\nmore",
        tokenizer=ChatTokenizer(hf),
        chat=chat,
        tokens_per_step=tokens_per_step,
    ) as server:
        message = server.chat(stop=["\n\n"]).json()["choices"][0]["message"]
        assert message["reasoning"] == message["reasoning_content"] == "because\n\nof this"
        assert message["content"] == "the answer"
        stream = server.stream_chat(stop=["\n\n"])
        assert stream.text(part="reasoning") == "because\n\nof this"
        assert stream.text() == "the answer"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "fields", "kind"),
    [
        ("a long answer to this", {}, "message"),
        ("<think>long thoughts about this</think>the answer", {}, "reasoning"),
        (
            '[{"name": "f", "parameters": {"a": 1}}]',
            {"tools": [{"type": "function", "name": "f"}], "tool_choice": "required"},
            "function_call",
        ),
    ],
)
def test_h47_a_cut_response_is_incomplete_and_so_is_its_last_item(
    script: str, fields: dict[str, Any], kind: str, stream: bool
) -> None:
    chat = ChatOptions(has_reasoning_parser=True, parsers=ThinkSource())
    with serving(script, chat=chat) as server:
        body = {"input": "Hi", "max_output_tokens": 9, "stream": stream, **fields}
        if kind == "message":
            body["max_output_tokens"] = 2
        answer = server.post("/v1/responses", body)
        assert answer.status_code == 200, answer.text
        response = answer.json() if not stream else None
        if stream:
            blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
            events = {name: json.loads(data.removeprefix("data: ")) for name, data in blocks}
            done = events["event: response.output_item.done"]
            assert done["item"]["status"] == "incomplete"
            assert list(events)[-1] == "event: response.incomplete"
            response = events["event: response.incomplete"]["response"]
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][-1]["type"] == kind
        assert response["output"][-1]["status"] == "incomplete"


# Sampling defaults


def test_h48_server_default_penalties_apply() -> None:
    defaults = SamplingDefaults(presence_penalty=1.5)
    with serving("hi", defaults=defaults) as server:
        for fields, expected in (
            ({}, 1.5),
            ({"presence_penalty": None}, 1.5),
            ({"presence_penalty": 0}, 0.0),
            ({"presence_penalty": -1}, -1.0),
        ):
            for send in (server.chat, server.complete):
                assert send(**fields).status_code == 200
                assert server.engine.submitted[-1].sampling.presence_penalty == expected


def test_h49_sampling_varies_without_a_seed_and_repeats_with_one(seeded: Server) -> None:
    def answers(**fields: Any) -> set[str]:
        return {
            seeded.chat(max_tokens=12, **fields).json()["choices"][0]["message"]["content"]
            for _ in range(4)
        }

    assert len(answers(temperature=1)) == 4
    assert len(answers()) == 4, "the default is not greedy"
    assert len(answers(temperature=1, seed=11)) == 1
    assert len(answers(temperature=0)) == 1
    assert answers(seed=11) != answers(seed=12)
