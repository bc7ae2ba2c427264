"""YAML with lines and checked models."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict

from placement.errors import InvalidInput
from placement.yaml_file import nearest, parse_yaml


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    boxes: dict[str, Inner] = {}
    one: Inner | None = None


def test_values_know_their_lines() -> None:
    file = parse_yaml("a:\n  - b: 1\n  -\n    c: 2\n", "f.yaml")
    assert file.lines[("a", 1, "c")] == 4
    assert (
        file.error(("a", 1, "missing"), "is odd").message == "f.yaml, line 4: a.1.missing: is odd"
    )


def test_a_sound_file_becomes_a_model() -> None:
    file = parse_yaml("boxes: {a: {size: 1}}\none: {size: 2}\n", "f.yaml")
    assert file.checked(Outer) == Outer(boxes={"a": Inner(size=1)}, one=Inner(size=2))
    assert parse_yaml("", "f.yaml").checked(Outer) == Outer()


def test_aliases_stand_for_what_they_name() -> None:
    file = parse_yaml("boxes: {a: &a {size: 1}, b: *a, c: {<<: *a}}", "f.yaml")
    assert file.checked(Outer).boxes == dict.fromkeys("abc", Inner(size=1))


_BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("boxes: &a [*a]", "f.yaml, line 1: an alias .* stands inside itself"),
        ("boxes: &a {a: {b: *a}}", "f.yaml, line 1: an alias .* stands inside itself"),
        (_BOMB, "f.yaml, line 6: holds more than 200000 values"),
        ("[" * 100 + "]" * 100, "f.yaml, line 1: is nested too deeply"),
        ("[" * 20_000, "f.yaml: is nested too deeply"),
        ("a: " + "9" * 5000, "f.yaml, line 1: is not YAML: a number of thousands of digits"),
        ("#" * 4_000_001, "f.yaml: is longer than 4000000 characters"),
    ],
    ids=["own", "own below", "bomb", "deep", "deeper", "digits", "long"],
)
def test_what_is_too_large_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse_yaml(text, "f.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("boxes:\n  a: {sise: 1}", r"line 2: boxes\.a\.sise: .* did you mean size\? \(also wrong"),
        ("one:\n  sice: 1", r"line 2: one\.sice: there is no such key; did you mean size"),
        ("boxes: 3", r"line 1: boxes: must be a mapping, not 3"),
        ("a: b: c", "line 1: is not YAML"),
        ("a: !!python/object:os.system x", "is not YAML"),
        ("a: 1\na: 2", r"line 2: a: comes twice"),
        ("a: 1\nb: !!timestamp x", r"line 2: is not YAML: 'x' is no timestamp"),
        ("a: !!bool x", r"line 1: is not YAML: 'x' is no bool"),
        ("a: !!int ''", r"line 1: is not YAML: '' is no int"),
        ("a: 2020-13-45", r"line 1: is not YAML: '2020-13-45' is no timestamp"),
        ("one:\n  2020-01-01: 1", r"line 2: one\.2020-01-01: a key must be text; write it in"),
        ("{[1]: 2}", "is not YAML|there is no such key|f.yaml"),
    ],
)
def test_what_is_wrong_is_told_by_line(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse_yaml(text, "f.yaml").checked(Outer)


def test_without_anything_near_all_are_told() -> None:
    assert nearest("zzz", ["alpha", "beta"]) == "known: alpha, beta"
