"""What a regular expression costs a grammar engine, from its text alone.

Two things are costly, and neither shows in a pattern's length:

- Compiling: each state needs a mask over the vocabulary, and counted repetition of a wide class
  (`.{1,1000}`) makes up to 130 of them. Equal masks are not found again.
- Each token: where it is not clear which part of the pattern the text is in, all that are possible
  are followed at once. `(.{1,30}){1,30}` compiles in a moment; then a single token takes over a
  second, in which the engine does nothing else for anybody.

So every part of a pattern carries what it adds to both, in units of about a millisecond of one
core, with a vocabulary of 49,152 tokens and xgrammar 0.2.8; `benchmarks/constraint_cost.py` puts
them beside what is measured.
"""

from __future__ import annotations

import re
import re._constants as op  # type: ignore[import-not-found]
import re._parser as re_parser  # type: ignore[import-not-found]
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

MAX_UNROLLED_MASKS = 130
MAX_PATTERN_DEPTH = 200
UNBOUNDED = 10**9

# A character set is a bit set: one bit for each of ASCII, and one for all the rest.
_OTHER = 1 << 128
ANY = (1 << 129) - 1
_LETTERS = sum(1 << ord(c) for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_SPACE = 1 << ord(" ")

# (compile_ms per state, step_ms per state that is followed)
_NARROW, _MEDIUM, _WIDE = (0.02, 0.06), (1.3, 1.0), (7.0, 3.5)
_GROUP_NAME = re.compile(r"\(\?<(?![=!])")
_VARIABLE_FACTOR = 2.6
_AMBIGUOUS_LOOP_FACTOR = 4.0
_SHARED_BODY_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class PatternCost:
    """A part of a pattern, from one start of it.

    compile_ms: to compile it.
    live_ms: for each token, with all states that can be followed at once.
    all_ms: the same, if all its states were followed; repetitions are unrolled.
    first: what it can begin with. extend: what can go on with it after it could have ended.
    shortest, longest: in characters.
    is_single: it is one class.
    """

    compile_ms: float = 0.0
    live_ms: float = 0.0
    all_ms: float = 0.0
    first: int = 0
    extend: int = 0
    shortest: int = 0
    longest: int = 0
    is_forked: bool = False
    is_single: bool = False


EMPTY = PatternCost()


def characters(bits: int) -> PatternCost:
    """One character of a set."""
    num_letters = (bits & _LETTERS).bit_count()
    if bits & _SPACE and num_letters > 4:
        compile_ms, step_ms = _WIDE
    elif bits & _OTHER or num_letters > 4 or bits.bit_count() > 16:
        compile_ms, step_ms = _MEDIUM
    else:
        compile_ms, step_ms = _NARROW
    return PatternCost(compile_ms, step_ms, step_ms, bits, 0, 1, 1, is_single=True)


def literal(text: str) -> PatternCost:
    """These characters, one after the other."""
    if not text:
        return EMPTY
    compile_ms, step_ms = _NARROW
    return PatternCost(
        compile_ms * len(text),
        step_ms,
        step_ms * len(text),
        character_bit(ord(text[0])),
        0,
        len(text),
        len(text),
        is_single=len(text) == 1,
    )


def character_bit(code: int) -> int:
    return 1 << code if code < 128 else _OTHER


def in_sequence(head: PatternCost, tail: PatternCost) -> PatternCost:
    """One part, then the other."""
    num_starts = 1
    if head.extend & tail.first or head.is_forked:
        num_starts = head.longest - head.shortest + 1
    tail_ms = min(tail.all_ms, num_starts * tail.live_ms)
    is_forked = head.is_forked or tail.is_forked or (num_starts > 1 and tail.longest > 0)
    return PatternCost(
        head.compile_ms + tail.compile_ms,
        # Measured: a chain of n parts that may all be missing costs n² of one.
        (head.live_ms**0.5 + tail_ms**0.5) ** 2
        if is_forked or not head.shortest
        else max(head.live_ms, tail_ms),
        head.all_ms + tail.all_ms,
        head.first if head.shortest else head.first | tail.first,
        tail.extend if tail.shortest else tail.extend | head.extend | tail.first,
        min(UNBOUNDED, head.shortest + tail.shortest),
        min(UNBOUNDED, head.longest + tail.longest),
        is_forked,
        # A class stays one beside nothing; a repetition of it is unrolled.
        (head == EMPTY and tail.is_single) or (tail == EMPTY and head.is_single),
    )


def either(branches: Iterable[PatternCost]) -> PatternCost:
    """One of several parts."""
    together: PatternCost | None = None
    for branch in branches:
        if together is None:
            together = replace(branch, is_single=False)
            continue
        overlaps = bool(together.first & branch.first)
        overlaps |= not together.shortest or not branch.shortest
        join = sum if overlaps else max
        together = PatternCost(
            together.compile_ms + branch.compile_ms,
            join((together.live_ms, branch.live_ms)),
            together.all_ms + branch.all_ms,
            together.first | branch.first,
            # One branch can go on where a shorter one that began alike ended.
            (together.extend | branch.extend) if not overlaps else ANY,
            min(together.shortest, branch.shortest),
            max(together.longest, branch.longest),
            together.is_forked or branch.is_forked or overlaps,
        )
    return together or EMPTY


def repeated(body: PatternCost, low: int, high: int) -> PatternCost:
    """A part, `low` to `high` times; UNBOUNDED is without limit."""
    if high == 0 or not body.longest:
        return EMPTY
    is_bounded = high < UNBOUNDED
    times = high if is_bounded else low + 1
    has_fixed_length = body.shortest == body.longest
    is_ambiguous = not has_fixed_length and bool(
        not body.shortest or body.extend & body.first or body.is_forked
    )
    all_ms = body.all_ms * times
    live_ms = body.live_ms
    if is_ambiguous:
        live_ms = all_ms = all_ms * _AMBIGUOUS_LOOP_FACTOR
    return PatternCost(
        _repeated_compile_ms(body, low, high),
        live_ms,
        all_ms,
        body.first,
        body.extend | (body.first if low != high else 0) | (ANY if is_ambiguous else 0),
        min(UNBOUNDED, body.shortest * low),
        min(UNBOUNDED, body.longest * high),
        is_ambiguous or body.is_forked,
    )


def _repeated_compile_ms(body: PatternCost, low: int, high: int) -> float:
    if high == 1:
        return body.compile_ms
    if not body.is_single:
        return body.compile_ms * _SHARED_BODY_FACTOR
    fixed = min(low, MAX_UNROLLED_MASKS)
    variable = 1 if high >= UNBOUNDED else min(high - low, MAX_UNROLLED_MASKS)
    return body.compile_ms * (fixed + variable * (1 if variable == 1 else _VARIABLE_FACTOR))


class Unreadable(ValueError):
    """Python cannot read the pattern."""


def pattern_cost(pattern: str) -> PatternCost:
    """The cost of a regular expression. Raises Unreadable, nothing else.

    Named groups may be written as in ECMAScript.
    """
    check_depth(pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = re_parser.parse(_GROUP_NAME.sub("(?P<", pattern))
    except (re.error, RecursionError, OverflowError, ValueError) as error:
        raise Unreadable(str(error)) from None
    return _of_nodes(parsed)


def check_depth(text: str, max_depth: int = MAX_PATTERN_DEPTH) -> None:
    """Raises Unreadable where brackets are nested too deeply, whether they are escaped or not."""
    depth = 0
    for character in text:
        if character in "([{":
            depth += 1
            if depth > max_depth:
                raise Unreadable(f"it is nested more than {max_depth} deep")
        elif character in ")]}":
            depth = max(0, depth - 1)


def unread_pattern_cost(pattern: str) -> PatternCost:
    """An upper bound for a pattern that Python cannot read, by its characters and counts alone."""
    times = 1
    for count in re.findall(r"[{,]\s*(\d{1,18})", pattern):
        times = min(UNBOUNDED, times * max(1, int(count)))
    num_loops = pattern.count("*") + pattern.count("+") + pattern.count("{")
    compile_ms, step_ms = _WIDE
    return PatternCost(
        compile_ms * len(pattern) * min(times, MAX_UNROLLED_MASKS * _VARIABLE_FACTOR),
        step_ms * max(1, num_loops) * times,
        step_ms * len(pattern) * times,
        ANY,
        ANY,
        0,
        UNBOUNDED,
        True,
    )


def _of_nodes(nodes: Any) -> PatternCost:
    return reduce(in_sequence, (_of_node(opcode, argument) for opcode, argument in nodes), EMPTY)


def _of_node(opcode: Any, argument: Any) -> PatternCost:
    reader = _READERS.get(opcode)
    # Anchors take no text. What is left (back references) no grammar compiler takes.
    return EMPTY if reader is None else reader(argument)


def _of_repeat(argument: Any) -> PatternCost:
    low, high, body = argument
    return repeated(
        _of_nodes(body),
        min(int(low), UNBOUNDED - 1),
        UNBOUNDED if high is op.MAXREPEAT else min(int(high), UNBOUNDED - 1),
    )


def _class_bits(items: Any) -> int:
    bits, is_negated = 0, False
    for opcode, argument in items:
        if opcode is op.NEGATE:
            is_negated = True
        elif opcode is op.LITERAL:
            bits |= character_bit(argument)
        elif opcode is op.RANGE:
            bits |= range_bits(*argument)
        elif opcode is op.CATEGORY:
            bits |= _CATEGORIES.get(argument, ANY)
    # Outside of ASCII, sets are not told apart: there is always something else.
    return (ANY & ~bits) | _OTHER if is_negated else bits


def range_bits(low: int, high: int) -> int:
    """All characters from one code to another."""
    ascii_bits = (1 << (min(high, 127) + 1)) - (1 << low) if low < 128 else 0
    return max(0, ascii_bits) | (_OTHER if high > 127 else 0)


_DIGITS = range_bits(ord("0"), ord("9"))
_WORD = _LETTERS | _DIGITS | 1 << ord("_") | _OTHER
_BLANKS = sum(1 << ord(c) for c in " \t\n\r\f\v") | _OTHER
_CATEGORIES: dict[Any, int] = {
    op.CATEGORY_DIGIT: _DIGITS,
    op.CATEGORY_NOT_DIGIT: ANY & ~_DIGITS,
    op.CATEGORY_WORD: _WORD,
    op.CATEGORY_NOT_WORD: (ANY & ~_WORD) | _OTHER,
    op.CATEGORY_SPACE: _BLANKS,
    op.CATEGORY_NOT_SPACE: (ANY & ~_BLANKS) | _OTHER,
}
_READERS: dict[Any, Callable[[Any], PatternCost]] = {
    op.LITERAL: lambda code: literal(chr(code)) if code else literal("?"),
    op.NOT_LITERAL: lambda code: characters((ANY & ~character_bit(code)) | _OTHER),
    op.ANY: lambda _: characters(ANY),
    op.IN: lambda items: characters(_class_bits(items)),
    op.CATEGORY: lambda category: characters(_CATEGORIES.get(category, ANY)),
    op.BRANCH: lambda argument: either([_of_nodes(branch) for branch in argument[1]]),
    op.SUBPATTERN: lambda argument: _of_nodes(argument[3]),
    op.ATOMIC_GROUP: _of_nodes,
    op.ASSERT: lambda argument: _of_nodes(argument[1]),
    op.ASSERT_NOT: lambda argument: _of_nodes(argument[1]),
    op.MAX_REPEAT: _of_repeat,
    op.MIN_REPEAT: _of_repeat,
    op.POSSESSIVE_REPEAT: _of_repeat,
}
