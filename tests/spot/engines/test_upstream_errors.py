"""An upstream's status and words become the error that a caller is told."""

from __future__ import annotations

import json

import pytest

from spot.engines.upstream_errors import error_from_response
from spot.errors import EngineFailed, EngineUnavailable, InvalidRequest, ShuntyardError


def envelope(message: str, param: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "param": param, "code": 400}}).encode()


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, InvalidRequest),
        (413, InvalidRequest),
        (422, InvalidRequest),
        (418, InvalidRequest),
        (401, EngineUnavailable),
        (403, EngineUnavailable),
        (404, EngineUnavailable),
        (429, EngineUnavailable),
        (503, EngineUnavailable),
        (408, EngineFailed),
        (500, EngineFailed),
        (502, EngineFailed),
        (302, EngineFailed),
        (204, EngineFailed),
    ],
)
def test_each_status(status: int, expected: type[ShuntyardError]) -> None:
    error = error_from_response(status, envelope("why"), is_constrained=False)
    assert type(error) is expected
    assert "why" in error.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "m"}}', "m"),
        (b'{"object": "error", "message": "m", "code": 400}', "m"),
        (b'{"detail": "m"}', "m"),
        (b"<html>", "the upstream refused the request (400)"),
        (b"", "the upstream refused the request (400)"),
        (b'{"error": "m"}', "the upstream refused the request (400)"),
    ],
)
def test_any_body_will_do(body: bytes, message: str) -> None:
    assert error_from_response(400, body, is_constrained=False).message == message


def test_messages_are_short_and_without_vllms_appendix() -> None:
    long = error_from_response(400, envelope("x" * 5000), is_constrained=False)
    assert len(long.message) < 1000
    told = envelope("top_p must be in (0, 1], got 7. (parameter=top_p, value=7)")
    error = error_from_response(400, told, is_constrained=False)
    assert error.message == "top_p must be in (0, 1], got 7."


@pytest.mark.parametrize(
    ("told", "param"),
    [
        ("top_p", "top_p"),
        ("sampling_params.top_p", "top_p"),
        ("body.sampling_params.top_p", "top_p"),
        ("structured_outputs.regex", "structured"),
        (None, None),
    ],
)
def test_fields_have_our_names(told: str | None, param: str | None) -> None:
    error = error_from_response(400, envelope("m", told), is_constrained=True)
    assert isinstance(error, InvalidRequest)
    assert error.param == param


def test_words_about_a_constraint_name_it_if_there_is_one() -> None:
    told = envelope("Failed to convert the grammar")
    with_one = error_from_response(400, told, is_constrained=True)
    without = error_from_response(400, told, is_constrained=False)
    assert isinstance(with_one, InvalidRequest)
    assert isinstance(without, InvalidRequest)
    assert (with_one.param, without.param) == ("structured", None)
