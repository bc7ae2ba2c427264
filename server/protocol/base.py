"""What all request bodies share: strictness, unknown fields, and errors that name the field."""

from __future__ import annotations

from typing import Any, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict

from spot.errors import InvalidRequest
from workflows.complaints import existing_path, shown_path

MAX_ERRORS_SHOWN = 5
MAX_MESSAGE_CHARS = 400

Body = TypeVar("Body", bound="RequestBody")


class RequestBody(BaseModel):
    """A body whose numbers are not coerced from strings or booleans; unknown fields are ignored."""

    model_config = ConfigDict(
        strict=True, extra="ignore", protected_namespaces=(), use_attribute_docstrings=True
    )


# Fields of the past that changed the meaning of an answer: ignoring them would answer another
# question than the one asked (vLLM removed them in favour of `structured_outputs`).
REMOVED_FIELDS = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json_object": "structured_outputs.json_object",
    "guided_decoding_backend": "structured_outputs",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
    "best_of": "n",
    "use_beam_search": "n",
    "functions": "tools",
    "function_call": "tool_choice",
}

# Fields of vLLM's that change an answer and are not served, with the values that change nothing.
UNSUPPORTED_FIELDS: dict[str, tuple[object, ...]] = {
    "logprob_token_ids": ([],),
    "prompt_embeds": ([],),
    "watermarking": (False,),
    "repetition_detection": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "use_activation": (True,),
    "padding": ("do_not_pad",),
}

# An empty schema is missing here: `{}` means any JSON.
_SAYS_NOTHING: tuple[object, ...] = (None, False, "", [])


def parse_body(model: type[Body], body: object) -> Body:
    """Validate a decoded JSON value. Raises InvalidRequest that names the field."""
    if not isinstance(body, dict):
        raise InvalidRequest(
            f"The request body must be a JSON object, not {_json_type(body)}.", code="invalid_type"
        )
    for name, replacement in REMOVED_FIELDS.items():
        if body.get(name) not in _SAYS_NOTHING and not _is_plain_best_of(name, body):
            raise InvalidRequest(
                f"'{name}' is not supported; use '{replacement}' instead.",
                param=name,
                code="unsupported_parameter",
            )
    for name, harmless in UNSUPPORTED_FIELDS.items():
        value = body.get(name)
        if value is not None and not any(value is v or value == v for v in harmless):
            raise InvalidRequest(
                f"'{name}' is not supported by this server.",
                param=name,
                code="unsupported_parameter",
            )
    try:
        return model.model_validate(body)
    except pydantic.ValidationError as error:
        raise _invalid_request(error, body) from None


def _is_plain_best_of(name: str, body: dict[str, Any]) -> bool:
    """Whether this asks for the best `n` of `n`, which is what everybody gets."""
    return name == "best_of" and body["best_of"] == (body.get("n") or 1)


def _invalid_request(error: pydantic.ValidationError, body: object) -> InvalidRequest:
    """The deepest complaint, since the members of a union complain at several depths."""
    by_path: dict[str, list[str]] = {}
    missing: set[str] = set()
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        path = shown_path(existing_path(item["loc"], body, is_missing=item["type"] == "missing"))
        messages = by_path.setdefault(path, [])
        message = item["msg"].removeprefix("Value error, ")
        if message not in messages:
            messages.append(message)
        if item["type"] == "missing":
            missing.add(path)
        elif path in missing and len(messages) > 1:
            missing.discard(path)
    paths = sorted(by_path, key=lambda path: -path.count("."))
    param = paths[0]
    shown = [f"{_subject(path)}: {' or '.join(by_path[path])}" for path in paths[:MAX_ERRORS_SHOWN]]
    code = "missing_required_parameter" if param in missing else "invalid_value"
    message = "; ".join(shown)
    if len(message) > MAX_MESSAGE_CHARS * MAX_ERRORS_SHOWN:
        message = message[: MAX_MESSAGE_CHARS * MAX_ERRORS_SHOWN] + "…"
    return InvalidRequest(f"Invalid request: {message}.", param=param or None, code=code)


def _subject(path: str) -> str:
    return f"'{path}'" if path else "body"


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
