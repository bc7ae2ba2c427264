"""Sampling parameters and messages between Shuntyard and vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind

from spot.engines.vllm_compat.refusal import Unservable
from spot.engines.vllm_compat.sampling import explain, to_vllm
from spot.generation import SamplingParams, StructuredOutput


def test_every_parameter_arrives() -> None:
    ours = SamplingParams(
        max_tokens=11,
        min_tokens=2,
        temperature=0.7,
        top_p=0.8,
        top_k=5,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        seed=3,
        ignore_eos=True,
        stop_token_ids=[4, 5],
        bad_words=["no"],
        allowed_token_ids=[1, 2],
        logprobs=-1,
        prompt_logprobs=2,
        thinking_token_budget=9,
        extra_args={"a": 1},
    )
    theirs = to_vllm(ours)
    same = set(SamplingParams.__struct_fields__) - {"structured", "logit_bias"}
    assert {name: getattr(theirs, name) for name in same} == {
        name: getattr(ours, name) for name in same
    }


def test_the_engine_is_asked_for_token_deltas_only() -> None:
    theirs = to_vllm(SamplingParams(max_tokens=1))
    assert theirs.output_kind is RequestOutputKind.DELTA
    assert theirs.detokenize is False
    assert theirs.stop == []


def test_logit_biases_are_cut_to_what_the_engine_takes() -> None:
    theirs = to_vllm(SamplingParams(max_tokens=1, logit_bias={1: 500.0, 2: -500.0, 3: 1.5}))
    assert theirs.logit_bias == {1: 100.0, 2: -100.0, 3: 1.5}


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (StructuredOutput(json_schema={"type": "object"}), {"json": {"type": "object"}}),
        (StructuredOutput(json_schema='{"type": "object"}'), {"json": '{"type": "object"}'}),
        (StructuredOutput(json_schema=True), {"json": {}}),
        (StructuredOutput(json_object=True), {"json_object": True}),
        (StructuredOutput(regex="a+"), {"regex": "a+"}),
        (StructuredOutput(choice=["a", "b"]), {"choice": ["a", "b"]}),
        (StructuredOutput(grammar='root ::= "a"'), {"grammar": 'root ::= "a"'}),
        (StructuredOutput(structural_tag="{}"), {"structural_tag": "{}"}),
    ],
)
def test_constraints_arrive(constraint: StructuredOutput, expected: dict[str, Any]) -> None:
    theirs = to_vllm(SamplingParams(max_tokens=1, structured=constraint)).structured_outputs
    kinds = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
    assert {
        kind: getattr(theirs, kind) for kind in kinds if getattr(theirs, kind) is not None
    } == expected


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"seed": 2**63}, "seed"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"structured": StructuredOutput(json_schema=False)}, "structured"),
        ({"structured": StructuredOutput(regex="(" * 201)}, "structured"),
        ({"structured": StructuredOutput(regex="a" * 40_000)}, "structured"),
        ({"structured": StructuredOutput(json_schema="[" * 201)}, "structured"),
    ],
)
def test_what_would_harm_the_engine_is_unservable(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(Unservable) as caught:
        to_vllm(SamplingParams(max_tokens=1, **changes))
    assert caught.value.param == param


def test_deep_but_balanced_constraints_are_let_through() -> None:
    to_vllm(SamplingParams(max_tokens=1, structured=StructuredOutput(regex="(a)" * 500)))


@pytest.mark.parametrize(
    ("error", "message", "param"),
    [
        (
            VLLMValidationError("too hot", parameter="temperature", value=3),
            "too hot",
            "temperature",
        ),
        (ValueError("bad regex: [12:00:01] /opt/x/y.cc:83: no"), "bad regex: no", "structured"),
        (ValueError("read /usr/lib/a.py twice"), "read <path> twice", None),
        (ValueError("schema has no /properties"), "schema has no /properties", None),
        (Unservable("odd", "seed"), "odd", "seed"),
        (ValueError(""), "ValueError", None),
    ],
)
def test_messages_are_for_the_sender(error: Exception, message: str, param: str | None) -> None:
    assert explain(error) == (message, param)


def test_long_messages_are_cut() -> None:
    message, _ = explain(ValueError("x" * 5000))
    assert len(message) < 1000


@pytest.mark.parametrize(
    "pattern",
    ["(.{1,1000}){1,1000}", "((a{0,200}b?){0,200})", "(x|([^y]{1,300}z?){1,100})"],
)
def test_repetition_that_unrolls_without_measure_is_unservable(pattern: str) -> None:
    with pytest.raises(Unservable):
        to_vllm(SamplingParams(max_tokens=4, structured=StructuredOutput(regex=pattern)))


@pytest.mark.parametrize(
    "pattern", [r"\d{3}-\d{4}", "(a+)+$", r"[A-Z]{1,2000}", r"(\w{1,30} ){1,100}", "(", "foo**"]
)
def test_ordinary_patterns_and_those_that_python_cannot_read_are_passed_on(pattern: str) -> None:
    params = to_vllm(SamplingParams(max_tokens=4, structured=StructuredOutput(regex=pattern)))
    assert params.structured_outputs.regex == pattern


def test_a_schema_that_is_too_long_is_unservable() -> None:
    schema = {"enum": ["x" * 30 + str(i) for i in range(20_000)]}
    with pytest.raises(Unservable):
        to_vllm(SamplingParams(max_tokens=4, structured=StructuredOutput(json_schema=schema)))
