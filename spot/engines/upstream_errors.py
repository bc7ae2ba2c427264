"""What an upstream's error means here.

| upstream | here | why |
|---|---|---|
| 400, 413, 422, other 4xx | InvalidRequest | the request is at fault, here as elsewhere |
| 401, 403, 404, 407 | EngineUnavailable | this gateway's key, URL or model name is wrong there |
| 429, 503 | EngineUnavailable | too busy, or not serving now: another engine may take it |
| 408, 5xx, anything else | EngineFailed | the upstream ended while it worked on the generation |

vLLM validates some parameters only after it has begun to answer: an error inside the event stream
carries its status with it and means the same.
"""

from __future__ import annotations

import re

import msgspec

from spot.engines.upstream_via import CODE as CIRCLE
from spot.errors import EngineFailed, EngineUnavailable, InvalidRequest, ShuntyardError

_MAX_MESSAGE_CHARS = 900
_MISCONFIGURED = (401, 403, 404, 407)
_BUSY = (429, 503)
_ABOUT_CONSTRAINT = re.compile(
    r"\b(?:grammar|regex|json schema|structured|choice)\b", re.IGNORECASE
)
_PARAMETER_SUFFIX = re.compile(r" \((?:parameter=\w+(?:, )?)?(?:value=.*)?\)$", re.DOTALL)
_PARAM_PREFIX = re.compile(r"^(?:body\.)?(?:sampling_params\.)?")

# Errors without a number, by their code or the beginning of their type.
_STATUSES = (
    ("engine_unavailable", 503),
    ("shutting_down", 503),
    ("overloaded", 503),
    ("invalid_request", 400),
    ("BadRequest", 400),
    ("ServiceUnavailable", 503),
)


class Malformed(ValueError):
    """An answer is JSON, but not what was asked for."""


class ErrorBody(msgspec.Struct):
    """The `error` of an error envelope. code: a status with vLLM, a word with OpenAI."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: int | str | None = None


class _Envelope(msgspec.Struct):
    error: ErrorBody | None = None
    message: str | None = None
    detail: str | None = None


def error_from_response(status: int, body: bytes, *, is_constrained: bool) -> ShuntyardError:
    """The error of an answer that is not a 200. Any body will do."""
    try:
        envelope = msgspec.json.decode(body, type=_Envelope)
    except msgspec.DecodeError:
        envelope = _Envelope()
    error = envelope.error or ErrorBody(envelope.message or envelope.detail or "")
    return error_for(status, error, is_constrained=is_constrained)


def status_of(error: ErrorBody) -> int:
    """The HTTP status of an error inside a stream; 500 if it does not tell."""
    if isinstance(error.code, int):
        return error.code
    kinds = (error.code or "", error.type or "")
    return next(
        (
            status
            for beginning, status in _STATUSES
            if any(kind.startswith(beginning) for kind in kinds)
        ),
        500,
    )


def error_for(status: int, error: ErrorBody, *, is_constrained: bool) -> ShuntyardError:
    """The error that a caller is told."""
    message = _shortened(error.message)
    if status in _BUSY:
        return EngineUnavailable(f"the upstream takes no work now ({status}): {message}")
    if status in _MISCONFIGURED:
        return EngineUnavailable(f"the upstream does not serve this gateway ({status}): {message}")
    if 400 <= status < 500 and status != 408:
        message = message or f"the upstream refused the request ({status})"
        if error.code == CIRCLE:
            return InvalidRequest(message, code=CIRCLE)
        return InvalidRequest(message, param=_param(error, is_constrained))
    return EngineFailed(f"the upstream failed ({status}): {message}")


def constraint_failed() -> InvalidRequest:
    """An internal error before the first token of constrained output.

    vLLM says no more of a constraint that passed validation but does not compile.
    """
    return InvalidRequest("the output constraint could not be compiled", param="structured")


def _param(error: ErrorBody, is_constrained: bool) -> str | None:
    name = _PARAM_PREFIX.sub("", error.param or "")
    if name.startswith("structured_outputs"):
        return "structured"
    if not name and is_constrained and _ABOUT_CONSTRAINT.search(error.message):
        return "structured"
    return name or None


def _shortened(message: str) -> str:
    text = _PARAMETER_SUFFIX.sub("", message.strip())
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[:_MAX_MESSAGE_CHARS] + " …"
