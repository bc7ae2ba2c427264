"""Pydantic's complaints as people read them: one per place, by paths that exist in the document."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

Path = tuple[str | int, ...]

MAX_NAME_CHARS = 64


def shown_path(path: Path) -> str:
    """`nodes.3.params.model`."""
    return ".".join(str(part)[:MAX_NAME_CHARS] or '""' for part in path)


def existing_path(location: Sequence[str | int], document: Any, *, is_missing: bool) -> Path:
    """The part of pydantic's location that exists in the document: without tags of unions.

    is_missing: whether the complaint is that the last part is not there.
    """
    parts: list[str | int] = []
    here = document
    for position, part in enumerate(location):
        is_last = position == len(location) - 1
        is_key = isinstance(here, dict) and isinstance(part, str) and part in here
        if is_key or (isinstance(here, list) and isinstance(part, int) and part < len(here)):
            here = here[part]
        elif not (is_missing and is_last and isinstance(here, dict)):
            continue
        parts.append(part)
    return tuple(parts)


@dataclass(slots=True)
class Complaint:
    """What is wrong at one place. messages: several where a union's members complain alike."""

    path: Path
    code: str
    messages: list[str] = field(default_factory=list)

    @property
    def message(self) -> str:
        return " or ".join(self.messages)


def complaints(
    errors: Iterable[ErrorDetails], document: Any, model: type[BaseModel]
) -> Iterator[Complaint]:
    """The errors of `model` about `document`, one complaint per place."""
    found: dict[Path, Complaint] = {}
    for error in errors:
        path = existing_path(error["loc"], document, is_missing=error["type"] == "missing")
        complaint = found.setdefault(path, Complaint(path, error["type"]))
        message = _message(error, model)
        if message not in complaint.messages:
            complaint.messages.append(message)
    return iter(found.values())


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that is meant, to be put behind a message; empty if none is near."""
    near = difflib.get_close_matches(name[:MAX_NAME_CHARS], list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _message(error: ErrorDetails, model: type[BaseModel]) -> str:
    if error["type"] == "model_type":
        return "must be an object"
    if error["type"] == "extra_forbidden":
        return f"unknown field{nearest(str(error['loc'][-1]), model.model_fields)}"
    return error["msg"].removeprefix("Value error, ")
