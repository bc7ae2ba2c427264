"""Whether a constraint on the output is cheap enough to be given to the engine.

vLLM compiles constraints in a few threads that all requests share, and cannot stop a compilation
that has begun; while it generates, it follows the grammar in the loop that serves everybody. So
nothing may get there whose cost is not known to be small.

The cost is bounded from the text alone. Compiling first in a process that can be killed would
bound the one cost and not the other (`(.{1,30}){1,30}` compiles in a moment and then takes over a
second for a token), and it would compile everything twice. The price is that the bounds are
cautious.

- Regular expressions, wherever they stand: see `pattern_cost`.
- JSON documents (schemas, structural tags): a sum over all nodes. References are compiled once,
  so nothing is multiplied by them; equal patterns and equal string lengths count once, as they
  share their masks. A keyword counts wherever its name stands.
- Choices and enums: by their number and characters.
- EBNF and Lark grammars: short ones only, of a shape that is not ambiguous: see `grammar_shape`.

All numbers are units of about a millisecond of one core, with a vocabulary of 49,152 tokens and
xgrammar 0.2.8. They weigh constraints against each other and are no forecast of one:
`benchmarks/constraint_cost.py` puts what is reckoned beside what is measured, at and near the
bounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from spot.engines.vllm_compat.grammar_shape import TooCostly, check_grammar
from spot.engines.vllm_compat.pattern_cost import (
    MAX_UNROLLED_MASKS,
    PatternCost,
    Unreadable,
    check_depth,
    pattern_cost,
    unread_pattern_cost,
)
from spot.engines.vllm_compat.refusal import Unservable
from spot.generation import StructuredOutput

MAX_COMPILE_MS = 4500.0
MAX_STEP_MS = 120.0
MAX_DEPTH = 200
MAX_DOCUMENT_CHARS = 256 * 1024
MAX_PATTERN_CHARS = 32 * 1024
MAX_GRAMMAR_CHARS = 8 * 1024
MAX_CHOICES = 5_000
MAX_CHOICE_CHARS = 64 * 1024

_NODE_MS = 0.3
_VALUE_MS = 0.05
_CHARACTER_MS = 0.01
_OPTIONAL_PAIR_MS = 0.0045
_COUNTED_PROPERTY_MS = 0.003
_SET_CHARACTER_PAIR_MS = 2.5e-7
_RANGE_MS = 1.0
_FORMAT_MS = {"uri-template": 70.0, "email": 25.0, "uri": 20.0, "uri-reference": 20.0}
_OTHER_FORMAT_MS = 10.0
_FIXED_STRING_MS, _VARIABLE_STRING_MS = 6.0, 17.0
_STRING_STEP_MS = 3.5

_PARAM = "structured"
_TOO_SLOW = "Equal patterns and equal minLength and maxLength count once."


def check_cost(constraint: StructuredOutput) -> None:
    """Raises Unservable, and nothing else, for a constraint that may keep the engine busy."""
    try:
        _check(constraint)
    except (RecursionError, UnicodeError, MemoryError):
        raise Unservable("the output constraint is too complex", _PARAM) from None


def _check(constraint: StructuredOutput) -> None:
    for pattern in (constraint.regex, constraint.whitespace_pattern):
        if pattern is not None:
            _judge(_pattern_cost(pattern), "the regular expression")
    if constraint.choice is not None:
        _check_choices(constraint.choice)
    if constraint.grammar is not None:
        _check_grammar(constraint.grammar)
    for document, name in (
        (constraint.json_schema, "the JSON schema"),
        (constraint.structural_tag, "the structural tag"),
    ):
        if document is not None:
            _check_document(document, name)


def _judge(cost: PatternCost, name: str) -> None:
    if cost.compile_ms > MAX_COMPILE_MS:
        raise Unservable(
            f"{name} is too costly to compile: {_shown(cost.compile_ms)} units, at most "
            f"{MAX_COMPILE_MS:.0f} are allowed; long counted repetitions of classes with many "
            f"characters cost most. {_TOO_SLOW}",
            _PARAM,
        )
    if cost.live_ms > MAX_STEP_MS:
        raise Unservable(
            f"{name} is too ambiguous: {_shown(cost.live_ms)} units for each token, at most "
            f"{MAX_STEP_MS:.0f} are allowed; nested repetitions, or neighbouring ones that can "
            "match the same text, cost most",
            _PARAM,
        )


def _shown(cost: float) -> str:
    return f"{cost:.0f}" if cost < 1e9 else "over 1e9"


def _pattern_cost(pattern: str) -> PatternCost:
    _check_length(len(pattern), MAX_PATTERN_CHARS, "a regular expression")
    try:
        check_depth(pattern)
    except Unreadable:
        raise Unservable(
            f"a regular expression is nested more than {MAX_DEPTH} deep", _PARAM
        ) from None
    try:
        return pattern_cost(pattern)
    except Unreadable:
        return unread_pattern_cost(pattern)


def _check_length(num_chars: int, max_chars: int, name: str) -> None:
    if num_chars > max_chars:
        raise Unservable(
            f"{name} of the output constraint has {num_chars} characters, at most {max_chars} "
            "are allowed",
            _PARAM,
        )


def _check_choices(choices: list[str]) -> None:
    if len(choices) > MAX_CHOICES:
        raise Unservable(
            f"there are {len(choices)} choices, at most {MAX_CHOICES} are allowed", _PARAM
        )
    _check_length(sum(map(len, choices)), MAX_CHOICE_CHARS, "the list of choices")


# Grammars ------------------------------------------------------------------------------------


def _check_grammar(grammar: str) -> None:
    _check_length(len(grammar), MAX_GRAMMAR_CHARS, "the grammar")
    try:
        check_depth(grammar)
    except Unreadable:
        raise Unservable(f"the grammar is nested more than {MAX_DEPTH} deep", _PARAM) from None
    try:
        patterns = check_grammar(grammar)
    except TooCostly as error:
        raise Unservable(f"the grammar may be slow to follow: {error}", _PARAM) from None
    costs = [_pattern_cost(pattern) for pattern in patterns]
    compile_ms, live_ms = (
        sum(c.compile_ms for c in costs),
        max((c.live_ms for c in costs), default=0.0),
    )
    _judge(PatternCost(compile_ms, live_ms), "a regular expression in the grammar")


# JSON documents ------------------------------------------------------------------------------


def _check_document(document: Any, name: str) -> None:
    if isinstance(document, str):
        _check_length(len(document), MAX_DOCUMENT_CHARS, name)
        try:
            check_depth(document)
        except Unreadable:
            raise Unservable(f"{name} is nested more than {MAX_DEPTH} deep", _PARAM) from None
        try:
            document = json.loads(document)
        except ValueError as error:
            raise Unservable(f"{name} is not JSON: {error}", _PARAM) from None
    _judge(PatternCost(live_ms=document_cost(document, name).live_ms), name)


def document_cost(document: Any, name: str) -> PatternCost:
    """The cost of a schema or structural tag. Raises Unservable if compiling it costs too much."""
    cost = _DocumentCost(name)
    for node in _nodes(document, name):
        cost.add(node)
    cost.judge()
    return PatternCost(cost.compile_ms, _Alternatives(document).live_ms())


def _nodes(document: Any, name: str) -> Iterator[Any]:
    """All nodes of a JSON document, without recursion. Raises Unservable if it is too deep."""
    stack = [(document, 0)]
    while stack:
        node, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise Unservable(f"{name} is nested more than {MAX_DEPTH} deep", _PARAM)
        yield node
        if isinstance(node, dict):
            stack.extend((value, depth + 1) for value in node.values())
        elif isinstance(node, list):
            stack.extend((value, depth + 1) for value in node)


class _DocumentCost:
    """The cost of compiling a schema or structural tag, summed over its nodes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.compile_ms = 0.0
        self._num_chars = 0
        self._patterns: set[str] = set()
        self._lengths: set[tuple[int | None, int | None]] = set()

    def add(self, node: Any) -> None:
        if isinstance(node, str):
            self._num_chars += len(node)
            self.compile_ms += _VALUE_MS + len(node) * _CHARACTER_MS
        elif isinstance(node, dict):
            self.compile_ms += _NODE_MS
            self._add_object(node)
        else:
            self.compile_ms += _VALUE_MS
        _check_length(self._num_chars, MAX_DOCUMENT_CHARS, self._name)
        if self.compile_ms > MAX_COMPILE_MS:
            self.judge()

    def judge(self) -> None:
        """Raises Unservable if it is too much."""
        if self.compile_ms > MAX_COMPILE_MS:
            raise Unservable(
                f"{self._name} is too costly to compile: more than the {MAX_COMPILE_MS:.0f} units "
                "that are allowed. Optional properties, long enums and counted repetitions of "
                f"characters cost most. {_TOO_SLOW}",
                _PARAM,
            )

    def _add_object(self, node: dict[Any, Any]) -> None:
        for key in node:
            self._num_chars += len(str(key))
            self.compile_ms += len(str(key)) * _CHARACTER_MS
        if isinstance(values := node.get("enum"), list):
            num_chars = sum(len(value) for value in values if isinstance(value, str))
            self.compile_ms += num_chars**2 * _SET_CHARACTER_PAIR_MS
        self._add_properties(node)
        self._add_lengths(node)
        if any(key in node for key in _RANGE_KEYS):
            self.compile_ms += _RANGE_MS
        if isinstance(text_format := node.get("format"), str):
            self.compile_ms += _FORMAT_MS.get(text_format, _OTHER_FORMAT_MS)
        for key in ("pattern", "regex"):
            if isinstance(pattern := node.get(key), str):
                self._add_pattern(pattern)
        if isinstance(patterns := node.get("patternProperties"), dict):
            for pattern in patterns:
                self._add_pattern(str(pattern))
        if isinstance(grammar := node.get("grammar"), str):
            _check_grammar(grammar)
            self.compile_ms += len(grammar) * _CHARACTER_MS

    def _add_properties(self, node: dict[Any, Any]) -> None:
        properties = node.get("properties")
        if not isinstance(properties, dict):
            return
        required = node.get("required")
        num_required = len(required) if isinstance(required, list) else 0
        num_optional = max(0, len(properties) - num_required)
        self.compile_ms += num_optional**2 * _OPTIONAL_PAIR_MS
        counts = [_bounded(node.get(key)) for key in ("minProperties", "maxProperties")]
        if counts == [None, None]:
            return
        highest = len(properties) if counts[1] is None else min(len(properties), counts[1])
        self.compile_ms += len(properties) ** 2 * highest * _COUNTED_PROPERTY_MS

    def _add_lengths(self, node: dict[Any, Any]) -> None:
        low, high = (_bounded(node.get(key)) for key in ("minLength", "maxLength"))
        if (low, high) in self._lengths or (low is None and high is None):
            return
        self._lengths.add((low, high))
        self.compile_ms += min(low or 0, MAX_UNROLLED_MASKS) * _FIXED_STRING_MS
        if high is not None:
            self.compile_ms += (
                min(max(0, high - (low or 0)), MAX_UNROLLED_MASKS) * _VARIABLE_STRING_MS
            )

    def _add_pattern(self, pattern: str) -> None:
        if pattern in self._patterns:
            return
        self._patterns.add(pattern)
        cost = _pattern_cost(pattern)
        _judge(cost, "a regular expression in " + self._name)
        self.compile_ms += cost.compile_ms


