"""Every error of ours has a status, a type and a code, in OpenAI's envelope."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import spot.engines.hosted
import spot.engines.pooling  # noqa: F401 - so that every error class is known
from server import errors as http
from server.errors import ErrorReply, describe, internal_error
from server.protocol.responses import ErrorResponse
from spot import errors as spot_errors
from spot.errors import ShuntyardError

INVALID, SERVER = "invalid_request_error", "server_error"

# Status, type and code. Where a class has fields that decide more, the tests below look at them.
EXPECTED: dict[type[ShuntyardError], tuple[int, str, str]] = {
    http.BadBody: (400, INVALID, "invalid_json"),
    http.BadHttp: (400, INVALID, "invalid_http"),
    http.Unauthorized: (401, "authentication_error", "invalid_api_key"),
    http.Forbidden: (403, "permission_error", "forbidden"),
    http.ModelNotFound: (404, "not_found_error", "model_not_found"),
    http.ResponseNotFound: (404, "not_found_error", "response_not_found"),
    http.RouteNotFound: (404, "not_found_error", "route_not_found"),
    http.MethodNotAllowed: (405, INVALID, "method_not_allowed"),
    http.Conflict: (409, INVALID, "cannot_continue"),
    http.BadWorkflow: (400, INVALID, "invalid_workflow"),
    http.WorkflowFailed: (503, SERVER, "engine_unavailable"),
    http.TemplateMissing: (404, "not_found_error", "template_not_found"),
    http.StoreLimit: (400, INVALID, "limit_reached"),
    http.RunMissing: (404, "not_found_error", "run_not_found"),
    http.RunKeyReused: (409, "invalid_request_error", "idempotency_key_reused"),
    http.RunNotHere: (409, "invalid_request_error", "run_elsewhere"),
    http.CollectionMissing: (404, "not_found_error", "collection_not_found"),
    http.StoreDown: (503, SERVER, "store_unavailable"),
    http.RequestTimeout: (408, INVALID, "request_timeout"),
    http.BodyTooLarge: (413, INVALID, "body_too_large"),
    http.WrongContentType: (415, INVALID, "unsupported_media_type"),
    http.ShuttingDown: (503, SERVER, "shutting_down"),
    spot_errors.InvalidRequest: (400, INVALID, "invalid_value"),
    spot_errors.ContextLengthExceeded: (400, INVALID, "context_length_exceeded"),
    spot_errors.NotSupported: (400, INVALID, "not_supported"),
    spot_errors.Overloaded: (429, "rate_limit_error", "overloaded"),
    spot_errors.EngineUnavailable: (503, SERVER, "engine_unavailable"),
    spot_errors.EngineFailed: (500, SERVER, "engine_failed"),
    spot_errors.EngineMisconfigured: (500, SERVER, "engine_failed"),
    spot_errors.GenerationFailed: (500, SERVER, "internal_error"),
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "MethodNotAllowed": {"allow": "GET, HEAD"},
    "BadWorkflow": {"details": [{"path": "nodes.0.op", "code": "missing", "message": "needed"}]},
    "WorkflowFailed": {"code": "engine_unavailable"},
    "ContextLengthExceeded": {"param": "messages"},
    "InputTooLong": {"index": 3, "num_tokens": 9, "max_model_len": 4},
}
WITHOUT_MESSAGE = {"InputTooLong"}


def subclasses(cls: type[ShuntyardError]) -> Iterator[type[ShuntyardError]]:
    yield cls
    for child in cls.__subclasses__():
        if not child.__module__.startswith("tests."):
            yield from subclasses(child)


def made(cls: type[ShuntyardError]) -> ShuntyardError:
    message = () if cls.__name__ in WITHOUT_MESSAGE else ("Some words.",)
    return cls(*message, **ARGUMENTS.get(cls.__name__, {}))


def envelope(reply: ErrorReply) -> dict[str, Any]:
    body = json.loads(reply.body())
    ErrorResponse.model_validate(body)
    assert set(body) == {"error"}
    assert set(body["error"]) - {"details"} == {"message", "type", "param", "code"}
    return dict(body["error"])


@pytest.mark.parametrize("cls", sorted(set(subclasses(ShuntyardError)), key=lambda c: c.__name__))
def test_every_error_is_mapped(cls: type[ShuntyardError]) -> None:
    reply = describe(made(cls))
    assert 400 <= reply.status < 600
    error = envelope(reply)
    assert error["message"] == made(cls).message
    assert error["code"], "a code for programs"
    expected = next((EXPECTED[base] for base in cls.__mro__ if base in EXPECTED), None)
    if expected is None:
        assert (reply.status, error["type"]) == (500, SERVER), "an error without a rule is ours"
    else:
        assert (reply.status, error["type"], error["code"]) == expected


def test_no_rule_is_left_over() -> None:
    assert set(EXPECTED) <= set(subclasses(ShuntyardError))


def test_param_and_code_of_an_invalid_request_are_passed_on() -> None:
    error = spot_errors.InvalidRequest("No.", param="messages.0.role", code="because")
    assert envelope(describe(error)) == {
        "message": "No.",
        "type": INVALID,
        "param": "messages.0.role",
        "code": "because",
    }


def test_an_unknown_model_is_a_matter_of_the_model_field() -> None:
    assert describe(http.ModelNotFound("no such model")).param == "model"


@pytest.mark.parametrize(
    ("error", "header"),
    [
        (spot_errors.Overloaded("full", retry_after_s=2.2), (b"retry-after", b"3")),
        (spot_errors.Overloaded("full", retry_after_s=0), (b"retry-after", b"1")),
        (spot_errors.EngineUnavailable("starting"), (b"retry-after", b"5")),
        (http.ShuttingDown("bye"), (b"retry-after", b"5")),
        (http.Unauthorized("who?"), (b"www-authenticate", b"Bearer")),
        (http.MethodNotAllowed("no", allow="GET, HEAD"), (b"allow", b"GET, HEAD")),
        (http.BodyTooLarge("big"), (b"connection", b"close")),
        (http.BadHttp("odd"), (b"connection", b"close")),
        (http.RequestTimeout("late"), (b"connection", b"close")),
    ],
)
def test_errors_that_need_a_header_have_it(
    error: ShuntyardError, header: tuple[bytes, bytes]
) -> None:
    assert header in describe(error).headers


def test_any_words_can_be_encoded_and_are_bounded() -> None:
    message = "lone \ud800 surrogate " + "x" * 50_000
    reply = describe(spot_errors.InvalidRequest(message, param="\udfff" * 1000))
    assert len(reply.body()) < 10_000
    assert envelope(reply)["message"].startswith("lone ? surrogate")


def test_a_bug_of_ours_says_nothing_of_the_inside() -> None:
    reply = internal_error()
    assert reply.status == 500
    assert envelope(reply)["message"] == http.INTERNAL_MESSAGE
