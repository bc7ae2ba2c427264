"""Whether a grammar (EBNF or Lark) has a shape that is followed quickly.

An ambiguous grammar has many derivations of the same text, and an Earley parser follows them all:
`x ::= x x | "a"` compiles at once and then takes longer with every token.
Ambiguity is undecidable, so what is refused is what it needs:

- a rule with an alternative that can both begin and end with the rule itself (`e ::= e "+" e`;
  `e ::= e "+" t` is fine),
- a rule with two neighbours of which the first can end, or the second begin, with that rule
  (`x ::= "a" x*`; `s ::= "(" s* ")"` is fine),
- loops in loops, counted repetition, optional parts and sets of many characters, beyond small
  limits.

The grammar is read for its shape only; what is no grammar is left to the compiler.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from spot.engines.vllm_compat.pattern_cost import MAX_UNROLLED_MASKS

MAX_NESTED_REPETITION = 10
MAX_TOTAL_REPETITION = 260
MAX_WIDE_SETS = 64
MAX_OPTIONAL_PARTS = 10
MAX_GRAMMAR_RULES = 200
MAX_NESTED_LOOPS = 3

_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*|//[^\n]*)
    |(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<regex>/(?:\\.|[^/\\\n])+/\w*)
    |(?P<set>\[(?:\\.|[^\]\\])*\])
    |(?P<rule>[\w.-]+\s*(?:::=|:(?!:)))
    |(?P<name>[\w.-]+)
    |(?P<loop>[*+?]|\{[^{}]*\}|~\s*\d+(?:\s*\.\.\s*\d+)?)
    |(?P<bar>\|)|(?P<open>\()|(?P<close>\))""",
    re.VERBOSE,
)
_NUMBER = re.compile(r"\d{1,18}")
_WIDE_SET = re.compile(r"^\[\^|\w-\w|\\[wWSDpPxuU]|.{24}", re.DOTALL)
_EMPTY_TEXTS = ('""', "''")


class TooCostly(ValueError):
    """The grammar may be slow to follow. The message says why, and what is allowed."""


@dataclass(slots=True)
class _Item:
    """A part of a sequence: some text, a rule's name, or a group in brackets."""

    name: str | None = None
    group: _Group | None = None
    is_wide: bool = False
    is_optional: bool = False
    is_loop: bool = False
    times: int = 1


@dataclass(slots=True)
class _Group:
    """Alternatives, each a sequence of items."""

    sequences: list[list[_Item]] = field(default_factory=lambda: [[]])


@dataclass(slots=True)
class _Ends:
    """The rules that a part can begin with, and those that it can end with."""

    first: set[str] = field(default_factory=set)
    last: set[str] = field(default_factory=set)


def check_grammar(grammar: str) -> list[str]:
    """The regular expressions that a Lark grammar holds; their cost is not looked at here.

    Raises TooCostly for a grammar of a shape that may be slow to follow.
    Raises RecursionError for one that is nested very deeply.
    """
    tokens = [
        (match.lastgroup or "", match.group())
        for match in _TOKEN.finditer(grammar)
        if match.lastgroup != "comment"
    ]
    _check_sizes(tokens)
    rules = _read(tokens)
    if len(rules) > MAX_GRAMMAR_RULES:
        raise TooCostly(f"it has {len(rules)} rules, at most {MAX_GRAMMAR_RULES} are allowed")
    shape = _Shape(rules)
    shape.check_repetition()
    shape.check_loops()
    shape.check_recursion()
    return [text[1 : text.rindex("/")] for kind, text in tokens if kind == "regex"]


def _check_sizes(tokens: list[tuple[str, str]]) -> None:
    """What repetitions and sets make the compiler do. A set of a few characters costs little."""
    repetition = sum(
        min(MAX_UNROLLED_MASKS, max([0, *map(int, _NUMBER.findall(text))]))
        for kind, text in tokens
        if kind == "loop"
    )
    if repetition > MAX_TOTAL_REPETITION:
        raise TooCostly(
            f"its counted repetitions add up to {repetition} (each counts {MAX_UNROLLED_MASKS} at "
            f"most), at most {MAX_TOTAL_REPETITION} are allowed"
        )
    num_wide = sum(kind == "set" and bool(_WIDE_SET.search(text)) for kind, text in tokens)
    num_wide += sum(kind == "name" and text == "." for kind, text in tokens)
    if num_wide > MAX_WIDE_SETS:
        raise TooCostly(
            f"it has {num_wide} sets of many characters, at most {MAX_WIDE_SETS} are allowed"
        )
    num_optional = sum(
        kind == "loop" and text != "*" and _is_zero(text) and before != "text"
        for (before, _), (kind, text) in pairwise(tokens)
    )
    if num_wide and num_optional > MAX_OPTIONAL_PARTS:
        raise TooCostly(
            f"it has {num_optional} optional parts besides texts, at most {MAX_OPTIONAL_PARTS} are "
            "allowed where there are sets of many characters"
        )


