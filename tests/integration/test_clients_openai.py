"""The official Python client, sync and async, against the real server and the real model."""

from __future__ import annotations

import base64
import json
import math
import struct
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Literal

import anyio
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel

from server.app import HttpOptions
from tests.clients.live_server import ALIAS, EMBEDDING_MODEL, MAX_MODEL_LEN, MODEL, LiveServer
from tests.harness import serving, until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.contract,
    pytest.mark.timeout(600),
]

QUESTION: list[Any] = [{"role": "user", "content": "Tell me about the sea in one sentence."}]
PROMPT = "The capital of France is"

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Oslo"]},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


class Animal(BaseModel):
    """What the model is to describe."""

    kind: Literal["cat", "dog"]
    legs: Literal[3, 4]
    tame: bool


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[OpenAI]:
    with live.openai() as client:
        yield client


@pytest.fixture
async def aclient(live: LiveServer) -> AsyncIterator[AsyncOpenAI]:
    async with live.async_openai() as client:
        yield client


def chat(client: OpenAI, **fields: Any) -> Any:
    """A short greedy answer, changed by `fields`."""
    return client.chat.completions.create(**greedy_chat(**fields))


def greedy_chat(**fields: Any) -> dict[str, Any]:
    defaults = {"model": MODEL, "messages": QUESTION, "max_tokens": 20, "temperature": 0}
    return {**defaults, **fields}


def complete(client: OpenAI, **fields: Any) -> Any:
    defaults = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    return client.completions.create(**{**defaults, **fields})


def token_ids(live: LiveServer, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    return list(live.http.post("/tokenize", json=body).json()["tokens"])


def assert_engine_free(live: LiveServer, *, within_s: float = 1.0) -> None:
    until(lambda: live.num_running == 0 and live.load == 0, within_s=within_s)


# Chat


def test_a_chat_is_answered(client: OpenAI) -> None:
    answer = chat(client)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert abs(answer.created - time.time()) < 300
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert len(choice.message.content) > 10
    assert choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.prompt_tokens > 10
    assert 0 < usage.completion_tokens <= 20
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_stream_says_what_the_whole_answer_says(client: OpenAI, limit: str) -> None:
    fields = greedy_chat(**{"max_tokens": openai.omit, limit: 24})
    whole = client.chat.completions.create(**fields)
    chunks = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert counts(chunks[-1].usage) == counts(whole.usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])


def counts(usage: Any) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_no_usage_chunk_comes_unasked(client: OpenAI) -> None:
    for chunk in chat(client, stream=True, max_tokens=4):
        assert len(chunk.choices) == 1
        assert chunk.usage is None


def test_the_stream_helper_gathers_the_answer(client: OpenAI) -> None:
    fields = greedy_chat(stop=".", max_tokens=80)  # the helper takes `length` for a failure
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert len(deltas) > 1
    assert "".join(deltas) == final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason


def test_parse_returns_an_object_of_the_model_class(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe a cat."}],
        response_format=Animal,
        temperature=0,
        max_tokens=60,
    )
    assert isinstance(answer.choices[0].message.parsed, Animal)
    assert answer.choices[0].finish_reason == "stop"


def test_the_stream_helper_parses_too(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe a dog."}],
        response_format=Animal,
        temperature=0,
        max_tokens=60,
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Animal)


def test_a_cut_answer_is_no_parsed_object(client: OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=MODEL, messages=QUESTION, response_format=Animal, max_tokens=3
        )


def test_json_object_mode_gives_json(client: OpenAI) -> None:
    answer = chat(
        client,
        messages=[{"role": "user", "content": 'Answer in JSON: {"name": ..., "size": ...}'}],
        response_format={"type": "json_object"},
        max_tokens=120,
    )
    choice = answer.choices[0]
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    else:  # a small model may ramble; what there is must be the beginning of an object
        assert choice.finish_reason == "length"
        assert choice.message.content.lstrip().startswith("{")


