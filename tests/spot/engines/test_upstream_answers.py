"""An upstream's answer becomes deltas, and everything odd in it an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spot.engines.upstream_answers import AnswerReader
from spot.engines.upstream_protocol import Endpoint
from spot.errors import EngineFailed, EngineUnavailable, InvalidRequest, ShuntyardError
from spot.generation import Generation, SamplingParams, StructuredOutput, TokenDelta, TokenLogprobs

BOTH: tuple[Endpoint, ...] = ("generate", "completions")


def reader(endpoint: Endpoint = "completions", **sampling: Any) -> AnswerReader:
    params = SamplingParams(max_tokens=8, **sampling)
    return AnswerReader(Generation("g", [1, 2, 3], params), endpoint)


def chunk(token_ids: list[int] | None, finish: str | None = None, **choice: Any) -> bytes:
    fields = {"index": 0, "text": "x", "token_ids": token_ids, "finish_reason": finish, **choice}
    return json.dumps({"id": "x", "choices": [fields]}).encode()


def usage(cached: int | None = None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    told = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": details}
    return json.dumps({"choices": [], "usage": told}).encode()


def read_all(under_test: AnswerReader, *events: bytes) -> list[TokenDelta]:
    found = (under_test.read(event) for event in events)
    return [delta for delta in found if delta is not None]


# Tokens and ends


@pytest.mark.parametrize("endpoint", BOTH)
def test_tokens_then_the_end_then_the_usage(endpoint: Endpoint) -> None:
    under_test = reader(endpoint)
    first, last = read_all(
        under_test, chunk([5, 6]), chunk([7], "stop", stop_reason=7), usage(cached=2)
    )
    assert first == TokenDelta([5, 6])
    assert last == TokenDelta([7], "stop", 7, num_cached_tokens=2)
    assert under_test.is_complete


def test_the_models_own_end_of_sequence_is_no_stop_token() -> None:
    (delta,) = read_all(reader(), chunk([2], "stop", stop_reason=None), usage())
    assert delta == TokenDelta([2], "stop", None)


def test_empty_chunks_bring_nothing() -> None:
    assert read_all(reader(), chunk([]), chunk([5])) == [TokenDelta([5])]


def test_an_end_without_tokens_is_an_end() -> None:
    assert read_all(reader(), chunk([], "length"), usage()) == [TokenDelta([], "length")]


def test_a_stream_may_end_without_usage() -> None:
    under_test = reader()
    assert read_all(under_test, chunk([5], "length")) == []
    assert under_test.read(b"[DONE]") == TokenDelta([5], "length")
    under_test = reader()
    assert read_all(under_test, chunk([5], "length")) == []
    assert under_test.end() == TokenDelta([5], "length")


def test_cached_tokens_never_outnumber_the_prompt() -> None:
    (delta,) = read_all(reader(), chunk([5], "length"), usage(cached=99))
    assert delta.num_cached_tokens == 3


def test_an_answer_in_one_piece() -> None:
    whole = {
        "choices": [{"token_ids": [5, 6], "finish_reason": "length", "stop_reason": None}],
        "usage": {"prompt_tokens": 3},
    }
    assert reader().read(json.dumps(whole).encode()) == TokenDelta([5, 6], "length")


@pytest.mark.parametrize("finish", ["abort", "error", "tool_calls", "x" * 500])
def test_any_other_finish_is_a_failure(finish: str) -> None:
    with pytest.raises(EngineFailed, match="ended this generation"):
        reader().read(chunk([5], finish))


@pytest.mark.parametrize("event", [b"[DONE]", None])
def test_an_end_without_a_finish_is_a_failure(event: bytes | None) -> None:
    under_test = reader()
    under_test.read(chunk([5]))
    with pytest.raises(EngineFailed, match="without a finish reason"):
        under_test.end() if event is None else under_test.read(event)


@pytest.mark.parametrize(
    "event",
    [b"", b"{", b"[]", b"null", b'{"choices": [{"token_ids": ["a"]}]}', chunk(None), b"\xff\xfe"],
)
def test_malformed_events_are_failures(event: bytes) -> None:
    with pytest.raises(EngineFailed, match="something else than tokens"):
        reader().read(event)


# Errors inside the stream


def error_event(**fields: Any) -> bytes:
    return json.dumps({"error": {"message": "bad", "type": "T", **fields}}).encode()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"code": 400, "param": "logprobs"}, InvalidRequest),
        ({"code": 503}, EngineUnavailable),
        ({"code": 500}, EngineFailed),
        ({}, EngineFailed),
        ({"code": "invalid_value", "type": "invalid_request_error"}, InvalidRequest),
        ({"code": "engine_unavailable", "type": "server_error"}, EngineUnavailable),
        ({"code": "engine_failed", "type": "server_error"}, EngineFailed),
    ],
)
def test_an_error_event_means_what_its_status_says(
    fields: dict[str, Any], expected: type[ShuntyardError]
) -> None:
    with pytest.raises(expected, match="bad") as caught:
        reader().read(error_event(**fields))
    assert type(caught.value) is expected
    if isinstance(caught.value, InvalidRequest):
        assert caught.value.param == fields.get("param")


def test_a_constraint_that_does_not_compile_is_the_requests_fault() -> None:
    constrained = {"structured": StructuredOutput(regex="a")}
    event = error_event(code=500, message="Internal server error")
    with pytest.raises(InvalidRequest, match="compiled") as caught:
        reader(**constrained).read(event)
    assert caught.value.param == "structured"
    begun = reader(**constrained)
    begun.read(chunk([5]))
    with pytest.raises(EngineFailed):
        begun.read(event)


# Log probabilities


def completion_logprobs(own: float | None, top: dict[str, float]) -> dict[str, Any]:
    return {"tokens": ["x"], "token_logprobs": [own], "top_logprobs": [top], "text_offset": [0]}


def logprobs_of(endpoint: Endpoint, num: int, token_id: int, told: dict[str, Any]) -> TokenLogprobs:
    delta = reader(endpoint, logprobs=num).read(chunk([token_id], logprobs=told))
    assert delta is not None
    assert delta.logprobs is not None
    (entry,) = delta.logprobs
    return entry


def test_completions_names_alternatives_by_id_and_the_actual_token_first() -> None:
    told = completion_logprobs(-2.0, {"token_id:9": -2.0, "token_id:4": -0.5, "token_id:3": -1.0})
    entry = logprobs_of("completions", 2, 9, told)
    assert entry == TokenLogprobs([9, 4, 3], [-2.0, -0.5, -1.0], 3)


def test_completions_with_the_actual_token_among_the_alternatives() -> None:
    told = completion_logprobs(-1.0, {"token_id:9": -1.0, "token_id:4": -0.5, "token_id:3": -3.0})
    entry = logprobs_of("completions", 3, 9, told)
    assert entry == TokenLogprobs([9, 4, 9, 3], [-1.0, -0.5, -1.0, -3.0], 2)


def test_completions_without_alternatives() -> None:
    told = completion_logprobs(-1.0, {"token_id:9": -1.0})
    assert logprobs_of("completions", 0, 9, told) == TokenLogprobs([9], [-1.0], 1)


def test_a_missing_figure_is_a_very_low_one() -> None:
    told = completion_logprobs(None, {})
    assert logprobs_of("completions", 0, 9, told).logprobs == [-9999.0]


def position(token_id: int, logprob: float, rank: int, *top: tuple[int, float]) -> dict[str, Any]:
    figures = [{"token_id": t, "logprob": value, "rank": None} for t, value in top]
    return {
        "content": [
            {"token_id": token_id, "logprob": logprob, "rank": rank, "top_logprobs": figures}
        ]
    }


def test_generate_tells_the_rank() -> None:
    # Asked for 3, since 2 were wanted: the actual token and the two most likely ones.
    told = position(9, -5.0, 17, (9, -5.0), (4, -0.5), (3, -1.0))
    assert logprobs_of("generate", 2, 9, told) == TokenLogprobs([9, 4, 3], [-5.0, -0.5, -1.0], 17)


def test_generate_with_the_actual_token_among_the_alternatives() -> None:
    told = position(9, -1.0, 2, (9, -1.0), (4, -0.5), (3, -2.0))
    assert logprobs_of("generate", 2, 9, told) == TokenLogprobs([9, 4, 9], [-1.0, -0.5, -1.0], 2)


def test_the_whole_vocabulary() -> None:
    told = position(9, -1.0, 2, (9, -1.0), (4, -0.5), (3, -2.0))
    entry = logprobs_of("generate", -1, 9, told)
    assert entry == TokenLogprobs([9, 4, 9, 3], [-1.0, -0.5, -1.0, -2.0], 2)


@pytest.mark.parametrize(
    "told",
    [
        None,
        {"tokens": [], "token_logprobs": [], "top_logprobs": []},
        completion_logprobs(-1.0, {"the": -1.0}),
    ],
)
def test_log_probabilities_that_do_not_fit_are_malformed(told: dict[str, Any] | None) -> None:
    with pytest.raises(EngineFailed, match="something else than tokens"):
        reader(logprobs=0).read(chunk([9], logprobs=told))


def test_generate_must_tell_of_the_same_tokens() -> None:
    with pytest.raises(EngineFailed, match="other tokens"):
        reader("generate", logprobs=0).read(chunk([8], logprobs=position(9, -1.0, 1)))


@pytest.mark.parametrize("endpoint", BOTH)
def test_prompt_logprobs(endpoint: Endpoint) -> None:
    told = [
        None,
        {"7": {"logprob": -3.0, "rank": 8}, "4": {"logprob": -0.5, "rank": 1}},
        {"4": {"logprob": -0.5, "rank": 1}},
    ]
    choice: dict[str, Any] = {"token_ids": [5], "finish_reason": "length"}
    whole: dict[str, Any] = {"choices": [choice], "usage": {}}
    (choice if endpoint == "completions" else whole)["prompt_logprobs"] = told
    delta = reader(endpoint, prompt_logprobs=1).read(json.dumps(whole).encode())
    assert delta is not None
    assert delta.prompt_logprobs == [
        None,
        TokenLogprobs([7, 4], [-3.0, -0.5], 8),
        TokenLogprobs([4, 4], [-0.5, -0.5], 1),
    ]


def test_missing_prompt_logprobs_are_malformed() -> None:
    with pytest.raises(EngineFailed, match="no prompt log probabilities"):
        reader(prompt_logprobs=1).read(chunk([5], "length"))