def _is_zero(loop: str) -> bool:
    """Whether a repetition lets its part be missing."""
    return loop in "?*" or (loop[0] in "{~" and int((_NUMBER.findall(loop) or ["0"])[0]) == 0)


def _read(tokens: list[tuple[str, str]]) -> dict[str, _Group]:
    """The rules by name. Whatever is out of order is passed over."""
    rules: dict[str, _Group] = {}
    open_groups = [_Group()]
    for kind, text in tokens:
        sequence = open_groups[-1].sequences[-1]
        match kind:
            case "rule":
                rule = rules.setdefault(text.rstrip(":= \t\r\n"), _Group())
                rule.sequences.append([])
                open_groups = [rule]
            case "bar":
                open_groups[-1].sequences.append([])
            case "open":
                group = _Group()
                sequence.append(_Item(group=group))
                open_groups.append(group)
            case "close" if len(open_groups) > 1:
                open_groups.pop()
            case "loop" if sequence:
                _repeat(sequence[-1], text)
            case "name":
                sequence.append(_Item(name=text))
            case "text" | "set" | "regex":
                is_wide = kind == "set" and bool(_WIDE_SET.search(text))
                sequence.append(_Item(is_optional=text in _EMPTY_TEXTS, is_wide=is_wide))
    for rule in rules.values():
        del rule.sequences[0]
    return rules


def _repeat(item: _Item, loop: str) -> None:
    counts = [int(count) for count in _NUMBER.findall(loop)]
    item.times *= max([1, *counts])
    item.is_loop |= loop != "?" and counts != [1]
    item.is_optional |= _is_zero(loop)