def test_three_choices_are_three_answers(client: OpenAI) -> None:
    answer = chat(client, n=3, temperature=1.2, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage.completion_tokens > 3
    streamed = gather(chat(client, n=3, temperature=1.2, seed=5, stream=True))
    assert [choice.index for choice in streamed.choices] == [0, 1, 2]
    for choice in streamed.choices:
        assert choice.message.role == "assistant"
        assert choice.finish_reason in ("stop", "length")
    assert len({choice.message.content for choice in streamed.choices}) == 3


def gather(chunks: Iterable[Any]) -> Any:
    """A stream put together by the client's own accumulator."""
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    return state.current_completion_snapshot


def test_greedy_choices_are_equal(client: OpenAI) -> None:
    answer = chat(client, n=2)
    first, second = (choice.message.content for choice in answer.choices)
    assert first == second


def test_a_stop_string_ends_the_answer_and_is_left_out(client: OpenAI) -> None:
    text = chat(client).choices[0].message.content
    stop = text.split()[3]
    whole = chat(client, stop=[stop])
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].message.content == text[: text.index(stop)]
    pieces = "".join(
        chunk.choices[0].delta.content or "" for chunk in chat(client, stop=stop, stream=True)
    )
    assert pieces == whole.choices[0].message.content
    kept = chat(client, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == text[: text.index(stop) + len(stop)]


def test_logprobs_describe_each_token(client: OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3)
    choice = answer.choices[0]
    entries = choice.logprobs.content
    if choice.finish_reason == "length":
        assert "".join(entry.token for entry in entries) == choice.message.content
        assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert -50 < entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.token in [top.token for top in entry.top_logprobs]
        best = entry.top_logprobs[0].logprob
        assert entry.logprob == pytest.approx(best, abs=0.01), "greedy takes the most likely token"
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.001


def test_streamed_logprobs_are_those_of_the_whole_answer(client: OpenAI) -> None:
    whole = chat(client, logprobs=True, top_logprobs=1).choices[0]
    streamed = [
        entry
        for chunk in chat(client, logprobs=True, top_logprobs=1, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert [entry.token for entry in streamed] == [e.token for e in whole.logprobs.content]
    for mine, theirs in zip(streamed, whole.logprobs.content, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=0.1)


def test_a_seed_repeats_an_answer(client: OpenAI) -> None:
    first, again, other = (
        chat(client, temperature=1.5, seed=seed).choices[0].message.content for seed in (7, 7, 8)
    )
    assert first == again
    assert first != other


def test_logit_bias_forces_and_forbids_a_token(live: LiveServer, client: OpenAI) -> None:
    (forced,) = token_ids(live, " sea")
    answer = chat(client, logit_bias={str(forced): 100}, max_tokens=4)
    assert answer.choices[0].message.content == " sea sea sea sea"
    text = chat(client).choices[0].message.content
    first = token_ids(live, text)[0]
    without = chat(client, logit_bias={str(first): -100}).choices[0].message.content
    assert token_ids(live, without)[0] != first


def test_min_tokens_and_ignore_eos_keep_the_answer_going(client: OpenAI) -> None:
    short = [{"role": "user", "content": "Say only: yes"}]
    answer = chat(client, messages=short, max_tokens=64, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 64
    assert answer.choices[0].finish_reason == "length"
    answer = chat(client, messages=short, max_tokens=64, extra_body={"min_tokens": 40})
    assert answer.usage.completion_tokens >= 40


def test_a_conversation_with_every_role_is_understood(client: OpenAI) -> None:
    call = {"id": "call_1", "type": "function"}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "How warm is it in Oslo?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {**call, "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "7 degrees"},
    ]
    assert chat(client, messages=messages, tools=[WEATHER]).choices[0].finish_reason


def test_concurrent_chats_do_not_mix(client: OpenAI, live: LiveServer) -> None:
    questions = [f"Say the number {number} and tell me about it." for number in range(24)]
    alone = chat(client, messages=[{"role": "user", "content": questions[3]}])
    answers: dict[int, Any] = {}

    async def all_at_once() -> None:
        async with live.async_openai() as aclient, anyio.create_task_group() as group:

            async def one(number: int) -> None:
                messages: list[Any] = [{"role": "user", "content": questions[number]}]
                answers[number] = await aclient.chat.completions.create(
                    **greedy_chat(messages=messages)
                )

            for number in range(len(questions)):
                group.start_soon(one, number)

    anyio.run(all_at_once)
    assert len(answers) == 24
    assert len({answer.id for answer in answers.values()}) == 24
    assert answers[3].usage.prompt_tokens == alone.usage.prompt_tokens
    # Batches of other sizes round differently; the beginning is what a mix-up would change.
    assert answers[3].choices[0].message.content[:8] == alone.choices[0].message.content[:8]
    assert_engine_free(live)


# Tools


def test_a_required_tool_is_called(client: OpenAI) -> None:
    answer = chat(
        client,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER, CLOCK],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=120,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    check_call(call.function)
    assert call.id
    assert call.type == "function"


def check_call(function: Any) -> None:
    arguments = json.loads(function.arguments)
    if function.name == "get_weather":
        assert arguments.keys() == {"city", "unit"}
        assert arguments["city"] in ("Paris", "Oslo")
    else:
        assert function.name == "get_time"
        assert arguments["zone"] in ("UTC", "CET")


def test_a_named_tool_is_called(client: OpenAI) -> None:
    answer = chat(
        client,
        tools=[WEATHER, CLOCK],
        tool_choice={"type": "function", "function": {"name": "get_time"}},
        max_tokens=60,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_time"
    check_call(call.function)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "get_weather"}}],
    ids=["required", "named"],
)
def test_a_streamed_call_is_the_whole_call(client: OpenAI, choice: Any) -> None:
    fields = greedy_chat(tools=[WEATHER, CLOCK], tool_choice=choice, max_tokens=120)
    whole = client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as stream:
        events = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == whole.finish_reason
    assert calls_of(final) == calls_of(whole) != []
    assert [(event.name, event.arguments) for event in events] == calls_of(whole)
    for call in final.message.tool_calls:
        check_call(call.function)
        assert call.type == "function"
    assert len({call.id for call in final.message.tool_calls}) == len(final.message.tool_calls)


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_tools_that_need_not_be_called_are_fine(client: OpenAI, choice: str) -> None:
    whole = chat(client, tools=[WEATHER], tool_choice=choice).choices[0]
    assert whole.message.content or whole.message.tool_calls
    if choice == "none":
        assert whole.message.tool_calls is None
    final = gather(chat(client, tools=[WEATHER], tool_choice=choice, stream=True)).choices[0]
    assert final.message.content == whole.message.content
    assert final.finish_reason == whole.finish_reason


