"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from server.protocol.responses import DetokenizeResponse, TokenizeResponse
from tests.harness import Server, chat_body, serving

MISSING, VALUE = "missing_required_parameter", "invalid_value"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("x", max_model_len=64) as running:
        yield running


@pytest.mark.parametrize("text", ["", "Hello 😀 world", "<|im_start|>x", "word " * 500])
def test_text_goes_there_and_back(server: Server, text: str) -> None:
    answer = server.post("/tokenize", {"prompt": text}).json()
    TokenizeResponse.model_validate(answer)
    assert answer["tokens"] == server.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 64, "which is no limit here"
    back = server.post("/detokenize", {"tokens": answer["tokens"]}).json()
    DetokenizeResponse.model_validate(back)
    assert back == {"prompt": text}


def test_a_conversation_is_what_chat_would_send(server: Server) -> None:
    body = chat_body("Hello")
    assert server.post("/v1/chat/completions", body).status_code == 200
    answer = server.post("/tokenize", body).json()
    assert answer["tokens"] == server.engine.submitted[-1].prompt_token_ids


def test_options_of_the_template_apply(server: Server) -> None:
    body = {"messages": [*chat_body()["messages"], {"role": "assistant", "content": "He"}]}
    plain = server.post("/tokenize", {**body, "add_generation_prompt": False}).json()["tokens"]
    prompted = server.post("/tokenize", body).json()["tokens"]
    assert prompted[: len(plain)] == plain
    assert len(prompted) > len(plain)
    continued = server.post("/tokenize", {**body, "continue_final_message": True}).json()["tokens"]
    assert server.tokenizer.decode(continued).endswith("assistant\nHe")


def test_token_strings_are_given_if_asked_for(server: Server) -> None:
    body = {"prompt": "a b", "return_token_strs": True}
    assert server.post("/tokenize", body).json()["token_strs"] == ["a", "Ġb"]
    assert server.post("/tokenize", {"prompt": "a b"}).json()["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", VALUE),
        ("/tokenize", {"prompt": "x", **chat_body()}, "prompt", VALUE),
        ("/tokenize", {"prompt": 3}, "prompt", VALUE),
        ("/tokenize", {"messages": []}, "messages", VALUE),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages.0.content", MISSING),
        ("/tokenize", {"prompt": "x", "chat_template": "y", "messages": None}, None, None),
        (
            "/tokenize",
            {**chat_body(), "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            VALUE,
        ),
        ("/tokenize", {**chat_body(), "chat_template": "{{ 1 }}"}, "chat_template", VALUE),
        ("/detokenize", {}, "tokens", MISSING),
        ("/detokenize", {"tokens": "x"}, "tokens", VALUE),
        ("/detokenize", {"tokens": ["x"]}, "tokens.0", VALUE),
        ("/detokenize", {"tokens": [-1]}, "tokens.0", VALUE),
        ("/detokenize", {"tokens": [49152]}, "tokens", VALUE),
        ("/detokenize", {"tokens": [2**70]}, None, None),
    ],
)  # fmt: skip
def test_bad_bodies_are_named(
    server: Server, path: str, body: dict[str, Any], param: str | None, code: str | None
) -> None:
    response = server.post(path, body)
    if param is None:
        assert response.status_code < 500
        return
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})]
)
def test_an_unknown_model_is_a_404(server: Server, path: str, body: dict[str, Any]) -> None:
    response = server.post(path, {**body, "model": "x"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert server.post(path, {**body, "model": "demo"}).status_code == 200