_RANGE_KEYS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _bounded(value: Any) -> int | None:
    """A count as an int, or None for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(max(0, min(value, 10**9))) if value == value else None


class _Alternatives:
    """How many parts of a schema may have to be followed at once: those of unions.

    Objects whose first property is constant are told apart at once and count little, as do
    numbers, literals and arrays. Everything else counts as a string of any text.
    """

    def __init__(self, document: Any) -> None:
        self._document = document
        self._known: dict[int, float] = {}

    def live_ms(self) -> float:
        """The worst union of the document."""
        return max((self._of(node) for node in _nodes(self._document, "")), default=0.0)

    def _of(self, node: Any) -> float:
        if not isinstance(node, dict):
            return 0.0
        known = self._known.get(id(node))
        if known is not None:
            return known
        self._known[id(node)] = 0.0  # while it is worked on: a union in itself adds nothing
        result = self._measure(node)
        self._known[id(node)] = result
        return result

    def _measure(self, node: dict[Any, Any]) -> float:
        total = 0.0
        for key in ("anyOf", "oneOf", "allOf", "elements", "tags"):
            branches = node.get(key)
            if isinstance(branches, list):
                total += sum(self._of(branch) for branch in branches)
        if isinstance(reference := node.get("$ref"), str):
            total += self._of(self._target(reference))
        return total or self._alone(node)

    def _alone(self, node: dict[Any, Any]) -> float:
        if "enum" in node or "const" in node:
            return 0.06
        if node.get("type") in ("integer", "number", "boolean", "null", "array") or "begin" in node:
            return 0.1
        properties = node.get("properties")
        if isinstance(properties, dict) and properties:
            first = next(iter(properties.values()))
            if isinstance(first, dict) and ("const" in first or "enum" in first):
                return 0.2
        return _STRING_STEP_MS

    def _target(self, reference: str) -> Any:
        """The node that a local reference names, or None."""
        node = self._document
        for part in reference.removeprefix("#").split("/")[1 : MAX_DEPTH + 1]:
            if not isinstance(node, dict):
                return None
            node = node.get(part.replace("~1", "/").replace("~0", "~"))
        return node
