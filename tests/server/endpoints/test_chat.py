"""`POST /v1/chat/completions`: every field's good and bad values, and the shapes of answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from server.gateway import ChatOptions
from server.protocol.responses import ChatCompletion, ChatCompletionChunk
from server.sampling import SamplingDefaults
from server.text.tokenizer import ChatTokenizer
from spot.generation import StructuredOutput
from tests.harness import Server, chat_body, say_each, serving

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
INT64_MAX = 2**63 - 1


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("The answer.", names=("demo", "alias", "org/demo")) as running:
        yield running


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


MISSING = "missing_required_parameter"
VALUE = "invalid_value"

# Fields, then param and code of the 400 that they are. A message list alone stands for `messages`.
REFUSED: list[tuple[str, Any, str | None, str]] = [
    # messages
    ("messages", None, "messages", VALUE),
    ("messages", [], "messages", VALUE),
    ("messages", "string", "messages", VALUE),
    ("messages", {}, "messages", VALUE),
    ("messages", [123], "messages.0", VALUE),
    ("messages", [None], "messages.0", VALUE),
    ("messages", [{}], "messages.0", VALUE),
    ("messages", [{"content": "x"}], "messages.0", VALUE),
    ("messages", [{"role": 123, "content": "x"}], "messages.0", VALUE),
    ("messages", [{"role": "wizard", "content": "x"}], "messages.0", VALUE),
    ("messages", [{"role": "user"}], "messages.0.content", MISSING),
    ("messages", [{"role": "user", "content": None}], "messages.0.content", VALUE),
    ("messages", [{"role": "user", "content": 123}], "messages.0.content", VALUE),
    ("messages", [{"role": "system", "content": {}}], "messages.0.content", VALUE),
    ("messages", [USER, ASSISTANT, ASSISTANT], "messages.2", VALUE),
    ("messages", [{**USER, "name": 3}], "messages.0.name", VALUE),
    # content parts
    ("messages", [{"role": "user", "content": [1]}], "messages.0.content.0", VALUE),
    (
        "messages",
        [{"role": "user", "content": [{"type": "hologram", "text": "x"}]}],
        "messages.0.content.0.type",
        VALUE,
    ),
    (
        "messages",
        [{"role": "user", "content": [{"type": "text"}]}],
        "messages.0.content.0.text",
        MISSING,
    ),
    (
        "messages",
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        "messages.0.content.0.text",
        VALUE,
    ),
    (
        "messages",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        "messages.0.content.0.type",
        "not_supported",
    ),
    (
        "messages",
        [USER, {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        "messages.1.content.0.type",
        "not_supported",
    ),
    # history
    (
        "messages",
        [USER, {"role": "assistant", "tool_calls": [1]}],
        "messages.1.tool_calls.0",
        VALUE,
    ),
    (
        "messages",
        [USER, {"role": "assistant", "tool_calls": [{**CALL, "type": "magic"}]}],
        "messages.1.tool_calls.0.type",
        VALUE,
    ),
    (
        "messages",
        [USER, {"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]}],
        "messages.1.tool_calls.0.function",
        MISSING,
    ),
    (
        "messages",
        [{"role": "tool", "tool_call_id": 1, "content": "x"}],
        "messages.0.tool_call_id",
        VALUE,
    ),
    # model
    ("model", 3, "model", VALUE),
    ("model", ["demo"], "model", VALUE),
    # stream
    ("stream", "yes", "stream", VALUE),
    ("stream", 1, "stream", VALUE),
    ("stream_options", {"include_usage": True}, "stream_options", VALUE),
    ("stream_options", {"include_usage": None}, "stream_options", VALUE),
    ("stream_options", [], "stream_options", VALUE),
    ("stream_options", {"include_usage": "x"}, "stream_options.include_usage", VALUE),
    # limits
    *(
        (name, value, name, VALUE)
        for name in ("max_tokens", "max_completion_tokens")
        for value in (0, -1, 1.5, "5", True, 4097, 2**63, [])
    ),
    ("min_tokens", -1, "min_tokens", VALUE),
    # sampling
    *(("temperature", value, "temperature", VALUE) for value in (-0.1, 2.1, "hot", True, [1])),
    *(("top_p", value, "top_p", VALUE) for value in (-0.1, 1.1, "x")),
    *(
        (name, value, name, VALUE)
        for name in ("presence_penalty", "frequency_penalty")
        for value in (-2.1, 2.1, "x")
    ),
    *(("n", value, "n", VALUE) for value in (0, -1, 129, 1.5, "2", True)),
    *(("seed", value, "seed", VALUE) for value in (2**63, -(2**63) - 1, 1.5, "1", True)),
    *(("top_k", value, "top_k", VALUE) for value in (-2, 1.5, "1")),
    *(("min_p", value, "min_p", VALUE) for value in (-0.1, 1.1)),
    *(("repetition_penalty", value, "repetition_penalty", VALUE) for value in (0, -1, 101)),
    # stop
    ("stop", "", "stop", VALUE),
    ("stop", ["a", ""], "stop.1", VALUE),
    ("stop", ["a", "b", "c", "d", "e"], "stop", VALUE),
    ("stop", 3, "stop", VALUE),
    ("stop", [3], "stop.0", VALUE),
    ("stop_token_ids", [-1], "stop_token_ids.0", VALUE),
    ("stop_token_ids", [49152], "stop_token_ids", VALUE),
    ("stop_token_ids", ["2"], "stop_token_ids.0", VALUE),
    ("allowed_token_ids", [], "allowed_token_ids", VALUE),
    ("allowed_token_ids", [10**6], "allowed_token_ids", VALUE),
    # logit bias
    ("logit_bias", [1], "logit_bias", VALUE),
    ("logit_bias", {"hello": 1}, "logit_bias", VALUE),
    ("logit_bias", {"49152": 1}, "logit_bias", VALUE),
    ("logit_bias", {"-1": 1}, "logit_bias", VALUE),
    ("logit_bias", {"1.0": 1}, "logit_bias", VALUE),
    ("logit_bias", {"1": "x"}, "logit_bias", VALUE),
    ("logit_bias", {"1": None}, "logit_bias", VALUE),
    ("logit_bias", {"9" * 5000: 1}, "logit_bias", VALUE),
    # log probabilities
    ("logprobs", "yes", "logprobs", VALUE),
    ("logprobs", 1, "logprobs", VALUE),
    ("top_logprobs", 2, "top_logprobs", VALUE),
    # structured output
    ("response_format", {"type": "xml"}, "response_format", VALUE),
    ("response_format", {}, "response_format", VALUE),
    ("response_format", "json", "response_format", VALUE),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema", MISSING),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"schema": {}}},
        "response_format.json_schema.name",
        MISSING,
    ),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x"}},
        "response_format.json_schema.schema",
        MISSING,
    ),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}},
        "response_format.json_schema.schema",
        VALUE,
    ),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}, "structured_outputs", VALUE),
    ("structured_outputs", {"choice": []}, "structured_outputs.choice", VALUE),
    ("structured_outputs", {"regex": 1}, "structured_outputs.regex", VALUE),
    # tools
    ("tools", [], "tools", VALUE),
    ("tools", {}, "tools", VALUE),
    ("tools", [1], "tools.0", VALUE),
    ("tools", [{"type": "function"}], "tools.0.function", MISSING),
    ("tools", [{"type": "custom", "custom": {"name": "x"}}], "tools.0.type", VALUE),
    ("tools", [{"type": "function", "function": {}}], "tools.0.function.name", MISSING),
    ("tools", [{"type": "function", "function": {"name": ""}}], "tools.0.function.name", VALUE),
    ("tools", [TOOL], "tool_choice", "unsupported_value"),
    ("tool_choice", "auto", "tool_choice", VALUE),
    ("tool_choice", "required", "tool_choice", VALUE),
    ("tool_choice", "sometimes", "tool_choice", VALUE),
    ("tool_choice", {"type": "allowed_tools"}, "tool_choice.type", VALUE),
    ("parallel_tool_calls", "no", "parallel_tool_calls", VALUE),
    ("functions", [{"name": "f"}], "functions", "unsupported_parameter"),
    ("function_call", "auto", "function_call", "unsupported_parameter"),
    # the rest of OpenAI's
    ("reasoning_effort", "extreme", "reasoning_effort", VALUE),
    ("modalities", ["text", "audio"], "modalities.1", VALUE),
    ("audio", {"voice": "x"}, "audio", VALUE),
    ("service_tier", 1, "service_tier", VALUE),
    ("user", 1, "user", VALUE),
    # vLLM's extras
    ("prompt_logprobs", -2, "prompt_logprobs", VALUE),
    ("truncate_prompt_tokens", -2, "truncate_prompt_tokens", VALUE),
    ("truncate_prompt_tokens", 5000, "truncate_prompt_tokens", VALUE),
    ("logprob_token_ids", [5], "logprob_token_ids", "unsupported_parameter"),
    ("watermarking", True, "watermarking", "unsupported_parameter"),
    ("repetition_detection", {"window": 4}, "repetition_detection", "unsupported_parameter"),
    ("chat_template", "{{ 1 }}", "chat_template", VALUE),
    ("chat_template_kwargs", [], "chat_template_kwargs", VALUE),
    ("priority", 2**40, "priority", VALUE),
    ("cache_salt", "", "cache_salt", VALUE),
    ("bad_words", [1], "bad_words.0", VALUE),
    ("thinking_token_budget", -1, "thinking_token_budget", VALUE),
]


@pytest.mark.parametrize(("field", "value", "param", "code"), REFUSED)
def test_a_bad_value_is_a_400_that_names_it(
    server: Server, field: str, value: Any, param: str, code: str
) -> None:
    about_streams = field in ("stream", "stream_options")
    for fields in ({},) if about_streams else ({}, {"stream": True}):
        num_before = len(server.engine.submitted)
        response = server.post(PATH, {**chat_body(), **fields, field: value})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (param, code), error
        assert error["type"] == "invalid_request_error"
        assert len(response.content) < 10_000
        assert "pydantic" not in response.text
        assert len(server.engine.submitted) == num_before, "nothing is asked of the engine"


COMBINATIONS: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": "1"}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    (
        {"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
    ),
]


def test_a_required_call_leaves_no_content_for_a_response_format() -> None:
    with serving('[{"name": "f", "parameters": {}}]') as server:
        fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
        assert server.chat(**fields).status_code == 200
        alone = server.engine.submitted[-1].sampling.structured
        answer = server.chat(**fields, response_format={"type": "json_object"}).json()
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert server.engine.submitted[-1].sampling.structured == alone


def test_empty_structured_outputs_leave_the_response_format_alone(server: Server) -> None:
    fields = {"structured_outputs": {}, "response_format": {"type": "json_object"}}
    assert server.chat(**fields).status_code == 200
    assert server.engine.submitted[-1].sampling.structured == StructuredOutput(json_object=True)


@pytest.mark.parametrize(("fields", "param"), COMBINATIONS)
def test_fields_that_exclude_each_other_are_refused(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    response = server.chat(**fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_missing_messages_are_a_missing_parameter(server: Server) -> None:
    error = server.post(PATH, {}).json()["error"]
    assert (error["param"], error["code"]) == ("messages", MISSING)


def test_every_bad_key_of_logit_bias_is_named(server: Server) -> None:
    message = server.chat(logit_bias={"1": 1, "x": 1, "99999": 1}).json()["error"]["message"]
    assert "'x'" in message
    assert "'99999'" in message
    assert "'1'" not in message


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "min_p"])
def test_numbers_that_are_none_are_refused(server: Server, field: str, value: str) -> None:
    raw = json.dumps(chat_body())[:-1] + f', "{field}": {value}}}'
    response = server.http.post(PATH, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400


@pytest.mark.parametrize("value", ["9" * 5000, "-" + "9" * 400, "1" * 30])
@pytest.mark.parametrize("field", ["max_tokens", "seed", "temperature", "n", "metadata"])
def test_huge_integers_are_no_500(server: Server, field: str, value: str) -> None:
    raw = json.dumps(chat_body())[:-1] + f', "{field}": {value}}}'
    response = server.http.post(PATH, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400 or field == "metadata"
    assert response.status_code < 500


def test_deep_nesting_is_refused_and_moderate_nesting_is_not(server: Server) -> None:
    assert server.chat(metadata=nested(40)).status_code == 200
    response = server.chat(metadata=nested(100))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


ACCEPTED: list[dict[str, Any]] = [
    {"model": ""},
    {"model": None},
    {"model": "alias"},
    {"model": "org/demo"},
    *({name: None} for name in (
        "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "logprobs",
        "top_logprobs", "tools", "tool_choice", "response_format", "seed", "logit_bias", "stream",
        "stream_options", "presence_penalty", "frequency_penalty", "user", "parallel_tool_calls",
        "reasoning_effort", "service_tier", "modalities", "audio", "metadata", "top_k", "min_p",
        "repetition_penalty", "structured_outputs", "ignore_eos", "min_tokens", "echo",
    )),
    {"stream_options": {}},
    {"max_tokens": 4096},
    {"max_tokens": 5, "max_completion_tokens": 2},
    {"temperature": 0, "n": 3},
    {"temperature": 2},
    {"temperature": 1},
    {"top_p": 0},
    {"top_p": 1},
    {"presence_penalty": -2, "frequency_penalty": 2},
    {"n": 128},
    {"seed": INT64_MAX, "n": 2},
    {"seed": -(2**63)},
    {"stop": []},
    {"stop": ["a", "b", "c", "d"]},
    {"logit_bias": {}},
    {"logit_bias": {"5": 1000, "6": -1000}},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 0},
    {"logprobs": True, "top_logprobs": 20},
    {"top_logprobs": 0},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    {"structured_outputs": {"regex": "a+"}},
    {"structured_outputs": {"json": {"type": "object"}}},
    {"structured_outputs": {}},
    {"tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": "required"},
    {"modalities": ["text"]},
    *({"reasoning_effort": effort} for effort in (
        "none", "minimal", "low", "medium", "high", "xhigh", "max",
    )),
    {"metadata": {"a": "b"}, "store": True, "user": "me", "safety_identifier": "x"},
    {"prompt_cache_key": "x", "verbosity": "low", "prediction": {"type": "content"}},
    {"web_search_options": {}, "moderation": "x", "prompt_cache_options": {}},
    {"something_unknown": {"deep": [1]}},
    {"best_of": 1, "use_beam_search": False, "guided_json": None},
    {"logprob_token_ids": [], "watermarking": False, "repetition_detection": None},
    {"top_k": -1, "min_p": 0, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": False},
    {"stop_token_ids": [3], "bad_words": ["x"], "allowed_token_ids": [1, 2]},
    {"truncate_prompt_tokens": 5, "priority": -3, "request_id": "mine", "cache_salt": "s"},
    {"return_token_ids": True, "return_tokens_as_token_ids": True, "stream_interval": 3},
    {"chat_template_kwargs": {"enable_thinking": False}, "kv_transfer_params": {}},
    {"include_reasoning": False, "vllm_xargs": {"a": 1}, "thinking_token_budget": 0},
    {"prompt_logprobs": 2},
    {"messages": [{"role": "system", "content": [{"type": "text", "text": "s"}]}, USER]},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "user", "content": ""}]},
    {"messages": [{"role": "user", "content": "nul \x00 é 😀"}]},
    {"messages": [USER, ASSISTANT]},
    {"messages": [{"role": "tool", "content": "x"}]},
    {"messages": [{"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]}
    ]},
    {"messages": [{**USER, "name": "bob", "unknown": 1}]},
]  # fmt: skip


@pytest.mark.parametrize("fields", ACCEPTED, ids=lambda fields: json.dumps(fields)[:60])
def test_good_values_are_accepted_and_the_answer_has_its_shape(
    server: Server, fields: dict[str, Any]
) -> None:
    response = server.post(PATH, {**chat_body(), **fields})
    assert response.status_code == 200, response.text
    answer = ChatCompletion.model_validate(response.json())
    assert answer.object == "chat.completion"
    assert len(answer.choices) == (fields.get("n") or 1)
    for choice in response.json()["choices"]:
        assert {"index", "message", "logprobs", "finish_reason"} <= set(choice)
        assert {"role", "content", "refusal"} <= set(choice["message"])
        assert choice["message"].get("tool_calls") != []
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


STREAMABLE = [fields for fields in ACCEPTED if not {"stream", "prompt_logprobs"} & set(fields)]


@pytest.mark.parametrize("fields", STREAMABLE, ids=lambda fields: json.dumps(fields)[:60])
def test_a_stream_says_the_same_as_a_whole_answer(server: Server, fields: dict[str, Any]) -> None:
    body = {**chat_body(), **fields, "stream_options": {"include_usage": True}}
    stream = server.stream(PATH, body)
    assert stream.status == 200, stream.raw
    assert stream.is_done
    assert stream.error is None
    for chunk in stream.chunks:
        ChatCompletionChunk.model_validate(chunk)
        assert "choices" in chunk
    body.pop("stream_options")
    whole = server.post(PATH, body).json()
    assert stream.usage == whole["usage"]
    for key in ("id", "created", "model", "object", "system_fingerprint"):
        assert len({chunk[key] for chunk in stream.chunks}) == 1
    assert stream.chunks[0]["object"] == "chat.completion.chunk"
    assert stream.chunks[0]["model"] == whole["model"] == (fields.get("model") or "demo")
    for choice in whole["choices"]:
        index = choice["index"]
        pieces = stream.choices(index)
        assert [p for p in pieces if "role" in p["delta"]] == pieces[:1]
        assert pieces[0]["delta"]["role"] == "assistant"
        assert stream.text(index) == (choice["message"]["content"] or "")
        assert stream.finish_reasons(index) == [choice["finish_reason"]]
        assert pieces[-1]["finish_reason"] is not None
        if choice["logprobs"] is not None:
            streamed = [e for p in pieces if p["logprobs"] for e in p["logprobs"]["content"]]
            assert streamed == choice["logprobs"]["content"]


def test_max_completion_tokens_wins_over_max_tokens(server: Server) -> None:
    answer = server.chat(max_tokens=1, max_completion_tokens=2).json()
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["choices"][0]["finish_reason"] == "length"


def test_without_a_limit_the_rest_of_the_context_is_the_limit(server: Server) -> None:
    answer = server.chat().json()
    sampling = server.engine.submitted[-1].sampling
    assert sampling.max_tokens == 4096 - answer["usage"]["prompt_tokens"]


def test_a_default_limit_of_the_model_applies() -> None:
    with serving("word " * 50, defaults=SamplingDefaults(max_new_tokens=7)) as server:
        assert server.chat().json()["usage"]["completion_tokens"] == 7
        assert server.chat(max_tokens=9).json()["usage"]["completion_tokens"] == 9


def test_a_prompt_over_the_context_says_how_long_it_is() -> None:
    with serving("x", max_model_len=64) as server:
        for stream in (False, True):
            response = server.chat("word " * 100, stream=stream)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
            assert "maximum context length is 64 tokens" in error["message"]
        response = server.chat("word " * 100_000)
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert server.chat("word " * 100, truncate_prompt_tokens=20).status_code == 200
        assert server.chat("word " * 100, truncate_prompt_tokens=-1).status_code == 200
        assert len(server.engine.submitted[-1].prompt_token_ids) == 63


def test_a_prompt_is_cut_at_the_side_that_is_asked_for() -> None:
    def sent(**fields: Any) -> list[int]:
        assert server.chat("one two three four", **fields).status_code == 200
        return server.engine.submitted[-1].prompt_token_ids

    with serving("x") as server:
        whole = sent()
        assert sent(truncate_prompt_tokens=4) == whole[-4:]
        assert sent(truncate_prompt_tokens=4, truncation_side="left") == whole[-4:]
        assert sent(truncate_prompt_tokens=4, truncation_side="right") == whole[:4]
        assert sent(truncate_prompt_tokens=-1, truncation_side="right") == whole
        assert sent(truncation_side="right") == whole
        refused = server.chat(truncate_prompt_tokens=4, truncation_side="middle")
        assert refused.json()["error"]["param"] == "truncation_side"


def test_n_counts_the_prompt_once_and_every_choice(tokenizer: ChatTokenizer) -> None:
    with serving(say_each(tokenizer, "a", "b b", "c c c")) as server:
        usage = server.chat(n=3).json()["usage"]
        one = server.chat().json()["usage"]
        assert usage["prompt_tokens"] == one["prompt_tokens"]
        assert usage["completion_tokens"] == 2 + 3 + 4


def test_choices_of_a_seed_differ_and_repeat() -> None:
    with serving(None, step_time_s=0) as server:

        def texts(**fields: Any) -> list[str]:
            answer = server.chat(n=3, max_tokens=8, **fields).json()
            return [choice["message"]["content"] for choice in answer["choices"]]

        seeded = texts(seed=5)
        assert len(set(seeded)) == 3
        assert texts(seed=5) == seeded
        assert len(set(texts(temperature=0))) == 1
        assert len(set(texts(temperature=0, seed=5))) == 1


def test_service_tier_is_echoed_if_it_was_set(server: Server) -> None:
    assert server.chat(service_tier="auto").json()["service_tier"] == "default"
    assert "service_tier" not in server.chat().json()
    chunks = server.stream_chat(service_tier="flex").chunks
    assert {chunk["service_tier"] for chunk in chunks} == {"default"}


def test_a_request_id_of_the_body_names_the_answer_only(server: Server) -> None:
    assert server.chat(request_id="mine").json()["id"] == "chatcmpl-mine"
    assert "mine" not in server.engine.submitted[-1].id


def test_logprobs_tokens_joined_are_the_text() -> None:
    text = "Emoji 😀한 é done."
    with serving(text) as server:
        choice = server.chat(logprobs=True, top_logprobs=3).json()["choices"][0]
        content = choice["logprobs"]["content"]
        assert choice["logprobs"]["refusal"] is None
        *visible, end = content
        assert "".join(item["token"] for item in visible) == text
        assert bytes(byte for item in visible for byte in item["bytes"]).decode() == text
        assert end["token"] == "<|im_end|>"
        assert all(len(item["top_logprobs"]) == 3 for item in content)
        streamed = server.stream_chat(logprobs=True, top_logprobs=3, stop=["zzz"])
        entries = [e for p in streamed.choices() if p["logprobs"] for e in p["logprobs"]["content"]]
        assert entries == content


def test_continuous_usage_counts_up(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = server.stream_chat(stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream.chunks]
    assert counts == sorted(counts)
    assert counts[:2] == [0, 1]
    assert counts[-1] == server.chat().json()["usage"]["completion_tokens"]


def test_stream_interval_gathers_tokens() -> None:
    with serving("a b c d e f g h i j") as server:
        deltas = [c["delta"] for c in server.stream_chat(stream_interval=4).choices()]
        texts = [delta["content"] for delta in deltas if delta.get("content")]
        assert texts[0] == "a", "the first does not wait"
        assert "".join(texts) == "a b c d e f g h i j"
        assert len(texts) < 6


def test_token_ids_are_returned_if_asked_for(server: Server) -> None:
    answer = server.chat(return_token_ids=True).json()
    generation = server.engine.submitted[-1]
    assert answer["prompt_token_ids"] == generation.prompt_token_ids
    ids = answer["choices"][0]["token_ids"]
    assert server.tokenizer.decode(ids) == "The answer.<|im_end|>"
    stream = server.stream_chat(return_token_ids=True)
    assert stream.chunks[0]["prompt_token_ids"] == generation.prompt_token_ids
    assert [i for p in stream.choices() for i in p.get("token_ids", [])] == ids


def test_echo_puts_the_last_message_in_front_if_it_is_of_the_model(server: Server) -> None:
    for messages, expected in (([USER, ASSISTANT], "HelloThe answer."), ([USER], "The answer.")):
        body = {"messages": messages, "echo": True}
        content = server.post(PATH, body).json()["choices"][0]["message"]["content"]
        assert content == expected
        assert server.stream(PATH, body).text() == expected


def test_a_trusted_server_takes_a_template_of_the_request() -> None:
    chat = ChatOptions(trust_request_chat_template=True)
    with serving("x", chat=chat) as server:
        assert server.chat(chat_template="{{ messages[0].content }}!").status_code == 200
        prompt = server.engine.submitted[-1].prompt_token_ids
        assert server.tokenizer.decode(prompt) == "Hi!"
        response = server.chat(chat_template="{{ raise_exception('no') }}")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"


def test_sampling_fields_reach_the_engine(server: Server) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.5,
        "seed": 42,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "bad_words": ["bad"],
        "allowed_token_ids": [7, 8],
    }
    server.chat(**fields, max_tokens=3, logit_bias={"9": 150}, logprobs=True, top_logprobs=4)
    sampling = server.engine.submitted[-1].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (sampling.max_tokens, sampling.logprobs) == (3, 4)
    assert sampling.logit_bias == {9: 100.0}
