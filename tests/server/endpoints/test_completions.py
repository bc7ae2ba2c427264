"""`POST /v1/completions`: prompts, fields, echo, log probabilities, streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from server.protocol.responses import Completion, CompletionChunk
from server.text.tokenizer import ChatTokenizer
from tests.harness import Server, choice_of, serving

PATH = "/v1/completions"
MISSING, VALUE = "missing_required_parameter", "invalid_value"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(" the end.") as running:
        yield running


@pytest.fixture(scope="module")
def seeded() -> Iterator[Server]:
    with serving(None, step_time_s=0) as running:
        yield running


REFUSED: list[tuple[str, Any, str, str]] = [
    ("prompt", None, "prompt", VALUE),
    ("prompt", "", "prompt", VALUE),
    ("prompt", [], "prompt", VALUE),
    ("prompt", [""], "prompt.0", VALUE),
    ("prompt", ["a", ""], "prompt.1", VALUE),
    ("prompt", [[]], "prompt.0", VALUE),
    ("prompt", [[1], []], "prompt.1", VALUE),
    ("prompt", 5, "prompt", VALUE),
    ("prompt", {}, "prompt", VALUE),
    ("prompt", [None], "prompt.0", VALUE),
    ("prompt", [1.5], "prompt.0", VALUE),
    ("prompt", [True], "prompt.0", VALUE),
    ("prompt", [-1], "prompt.0", VALUE),
    ("prompt", [49152], "prompt", VALUE),
    ("prompt", [2**40], "prompt.0", VALUE),
    ("prompt", [[5], [49152]], "prompt.1", VALUE),
    ("prompt", ["a", 1], "prompt.1", VALUE),
    ("prompt", [1, "a"], "prompt.1", VALUE),
    ("prompt", ["a", [1]], "prompt.1", VALUE),
    ("prompt", ["a"] * 1025, "prompt", VALUE),
    ("max_tokens", -1, "max_tokens", VALUE),
    ("max_tokens", "5", "max_tokens", VALUE),
    ("max_tokens", True, "max_tokens", VALUE),
    ("max_tokens", 5000, "max_tokens", VALUE),
    ("logprobs", -2, "logprobs", VALUE),
    ("logprobs", 21, "logprobs", VALUE),
    ("logprobs", "1", "logprobs", VALUE),
    ("logprobs", True, "logprobs", VALUE),
    ("echo", "yes", "echo", VALUE),
    ("suffix", "x", "suffix", "not_supported"),
    ("suffix", 1, "suffix", VALUE),
    ("best_of", 3, "best_of", "unsupported_parameter"),
    ("use_beam_search", True, "use_beam_search", "unsupported_parameter"),
    ("prompt_embeds", "AAAA", "prompt_embeds", "unsupported_parameter"),
    ("n", 0, "n", VALUE),
    ("stop", ["a", "b", "c", "d", "e"], "stop", VALUE),
    ("stream_options", {"include_usage": True}, "stream_options", VALUE),
    ("temperature", 2.5, "temperature", VALUE),
    ("response_format", {"type": "xml"}, "response_format", VALUE),
    ("model", 7, "model", VALUE),
]


@pytest.mark.parametrize(
    ("field", "value", "param", "code"), REFUSED, ids=lambda value: str(value)[:30]
)
def test_a_bad_value_is_a_400_that_names_it(
    server: Server, field: str, value: Any, param: str, code: str
) -> None:
    num_before = len(server.engine.submitted)
    response = server.post(PATH, {"prompt": "x", field: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert error["type"] == "invalid_request_error"
    assert len(response.content) < 10_000
    assert len(server.engine.submitted) == num_before


def test_a_missing_prompt_is_a_missing_parameter(server: Server) -> None:
    error = server.post(PATH, {}).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", MISSING)


def test_prompt_logprobs_are_not_for_streams(server: Server) -> None:
    response = server.complete(prompt_logprobs=1, stream=True)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt_logprobs"


ACCEPTED: list[dict[str, Any]] = [
    {},
    {"prompt": ["a", "b"]},
    {"prompt": [5, 6, 7]},
    {"prompt": [[5], [6, 7]], "n": 2},
    {"prompt": ["a"] * 100, "max_tokens": 1},
    {"max_tokens": None, "logprobs": None, "echo": None, "stop": None, "suffix": None, "n": None},
    {"max_tokens": 0},
    {"max_tokens": 0, "echo": True},
    {"max_tokens": 4096},
    {"echo": True},
    {"echo": True, "logprobs": 2},
    {"echo": True, "logprobs": 0, "n": 2},
    {"echo": True, "prompt": [5, 6, 7]},
    {"logprobs": 0},
    {"logprobs": 5, "max_tokens": 3},
    {"logprobs": 20},
    {"suffix": ""},
    {"best_of": 1},
    {"n": 2, "best_of": 2},
    {"temperature": 0, "n": 2},
    {"ignore_eos": True, "max_tokens": 5},
    {"add_special_tokens": False},
    {"return_token_ids": True, "n": 2},
    {"return_tokens_as_token_ids": True, "logprobs": 1},
    {"seed": 1234, "user": "x", "unknown": [1], "repetition_penalty": 1.0},
    {"truncate_prompt_tokens": 1, "prompt": "a b c"},
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=lambda fields: json.dumps(fields)[:60])
def test_good_values_are_accepted_whole_and_streamed_alike(
    server: Server, fields: dict[str, Any]
) -> None:
    body = {"prompt": "x", **fields}
    response = server.post(PATH, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    Completion.model_validate(answer)
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    stream = server.stream(PATH, {**body, "stream_options": {"include_usage": True}})
    assert stream.is_done
    for chunk in stream.chunks:
        CompletionChunk.model_validate(chunk)
    assert len({chunk["id"] for chunk in stream.chunks}) == 1
    assert stream.usage == answer["usage"]
    for choice in answer["choices"]:
        index = choice["index"]
        pieces = stream.choices(index)
        assert stream.text(index) == choice["text"]
        assert stream.finish_reasons(index) == [choice["finish_reason"]]
        assert pieces[-1]["finish_reason"] is not None
        assert [i for p in pieces for i in p.get("token_ids") or []] == choice.get("token_ids", [])
        blocks = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
        if choice["logprobs"] is None:
            assert blocks == []
        else:
            joined = {key: [v for b in blocks for v in b[key]] for key in choice["logprobs"]}
            assert joined == choice["logprobs"]


def test_choices_are_numbered_prompt_by_prompt(tokenizer: ChatTokenizer) -> None:
    def script(generation: Any) -> list[int]:
        text = f"{tokenizer.decode(generation.prompt_token_ids)}{choice_of(generation)}"
        return tokenizer.encode(text)

    with serving(script) as server:
        answer = server.complete(["a", "bb"], n=2).json()
        assert [choice["text"] for choice in answer["choices"]] == ["a0", "a1", "bb2", "bb3"]
        prompt_tokens = len(tokenizer.encode("a")) + len(tokenizer.encode("bb"))
        assert answer["usage"]["prompt_tokens"] == prompt_tokens
        stream = server.stream_complete(["a", "bb"], n=2)
        assert [stream.text(index) for index in range(4)] == ["a0", "a1", "bb2", "bb3"]


def test_the_default_is_16_tokens() -> None:
    with serving("word " * 40) as server:
        assert server.complete().json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", ["One two 😀 three", [500, 600, 700, 800]])
def test_echo_aligns_text_tokens_and_offsets(seeded: Server, prompt: Any) -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": 6, "temperature": 0, "seed": 1234}
    answer = seeded.complete(prompt, **fields).json()
    (choice,) = answer["choices"]
    given = prompt if isinstance(prompt, str) else seeded.tokenizer.decode(prompt)
    assert choice["text"].startswith(given)
    block = choice["logprobs"]
    total = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    assert {len(values) for values in block.values()} == {total}
    text = choice["text"]
    for token, offset in zip(block["tokens"], block["text_offset"], strict=True):
        if token not in seeded.tokenizer.added.values():
            assert text[offset : offset + len(token)] == token
    stream = seeded.stream_complete(prompt, **fields)
    assert stream.text() == text
    assert sum(given in (piece["text"] or "") for piece in stream.choices()) == 1


def test_greedy_echo_is_its_own_continuation(seeded: Server) -> None:
    """What lm-eval does: the log probability of a continuation, by echo alone."""
    fields = {"echo": True, "logprobs": 1, "temperature": 0}
    ids = [500, 600, 700]
    grown = seeded.complete(ids, max_tokens=3, return_token_ids=True, **fields).json()["choices"][0]
    whole = [*ids, *grown["token_ids"]]
    scored = seeded.complete(whole, max_tokens=0, **fields).json()["choices"][0]
    assert scored["logprobs"]["token_logprobs"] == pytest.approx(
        [None, *grown["logprobs"]["token_logprobs"][1:]]
    )


def test_offsets_are_right_while_text_is_held_back() -> None:
    with serving("one two STO three STOP four") as server:
        stream = server.stream_complete(logprobs=0, stop=["STOP"], max_tokens=50)
        assert stream.text() == "one two STO three "
        blocks = [piece["logprobs"] for piece in stream.choices() if piece["logprobs"]]
        tokens = [token for block in blocks for token in block["tokens"]]
        offsets = [offset for block in blocks for offset in block["text_offset"]]
        expected = [len("".join(tokens[:position])) for position in range(len(tokens))]
        assert offsets == expected


def test_a_prompt_over_the_context_names_the_prompt() -> None:
    with serving("x", max_model_len=32) as server:
        for prompt, param in (("word " * 50, "prompt"), (["ok", "word " * 50], "prompt.1")):
            error = server.complete(prompt).json()["error"]
            assert (error["param"], error["code"]) == (param, "context_length_exceeded")
            assert "maximum context length is 32 tokens" in error["message"]
        assert server.complete([5] * 32, max_tokens=1).status_code == 400
        assert server.complete([5] * 31, max_tokens=1).status_code == 200
        scored = server.complete([5] * 32, max_tokens=0, echo=True, logprobs=1)
        assert scored.json()["error"]["code"] == "context_length_exceeded"
        assert server.complete([5] * 31, max_tokens=0, echo=True, logprobs=1).status_code == 200


def test_prompt_logprobs_come_per_choice(seeded: Server) -> None:
    choice = seeded.complete([500, 600], prompt_logprobs=2, max_tokens=1).json()["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert {"logprob", "rank", "decoded_token"} == set(second["600"])
