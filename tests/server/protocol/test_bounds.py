"""What a body may cost, however wrong it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from server.openapi import TABLE
from server.protocol.base import RequestBody, parse_body
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import MAX_CHOICES, CompletionRequest
from server.protocol.tokenization import DetokenizeRequest, TokenizeRequest
from spot.errors import InvalidRequest
from tests.harness import serving

USER = {"role": "user", "content": "Hi"}
MANY = 300_000
BODIES: list[type[RequestBody]] = [item.request for item in TABLE if item.request is not None]


def list_schemas(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for value in schema.values():
            yield from list_schemas(value)
    elif isinstance(schema, (list, tuple)):
        for value in schema:
            yield from list_schemas(value)


@pytest.mark.parametrize("model", BODIES, ids=lambda model: str(model.__name__))
def test_every_list_stops_at_its_first_wrong_item(model: type[RequestBody]) -> None:
    """Otherwise each item of a long list costs an error of its own: a minute for one request."""
    for schema in list_schemas(model.__pydantic_core_schema__):
        assert schema.get("fail_fast"), schema


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        (CompletionRequest, {"prompt": ["a"] * MANY}, "prompt"),
        (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}, "stop.0"),
        (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys("ab", "x")}, "logit_bias"),
        (
            CompletionRequest,
            {"prompt": "a", "logit_bias": {str(i): "x" for i in range(MANY)}},
            "logit_bias",
        ),
        (ChatCompletionRequest, {"messages": [{}] * MANY}, "messages.0"),
        (ChatCompletionRequest, {"messages": [USER], "documents": [1] * MANY}, "documents.0"),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": [{}] * MANY}]},
            "messages.0.content.0.type",
        ),
        (TokenizeRequest, {"prompt": "a", "tools": [1] * MANY}, "tools.0"),
        (DetokenizeRequest, {"tokens": ["a"] * MANY}, "tokens.0"),
    ],
)
def test_many_errors_cost_no_more_than_one(
    model: type[RequestBody], body: dict[str, Any], param: str
) -> None:
    began_s = time.process_time()
    with pytest.raises(InvalidRequest) as caught:
        parse_body(model, body)
    assert time.process_time() - began_s < 0.5
    assert caught.value.param == param
    assert len(caught.value.message) < 2000


def test_a_bias_that_is_not_a_number_is_named() -> None:
    bias = {"1": 1, "2": "x", "3": None, "4": True, "5": float("inf")}
    with pytest.raises(InvalidRequest, match="'2', '3', '4', '5'"):
        parse_body(CompletionRequest, {"prompt": "a", "logit_bias": bias})


def test_prompts_times_n_are_bounded() -> None:
    with serving("Hello.") as server:
        prompts = ["a"] * 16
        refused = server.complete(prompts, n=MAX_CHOICES // 16 + 1)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "n"
        assert not server.engine.submitted
        assert len(server.complete(prompts, n=2).json()["choices"]) == 32


def test_long_texts_do_not_hold_up_others() -> None:
    """Their tokens are made in a thread, and they are the same."""
    with serving("Hello.") as server:
        text = "word " * 20_000
        tokens = server.post("/tokenize", {"prompt": text}).json()["tokens"]
        assert tokens == server.tokenizer.encode(text)
        assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == text