# Completions


def test_a_completion_streams_what_it_says_whole(client: OpenAI) -> None:
    whole = complete(client)
    assert whole.object == "text_completion"
    assert "Paris" in whole.choices[0].text
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == whole.choices[0].text
    assert counts(chunks[-1].usage) == counts(whole.usage)


def test_prompts_and_choices_are_numbered_in_order(client: OpenAI) -> None:
    answer = complete(client, prompt=[PROMPT, "One two three four"], n=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1]
    assert (
        texts[2]
        == texts[3]
        == complete(client, prompt="One two three four", max_tokens=4).choices[0].text
    )
    assert texts[0] != texts[2]


def test_a_prompt_may_be_token_ids(live: LiveServer, client: OpenAI) -> None:
    ids = token_ids(live, PROMPT)
    assert complete(client, prompt=ids).choices[0].text == complete(client).choices[0].text


def test_echo_repeats_the_prompt_with_its_logprobs(client: OpenAI) -> None:
    answer = complete(client, echo=True, logprobs=2, max_tokens=3)
    choice = answer.choices[0]
    assert choice.text.startswith(PROMPT)
    assert choice.text == PROMPT + complete(client, max_tokens=3).choices[0].text
    logprobs = choice.logprobs
    lengths = {
        len(logprobs.tokens),
        len(logprobs.token_logprobs),
        len(logprobs.top_logprobs),
        len(logprobs.text_offset),
    }
    assert lengths == {answer.usage.total_tokens}
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert "".join(logprobs.tokens) == choice.text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token
    scored = complete(client, echo=True, logprobs=1, max_tokens=0)
    assert scored.choices[0].text == PROMPT
    assert scored.usage.completion_tokens == 0