class _Shape:
    """What the rules of a grammar can begin and end with."""

    def __init__(self, rules: dict[str, _Group]) -> None:
        self._rules = rules
        self._empty: set[str] = set()
        while more := {n for n, g in rules.items() if n not in self._empty and self._is_empty(g)}:
            self._empty |= more
        ends = {name: self._ends_of_group(group) for name, group in rules.items()}
        self._first = {name: _closure(name, lambda n: ends[n].first) for name in rules}
        self._last = {name: _closure(name, lambda n: ends[n].last) for name in rules}
        # With at least one step in between: a rule does not begin with itself just by being it.
        self._inner_first = {name: _all(self._first, ends[name].first) for name in rules}
        self._inner_last = {name: _all(self._last, ends[name].last) for name in rules}
        self._used = {name: _closure(name, lambda n: self._names(rules[n])) for name in rules}
        self._num_loops: dict[str, int] = {}
        self._times: dict[str, int] = {}

    def check_repetition(self) -> None:
        """Raises TooCostly where counted repetitions, one in the other, multiply to too much."""
        for name in self._rules:
            self._times_of_rule(name)

    def check_loops(self) -> None:
        """Raises TooCostly where loops are nested too deeply, over all rules."""
        for name in self._rules:
            if self._loops_of_rule(name) > MAX_NESTED_LOOPS:
                raise TooCostly(
                    f"its loops are nested more than {MAX_NESTED_LOOPS} deep, counting those of "
                    "the rules that it uses"
                )

    def check_recursion(self) -> None:
        """Raises TooCostly where a rule calls itself in an ambiguous way."""
        for name, rule in self._rules.items():
            for sequence in rule.sequences:
                ends = self._ends(sequence)
                if name in _all(self._first, ends.first) & _all(self._last, ends.last):
                    raise TooCostly(f"the rule '{name[:64]}' can both begin and end with itself")
                for inner, after in pairwise(sequence):
                    if after.is_wide and inner.name and name in self._used.get(inner.name, ()):
                        raise TooCostly(
                            f"in the rule '{name[:64]}' a set of many characters follows the rule "
                            "itself"
                        )
            for pair in self._neighbours(rule):
                last, first = ({n for n in part if name in self._used[n]} for part in pair)
                if not last or not first:
                    continue
                if name in _all(self._inner_first, first) | _all(self._inner_last, last):
                    raise TooCostly(f"the rule '{name[:64]}' can hold itself twice in a row")

    def _names(self, group: _Group) -> set[str]:
        """All rules that a group names."""
        names: set[str] = set()
        for item in (item for sequence in group.sequences for item in sequence):
            if item.group is not None:
                names |= self._names(item.group)
            elif item.name in self._rules:
                names.add(item.name)
        return names

    def _is_empty(self, group: _Group) -> bool:
        return any(all(map(self._can_miss, sequence)) for sequence in group.sequences)

    def _can_miss(self, item: _Item) -> bool:
        if item.is_optional or item.name in self._empty:
            return True
        return item.group is not None and self._is_empty(item.group)

    def _ends_of_group(self, group: _Group) -> _Ends:
        ends = _Ends()
        for sequence in group.sequences:
            own = self._ends(sequence)
            ends.first |= own.first
            ends.last |= own.last
        return ends

    def _ends_of_item(self, item: _Item) -> _Ends:
        if item.group is not None:
            return self._ends_of_group(item.group)
        names = {item.name} & self._rules.keys() if item.name else set()
        return _Ends(names, names)

    def _ends(self, sequence: list[_Item]) -> _Ends:
        ends = _Ends()
        for item in sequence:
            ends.first |= self._ends_of_item(item).first
            if not self._can_miss(item):
                break
        for item in reversed(sequence):
            ends.last |= self._ends_of_item(item).last
            if not self._can_miss(item):
                break
        return ends

    def _neighbours(self, group: _Group) -> Iterator[tuple[set[str], set[str]]]:
        """What can end, and what can begin, at each place between two rules of a group."""
        for sequence in group.sequences:
            before: set[str] = set()
            for item in sequence:
                if item.group is not None:
                    yield from self._neighbours(item.group)
                ends = self._ends_of_item(item)
                if item.is_loop:
                    before = before | ends.last
                if before and ends.first:
                    yield before, ends.first
                before = before | ends.last if self._can_miss(item) else ends.last

    def _times_of_rule(self, name: str) -> int:
        if name not in self._times:
            self._times[name] = 1  # while it is worked on
            self._times[name] = self._times_of_group(self._rules[name])
        return self._times[name]

    def _times_of_group(self, group: _Group) -> int:
        return max(
            (self._times_of_item(item) for sequence in group.sequences for item in sequence),
            default=1,
        )

    def _times_of_item(self, item: _Item) -> int:
        inner = 1
        if item.group is not None:
            inner = self._times_of_group(item.group)
        elif item.name in self._rules:
            inner = self._times_of_rule(item.name)
        times = inner * item.times
        if inner > 1 and item.times > 1 and times > MAX_NESTED_REPETITION:
            raise TooCostly(
                f"counted repetitions within each other multiply to {min(times, 10**9)}, at most "
                f"{MAX_NESTED_REPETITION} are allowed"
            )
        return times

    def _loops_of_rule(self, name: str) -> int:
        if name not in self._num_loops:
            self._num_loops[name] = 0  # while it is worked on: recursion is no loop
            self._num_loops[name] = self._loops_of_group(self._rules[name])
        return self._num_loops[name]

    def _loops_of_group(self, group: _Group) -> int:
        return max((self._loops(item) for seq in group.sequences for item in seq), default=0)

    def _loops(self, item: _Item) -> int:
        inner = 0
        if item.group is not None:
            inner = self._loops_of_group(item.group)
        elif item.name in self._rules:
            inner = self._loops_of_rule(item.name)
        return inner + item.is_loop


def _closure(start: str, following: Callable[[str], set[str]]) -> set[str]:
    """All that can be reached from a rule, itself included."""
    reached, todo = {start}, [start]
    while todo:
        new = following(todo.pop()) - reached
        reached |= new
        todo.extend(new)
    return reached


def _all(sets: dict[str, set[str]], names: set[str]) -> set[str]:
    return set().union(*(sets[name] for name in names))
