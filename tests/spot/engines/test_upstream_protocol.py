"""A generation becomes the request that an upstream takes, at both endpoints."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from spot.engines.upstream_protocol import Endpoint, build_request, choose_endpoint
from spot.errors import InvalidRequest
from spot.generation import Generation, SamplingParams, StructuredOutput

BOTH: tuple[Endpoint, ...] = ("generate", "completions")


def generation(**sampling: Any) -> Generation:
    return Generation("g", [1, 2, 3], SamplingParams(**{"max_tokens": 8, **sampling}))


def body_of(generation: Generation, endpoint: Endpoint) -> dict[str, Any]:
    request = build_request(generation, endpoint, model="m")
    return dict(json.loads(request.body))


def sampling_of(generation: Generation, endpoint: Endpoint) -> dict[str, Any]:
    """The sampling parameters, wherever they stand."""
    body = body_of(generation, endpoint)
    return dict(body["sampling_params"] if endpoint == "generate" else body)


def test_a_completion_asks_for_token_ids_and_usage() -> None:
    body = body_of(generation(), "completions")
    assert body == {
        "model": "m",
        "prompt": [1, 2, 3],
        "stream": True,
        "stream_options": {"include_usage": True},
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "max_tokens": 8,
        "min_tokens": 0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": False,
        "stop_token_ids": [],
        "bad_words": [],
    }


def test_generate_needs_no_text() -> None:
    request = build_request(generation(), "generate", model="m")
    body = json.loads(request.body)
    assert request.path == "/inference/v1/generate"
    assert body["token_ids"] == [1, 2, 3]
    assert body["sampling_params"]["detokenize"] is False
    assert "prompt" not in body


@pytest.mark.parametrize("endpoint", BOTH)
def test_all_sampling_parameters_are_said_by_vllms_names(endpoint: Endpoint) -> None:
    said = sampling_of(
        generation(
            min_tokens=2,
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            repetition_penalty=1.1,
            seed=-5,
            ignore_eos=True,
            stop_token_ids=[7],
            bad_words=["no"],
            logit_bias={5: 1.5, 6: -1000.0},
            allowed_token_ids=[5, 6],
            thinking_token_budget=9,
        ),
        endpoint,
    )
    assert said["min_tokens"] == 2
    assert said["temperature"] == 0.5
    assert said["top_p"] == 0.9
    assert said["top_k"] == 40
    assert said["min_p"] == 0.1
    assert said["presence_penalty"] == 0.2
    assert said["frequency_penalty"] == 0.3
    assert said["repetition_penalty"] == 1.1
    assert said["seed"] == -5
    assert said["ignore_eos"] is True
    assert said["stop_token_ids"] == [7]
    assert said["bad_words"] == ["no"]
    assert said["logit_bias"] == {"5": 1.5, "6": -100.0}
    assert said["allowed_token_ids"] == [5, 6]
    assert said["thinking_token_budget"] == 9


@pytest.mark.parametrize("endpoint", BOTH)
def test_priority_and_salt_stand_outside_of_sampling(endpoint: Endpoint) -> None:
    salted = Generation("g", [1], SamplingParams(1), priority=-3, cache_salt="s")
    body = body_of(salted, endpoint)
    assert (body["priority"], body["cache_salt"]) == (-3, "s")


def test_extra_arguments_have_two_names() -> None:
    given = generation(extra_args={"a": 1})
    assert body_of(given, "completions")["vllm_xargs"] == {"a": 1}
    assert sampling_of(given, "generate")["extra_args"] == {"a": 1}


def test_only_generate_can_be_told_whether_reasoning_has_ended() -> None:
    given = Generation("g", [1], SamplingParams(1), reasoning_ended=True)
    assert body_of(given, "generate")["reasoning_ended"] is True
    assert "reasoning_ended" not in body_of(given, "completions")


@pytest.mark.parametrize("endpoint", BOTH)
def test_prompt_logprobs_cannot_be_streamed(endpoint: Endpoint) -> None:
    request = build_request(generation(prompt_logprobs=0), endpoint, model="m")
    body = json.loads(request.body)
    assert not request.is_streamed
    assert body["stream"] is False
    assert "stream_options" not in body


@pytest.mark.parametrize(("asked", "sent"), [(0, 0), (3, 4), (-1, -1)])
def test_generate_counts_the_actual_token_as_an_alternative(asked: int, sent: int) -> None:
    assert sampling_of(generation(logprobs=asked), "generate")["logprobs"] == sent
    assert sampling_of(generation(logprobs=asked), "completions")["logprobs"] == asked


def test_the_maximum_of_logprobs_is_asked_of_completions() -> None:
    def choose(logprobs: int | None, *, has_generate: bool = True) -> Endpoint:
        return choose_endpoint(
            generation(logprobs=logprobs), has_generate=has_generate, max_logprobs=20
        )

    assert [choose(n) for n in (None, 0, 19, -1)] == ["generate"] * 4
    assert choose(20) == "completions"
    assert choose(3, has_generate=False) == "completions"


@pytest.mark.parametrize("endpoint", BOTH)
@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (StructuredOutput(json_schema={"type": "object"}), {"json": {"type": "object"}}),
        (StructuredOutput(json_schema='{"type": "object"}'), {"json": '{"type": "object"}'}),
        (StructuredOutput(json_schema=True), {"json": {}}),
        (StructuredOutput(json_object=True), {"json_object": True}),
        (StructuredOutput(regex="a+"), {"regex": "a+"}),
        (StructuredOutput(choice=["a", "b"]), {"choice": ["a", "b"]}),
        (StructuredOutput(grammar="root ::= x"), {"grammar": "root ::= x"}),
        (StructuredOutput(structural_tag="{}"), {"structural_tag": "{}"}),
        (StructuredOutput(regex="a", whitespace_pattern=" "), {"whitespace_pattern": " "}),
        (
            StructuredOutput(regex="a", disable_any_whitespace=True),
            {"disable_any_whitespace": True},
        ),
    ],
)
def test_constraints(
    endpoint: Endpoint, constraint: StructuredOutput, said: dict[str, Any]
) -> None:
    sent = sampling_of(generation(structured=constraint), endpoint)["structured_outputs"]
    assert said.items() <= sent.items()
    kinds = {"json", "json_object", "regex", "choice", "grammar", "structural_tag"}
    assert len(kinds & sent.keys()) == 1


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"seed": 2**63}, "seed"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"structured": StructuredOutput(json_schema=False)}, "structured"),
        ({"extra_args": {"a": object()}}, None),
    ],
)
def test_what_cannot_be_sent_is_the_requests_fault(
    sampling: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request(generation(**sampling), "completions", model="m")
    assert caught.value.param == param