def test_a_long_seeded_prompt_is_answered_and_the_engine_lives(
    live: LiveServer, client: OpenAI
) -> None:
    ids = (token_ids(live, "All work and no play makes Jack a dull boy. ") * 300)[:2020]
    restarts = live.metric("shuntyard_engine_restarts")
    first, again = (
        complete(client, prompt=ids, seed=11, temperature=1, max_tokens=8, timeout=300)
        for _ in range(2)
    )
    assert first.usage.prompt_tokens == 2020
    assert first.usage.completion_tokens <= 8
    assert first.choices[0].text == again.choices[0].text
    assert live.metric("shuntyard_engine_restarts") == restarts
    assert chat(client, max_tokens=4).choices[0].message.content


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ({"regex": "(yes|no)!"}, ("yes!", "no!")),
        ({"choice": ["red", "green"]}, ("red", "green")),
        ({"grammar": 'root ::= "left" | "right"'}, ("left", "right")),
    ],
    ids=["regex", "choice", "grammar"],
)
def test_output_follows_a_constraint(
    client: OpenAI, constraint: dict[str, Any], expected: tuple[str, ...]
) -> None:
    answer = chat(client, extra_body={"structured_outputs": constraint})
    assert answer.choices[0].message.content in expected


# Embeddings and models


def test_embeddings_are_the_same_as_base64_and_as_floats(client: OpenAI) -> None:
    texts = ["A cat sits on the mat.", "A kitten lies on a rug.", "Shares fell on Monday."]
    default = client.embeddings.create(model=EMBEDDING_MODEL, input=texts)
    floats = client.embeddings.create(model=EMBEDDING_MODEL, input=texts, encoding_format="float")
    packed = client.embeddings.create(model=EMBEDDING_MODEL, input=texts, encoding_format="base64")
    assert [item.index for item in default.data] == [0, 1, 2]
    for item, plain, raw in zip(default.data, floats.data, packed.data, strict=True):
        assert len(item.embedding) == 384
        assert math.hypot(*item.embedding) == pytest.approx(1, abs=1e-3)
        assert item.embedding == pytest.approx(plain.embedding, abs=1e-5)
        assert isinstance(raw.embedding, str)
        unpacked = struct.unpack("<384f", base64.b64decode(raw.embedding))
        assert list(unpacked) == pytest.approx(plain.embedding, abs=1e-5)
    cat, kitten, shares = (item.embedding for item in default.data)
    assert dot(cat, kitten) > dot(cat, shares) + 0.2
    assert default.usage.prompt_tokens == default.usage.total_tokens > 10


def dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def test_the_models_are_listed_and_found(client: OpenAI) -> None:
    ids = [model.id for model in client.models.list()]
    assert ids[:2] == [MODEL, ALIAS]
    assert EMBEDDING_MODEL in ids
    assert client.models.retrieve(ALIAS).id == ALIAS
    assert client.models.retrieve(MODEL).object == "model"
    assert chat(client, model=ALIAS, max_tokens=2).model == ALIAS
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody/knows")


# Headers and errors


