"""A run's inputs, and the JSON Schema that they are held to.

Schemas come from outside. Following references can make a small one exponentially large, and a
recursive one endless, so what it says with all references followed is bounded, and what holding
inputs to it costs is too.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import jsonschema_rs
import orjson

from workflows.complaints import Path, shown_path
from workflows.errors import InvalidWorkflow, Problem
from workflows.spec import Workflow

MAX_PROBLEMS = 100
MAX_MESSAGE_CHARS = 300
# Values in a schema, those that it refers to counted wherever it does.
MAX_SCHEMA_SIZE = 5_000
# Of the schema's size and the number of values: at most about a second.
_MAX_CHECKS = 20_000_000
# All complaints of more would take long to make: each has a copy of what it is about.
_MAX_CHECKS_WITH_ALL_PROBLEMS = 100_000
_CHARS_PER_VALUE = 100


def schema_problem(schema: dict[str, Any]) -> tuple[Path, str] | None:
    """What is wrong with a schema, and where; None if it can be used."""
    try:
        schema_size(schema)
        _validator(schema)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        return tuple(getattr(error, "instance_path", ())), getattr(error, "message", str(error))
    return None


def complete_inputs(workflow: Workflow, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a run, with the `default`s of `input_schema`'s properties where one is missing.

    Raises InvalidWorkflow for inputs that are not what `input_schema` says.
    """
    schema = workflow.input_schema
    if schema is None:
        return dict(inputs)
    properties = schema.get("properties", {})
    defaults = {
        name: one["default"]
        for name, one in properties.items()
        if isinstance(one, dict) and "default" in one
    }
    completed = {**defaults, **inputs}
    problems = _problems(schema, completed)
    if problems:
        raise InvalidWorkflow(problems)
    return completed


def known_inputs(workflow: Workflow, added: Mapping[str, Any]) -> dict[str, Any]:
    """Of inputs that an operator adds to those of its node, those that the workflow inside may
    have: where its `input_schema` says which there are, the others are left out."""
    schema = workflow.input_schema or {}
    if schema.get("additionalProperties") is not False:
        return dict(added)
    return {name: value for name, value in added.items() if name in schema.get("properties", {})}


def schema_size(schema: Any) -> int:
    """The number of values in a schema, with references followed. Raises ValueError for one that is
    too large, that refers to itself, or whose references lead elsewhere."""
    return _Sizes(schema).of(schema)


class _Sizes:
    """Sizes of the parts of one schema. Those that are referred to are known by their reference."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._by_reference: dict[str, int | None] = {}

    def of(self, value: Any) -> int:
        size = 1
        if isinstance(value, dict):
            if isinstance(value.get("$id"), str) and value is not self._schema:
                raise ValueError("$id inside it is not followed; write the schema as one")
            for name in ("$ref", "$dynamicRef", "$recursiveRef"):
                if isinstance(value.get(name), str):
                    size += self._referred(value[name])
        parts = value.values() if isinstance(value, dict) else value
        if isinstance(value, (dict, list)):
            for part in parts:
                size += self.of(part)
                if size > MAX_SCHEMA_SIZE:
                    raise ValueError(
                        f"with its references followed it has more than {MAX_SCHEMA_SIZE:,} values"
                    )
        return size

    def _referred(self, reference: str) -> int:
        if reference not in self._by_reference:
            self._by_reference[reference] = None
            self._by_reference[reference] = self.of(self._target(reference))
        size = self._by_reference[reference]
        if size is None:
            raise ValueError(f"$ref to {reference[:200]} leads back to itself")
        return size

    def _target(self, reference: str) -> Any:
        if (reference != "#" and not reference.startswith("#/")) or "%" in reference:
            raise ValueError(
                f"$ref to {reference[:200]} is not followed; write the schema in place, or under "
                "$defs and refer to it by #/$defs/NAME"
            )
        found = self._schema
        for part in reference[2:].split("/") if len(reference) > 1 else ():
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key in map(str, range(len(found))):
                found = found[int(key)]
            else:
                raise ValueError(f"$ref to {reference[:200]}: there is nothing")
        return found


def _problems(schema: dict[str, Any], inputs: dict[str, Any]) -> list[Problem]:
    num_checks = schema_size(schema) * _num_values(inputs)
    if num_checks > _MAX_CHECKS:
        message = "the inputs are too large to be held to so large an input_schema"
        return [Problem(path="inputs", code="invalid_input", message=message)]
    validator = _validator(schema)
    if validator.is_valid(inputs):
        return []
    if num_checks > _MAX_CHECKS_WITH_ALL_PROBLEMS:
        try:
            validator.validate(inputs)
        except jsonschema_rs.ValidationError as error:
            return [_problem(error)]
    return [_problem(error) for error in islice(validator.iter_errors(inputs), MAX_PROBLEMS)]


def _num_values(inputs: Any) -> int:
    """Of values in JSON, long texts counted by their length."""
    written = orjson.dumps(inputs)
    return 1 + written.count(b",") + written.count(b"[") + len(written) // _CHARS_PER_VALUE


def _problem(error: jsonschema_rs.ValidationError) -> Problem:
    return Problem(
        path=shown_path(("inputs", *error.instance_path)),
        code="invalid_input",
        message=error.message[:MAX_MESSAGE_CHARS],
    )


def _validator(schema: dict[str, Any]) -> jsonschema_rs.Draft202012Validator:
    """Of a schema from outside: it fetches nothing, and its patterns take linear time."""
    return jsonschema_rs.Draft202012Validator(
        schema, pattern_options=jsonschema_rs.RegexOptions(), retriever=_no_retrieval
    )


def _no_retrieval(uri: str) -> Any:
    raise ValueError(f"$ref to {uri[:200]} is not followed; write the schema in place")
