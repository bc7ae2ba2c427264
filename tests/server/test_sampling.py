"""From requests and defaults to sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest

from server.protocol.base import parse_body
from server.protocol.completions import CompletionRequest
from server.sampling import (
    SamplingDefaults,
    context_exceeded,
    for_choice,
    logit_bias,
    output_limit,
    sampling_params,
    structured_output,
)
from spot.errors import ContextLengthExceeded, InvalidRequest
from spot.generation import SamplingParams, StructuredOutput

VOCAB_SIZE = 100


def body(**fields: Any) -> CompletionRequest:
    return parse_body(CompletionRequest, {"prompt": "x", **fields})


def params(defaults: SamplingDefaults | None = None, **fields: Any) -> SamplingParams:
    return sampling_params(
        body(**fields),
        defaults or SamplingDefaults(),
        max_tokens=10,
        logprobs=None,
        prompt_logprobs=None,
        vocab_size=VOCAB_SIZE,
        structured=None,
    )


def limit(requested: int | None, *, prompt: int = 50, default: int | None = None) -> int:
    return output_limit(
        requested,
        num_prompt_tokens=prompt,
        max_model_len=100,
        default=default,
        prompt_param="messages",
        limit_param="max_tokens",
    )


@pytest.mark.parametrize(
    ("requested", "default", "expected"),
    [(None, None, 50), (None, 7, 7), (None, 70, 50), (60, None, 50), (5, 7, 5), (100, None, 50)],
)
def test_the_output_limit_is_cut_to_the_context(
    requested: int | None, default: int | None, expected: int
) -> None:
    assert limit(requested, default=default) == expected


def test_more_than_the_context_could_hold_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot be greater than") as caught:
        limit(101)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(("requested", "prompt"), [(None, 100), (1, 100), (5, 101), (0, 100)])
def test_a_prompt_without_room_is_refused(requested: int | None, prompt: int) -> None:
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 100 tokens"):
        limit(requested, prompt=prompt)


def test_a_prompt_with_room_for_one_token_may_be_scored_alone() -> None:
    assert limit(0, prompt=99) == 0


def test_the_length_is_told_where_it_is_known() -> None:
    assert "has 7 tokens" in context_exceeded(5, 7, "prompt").message
    assert "longer than that" in context_exceeded(5, None, "prompt").message


def test_without_defaults_openais_apply() -> None:
    assert params() == SamplingParams(max_tokens=10)


NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"]


@pytest.mark.parametrize("name", NUMBERS)
def test_defaults_apply_where_the_request_says_nothing(name: str) -> None:
    defaults = SamplingDefaults(**{name: 0.5})
    assert getattr(params(defaults), name) == 0.5
    assert getattr(params(defaults, **{name: None}), name) == 0.5
    assert getattr(params(defaults, **{name: 1}), name) == 1


def test_zero_is_a_value_not_an_absence() -> None:
    defaults = SamplingDefaults(temperature=0.7, presence_penalty=1.5, top_k=50)
    chosen = params(defaults, temperature=0, presence_penalty=0, top_k=0)
    assert (chosen.temperature, chosen.presence_penalty, chosen.top_k) == (0, 0, 0)


def test_top_p_zero_is_the_best_token_only() -> None:
    chosen = params(top_p=0)
    assert (chosen.top_p, chosen.top_k) == (1.0, 1)


@pytest.mark.parametrize(("asked", "expected"), [(-1, 0), (0, 0), (5, 5), (10**9, VOCAB_SIZE)])
def test_top_k_is_bounded(asked: int, expected: int) -> None:
    assert params(top_k=asked).top_k == expected


def test_min_tokens_over_the_limit_is_refused() -> None:
    assert params(min_tokens=10).min_tokens == 10
    with pytest.raises(InvalidRequest) as caught:
        params(min_tokens=11)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_ids_are_in_the_vocabulary(name: str) -> None:
    assert getattr(params(**{name: [0, 99]}), name) == [0, 99]
    with pytest.raises(InvalidRequest, match=r"\[100, 500\]") as caught:
        params(**{name: [100, 5, 500]})
    assert caught.value.param == name


def test_logit_bias_is_clamped_and_names_every_bad_key() -> None:
    assert logit_bias({"1": 250.0, " 2 ": -250.0}, VOCAB_SIZE) == {1: 100.0, 2: -100.0}
    assert logit_bias({}, VOCAB_SIZE) is None
    assert logit_bias(None, VOCAB_SIZE) is None
    bad = ["x", "100", "-1", "1.0", "", "٣", "0x1", "1" * 40]
    with pytest.raises(InvalidRequest) as caught:
        logit_bias({"7": 1.0, **dict.fromkeys(bad, 1.0)}, VOCAB_SIZE)
    assert all(repr(key[:32]) in caught.value.message for key in bad)
    assert "'7'" not in caught.value.message


def test_the_defaults_of_a_model_are_taken_with_care() -> None:
    config = {
        "temperature": 0.6,
        "top_k": 20.0,
        "top_p": "0.9",
        "min_p": True,
        "repetition_penalty": 1,
        "max_new_tokens": 64,
        "eos_token_id": [1, 2],
        "do_sample": True,
        "presence_penalty": None,
    }
    assert SamplingDefaults.from_config(config) == SamplingDefaults(
        temperature=0.6, top_k=20, repetition_penalty=1.0, max_new_tokens=64
    )


def test_choices_have_seeds_of_their_own() -> None:
    seeded = SamplingParams(max_tokens=1, seed=2**63 - 2)
    seeds = [for_choice(seeded, index).seed for index in range(3)]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert for_choice(SamplingParams(max_tokens=1), 3).seed is None


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            StructuredOutput(json_schema=SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput(json_schema=SCHEMA)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput(regex="a+")),
        ({"structured_outputs": {"choice": ["a"]}}, StructuredOutput(choice=["a"])),
        ({"structured_outputs": {"grammar": "g"}}, StructuredOutput(grammar="g")),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput(json_object=True)),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"structured_outputs": {}}, None),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            StructuredOutput(regex="a"),
        ),
    ],
)
def test_constraints(fields: dict[str, Any], expected: StructuredOutput | None) -> None:
    assert structured_output(body(**fields)) == expected


def test_the_empty_schema_is_any_json() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    assert structured_output(body(response_format=form)) == StructuredOutput(json_schema={})


def test_structural_tags_are_handed_on() -> None:
    form = {"type": "structural_tag", "structures": [], "triggers": ["<a>"]}
    found = structured_output(body(response_format=form))
    assert found is not None
    assert found.structural_tag is not None
    assert '"triggers":["<a>"]' in found.structural_tag