def test_the_request_id_is_on_every_answer(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        **greedy_chat(max_tokens=2), extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse()._request_id == "mine-1"
    assert chat(client, max_tokens=2)._request_id
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, temperature=9)
    assert caught.value.request_id


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": "x"}, openai.BadRequestError, "messages"),
        (
            {"messages": [{"role": "king", "content": ""}]},
            openai.BadRequestError,
            "messages.0",
        ),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"stop": ["a"] * 5}, openai.BadRequestError, "stop"),
        ({"logit_bias": {"10000000": 1}}, openai.BadRequestError, "logit_bias"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs"),
        ({"tools": []}, openai.BadRequestError, "tools"),
        ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice"),
        ({"model": "gpt-none"}, openai.NotFoundError, "model"),
        (
            {"messages": [{"role": "user", "content": "word " * 4000}]},
            openai.BadRequestError,
            "messages",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_bad_request_is_the_right_exception_and_names_its_field(
    client: OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(kind) as caught:
        chat(client, **fields)
    assert caught.value.param == param
    assert caught.value.message
    assert caught.value.code
    with pytest.raises(kind):
        chat(client, **fields, stream=True)


def test_a_context_overflow_tells_the_limit(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{MAX_MODEL_LEN} tokens") as caught:
        complete(client, prompt="word " * 4000)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "foo**"},
        {"regex": "[z-a]"},
        {"grammar": "root ::= missing"},
        {"json": {"type": "no such type"}},
    ],
    ids=str,
)
def test_a_bad_constraint_is_refused_and_the_next_request_works(
    client: OpenAI, constraint: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, extra_body={"structured_outputs": constraint})
    assert len(caught.value.message) < 2000
    assert chat(client, max_tokens=2).choices[0].message.content


def test_a_wrong_key_is_an_authentication_error() -> None:
    with serving(script="Hello.", http=HttpOptions(api_keys={"sk-right": "someone"})) as server:
        assert server.openai(api_key="sk-right").models.list().data
        with pytest.raises(openai.AuthenticationError) as caught:
            server.openai(api_key="sk-wrong").chat.completions.create(
                model=MODEL, messages=QUESTION
            )
        assert caught.value.code == "invalid_api_key"


# Leaving early


def endless(**fields: Any) -> dict[str, Any]:
    return greedy_chat(max_tokens=1500, extra_body={"ignore_eos": True}, **fields)


@pytest.mark.parametrize("n", [1, 3])
def test_breaking_out_of_a_stream_frees_the_engine(
    live: LiveServer, client: OpenAI, n: int
) -> None:
    stream = client.chat.completions.create(**endless(stream=True, n=n, temperature=1))
    for number, _ in enumerate(stream):
        if number == 6:
            break
    until(lambda: live.num_running == n)
    assert live.load == 1
    stream.close()
    assert_engine_free(live)


def test_a_timeout_frees_the_engine(live: LiveServer, client: OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1.5).chat.completions.create(**endless())
    assert_engine_free(live)
    aborted = live.metric("vllm:request_success_total", finished_reason="abort")
    assert aborted >= 1


@pytest.mark.anyio
async def test_cancelling_frees_the_engine(live: LiveServer, aclient: AsyncOpenAI) -> None:
    with anyio.move_on_after(2) as scope:
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(lambda: aclient.chat.completions.create(**endless()))
    assert scope.cancelled_caught
    assert_engine_free(live)


# Async


@pytest.mark.anyio
async def test_the_async_client_says_the_same(client: OpenAI, aclient: AsyncOpenAI) -> None:
    expected = chat(client)
    answer = await aclient.chat.completions.create(**greedy_chat())
    assert answer.choices[0].message.content == expected.choices[0].message.content
    stream = await aclient.chat.completions.create(**greedy_chat(stream=True))
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == expected.choices[0].message.content
    completion = await aclient.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0
    )
    assert "Paris" in completion.choices[0].text


@pytest.mark.anyio
async def test_the_async_stream_helper_accumulates_tools(aclient: AsyncOpenAI) -> None:
    fields = greedy_chat(tools=[WEATHER], tool_choice="required", max_tokens=120)
    async with aclient.chat.completions.stream(**fields) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    for call in final.choices[0].message.tool_calls or []:
        check_call(call.function)


@pytest.mark.anyio
async def test_async_parse_models_and_embeddings(aclient: AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Describe a cat."}]
    answer = await aclient.chat.completions.parse(
        model=MODEL, messages=messages, response_format=Animal, temperature=0, max_tokens=60
    )
    assert isinstance(answer.choices[0].message.parsed, Animal)
    assert MODEL in [model.id async for model in aclient.models.list()]
    embedding = await aclient.embeddings.create(model=EMBEDDING_MODEL, input="sea")
    assert len(embedding.data[0].embedding) == 384
