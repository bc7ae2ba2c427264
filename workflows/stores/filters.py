"""Conditions on metadata, as SQL. Values and field names only ever travel as parameters.

    {"language": "en"}                      equal; null where the field is missing or null
    {"year": {"gte": 1990, "lt": 2000}}     numbers with numbers, strings with strings
    {"source": {"in": ["a", "b"]}}          one of these
    {"draft": {"ne": true}}                 not equal, also where the field is missing
    {"tags": {"contains": "news"}}          a list with this item

All conditions must hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from psycopg.sql import SQL, Composable, Literal
from psycopg.types.json import Jsonb

from workflows.stores.errors import InvalidFilter

MAX_CONDITIONS: Final = 32
MAX_IN: Final = 1000
_SIGNS: Final = {"gt": SQL(">"), "gte": SQL(">="), "lt": SQL("<"), "lte": SQL("<=")}
_OPERATORS: Final = ("eq", "ne", "in", "contains", *_SIGNS)
_TEXT: Final = ("string", SQL('(metadata ->> %s) COLLATE "C"'))
_NUMBER: Final = ("number", SQL("(metadata ->> %s)::numeric"))

Scalar = str | int | float | bool | None


def filter_sql(filters: Mapping[str, Any]) -> tuple[Composable, list[Any]]:
    """An SQL condition on the column `metadata`, and its parameters. Raises InvalidFilter."""
    parts: list[Composable] = []
    parameters: list[Any] = []
    for field, wanted in filters.items():
        if "\0" in field:
            raise InvalidFilter("a filter cannot hold the character NUL")
        conditions = wanted if isinstance(wanted, Mapping) else {"eq": wanted}
        if not conditions:
            raise InvalidFilter(f"filter.{field}: give a value, or one of {', '.join(_OPERATORS)}")
        for operator, value in conditions.items():
            part, values = _condition(field, operator, value)
            parts.append(part)
            parameters += values
    if len(parts) > MAX_CONDITIONS:
        raise InvalidFilter(f"a filter has at most {MAX_CONDITIONS} conditions")
    return (SQL(" AND ").join(parts) if parts else SQL("true")), parameters


def _condition(field: str, operator: str, value: Any) -> tuple[Composable, list[Any]]:
    match operator:
        case "eq":
            return _equal(field, _scalar(field, value))
        case "ne":
            part, values = _equal(field, _scalar(field, value))
            return SQL("NOT ({})").format(part), values
        case "in":
            return _one_of(field, value)
        case "contains":
            return SQL("metadata @> %s"), [Jsonb({field: [_scalar(field, value)]})]
        case "gt" | "gte" | "lt" | "lte":
            return _in_range(field, operator, value)
    raise InvalidFilter(
        f"filter.{field}: there is no {operator!r}; a condition is one of {', '.join(_OPERATORS)}"
    )


def _equal(field: str, value: Scalar) -> tuple[Composable, list[Any]]:
    if value is None:
        return SQL("coalesce(metadata -> %s, 'null'::jsonb) = 'null'::jsonb"), [field]
    return SQL("metadata @> %s"), [Jsonb({field: value})]


def _one_of(field: str, values: Any) -> tuple[Composable, list[Any]]:
    if not isinstance(values, list) or not 1 <= len(values) <= MAX_IN:
        raise InvalidFilter(f"filter.{field}.in: must be a list of 1 to {MAX_IN} values")
    alternatives = [_equal(field, _scalar(field, value)) for value in values]
    part = SQL(" OR ").join([one for one, _ in alternatives])
    return SQL("({})").format(part), [value for _, some in alternatives for value in some]


def _in_range(field: str, sign: str, value: Any) -> tuple[Composable, list[Any]]:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise InvalidFilter(f"filter.{field}: a range needs a number or a string")
    kind, left = _TEXT if isinstance(value, str) else _NUMBER
    # CASE and not AND: the cast must not be tried on what is no number.
    part = SQL("CASE WHEN jsonb_typeof(metadata -> %s) = {} THEN {} {} %s ELSE false END").format(
        Literal(kind), left, _SIGNS[sign]
    )
    return part, [field, field, _scalar(field, value)]


def _scalar(field: str, value: Any) -> Scalar:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidFilter(f"filter.{field}: must be a finite number")
    if isinstance(value, str) and "\0" in value:
        raise InvalidFilter("a filter cannot hold the character NUL")
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise InvalidFilter(f"filter.{field}: must be a string, a number, true, false or null")
