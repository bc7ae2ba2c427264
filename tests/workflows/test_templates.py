import time
from typing import Any

import pytest

from workflows.errors import TemplateError
from workflows.templates import (
    MAX_RENDER_S,
    MAX_SOURCE_CHARS,
    Reference,
    RenderBudget,
    compile_condition,
    compile_template,
)

SCOPE: dict[str, Any] = {
    "inputs": {"q": "hi", "n": 3, "list": [1, 2, 3], "items": 5, "rows": [{"a": 1}, {"a": 2}]},
    "nodes": {"a": {"output": {"text": "T", "deep": {"k": [1]}}, "status": "completed"}},
}


def render(source: str, scope: dict[str, Any] = SCOPE) -> Any:
    return compile_template(source).render(scope)


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("{{ inputs.q }}", "hi"),
        ("{{ inputs.n }}", 3),
        (" {{ inputs.list }}\n", [1, 2, 3]),
        ("{{ inputs.list | select('gt', 1) }}", [2, 3]),
        ("{{ nodes.a.output['deep'].k[0] }}", 1),
        ("{{ inputs.n > 2 }}", True),
        ("{{ none }}", None),
    ],
)
def test_a_lone_expression_keeps_the_type_of_its_value(source: str, value: object) -> None:
    assert render(source) == value
    assert type(render(source)) is type(value)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ inputs.q }}{{ inputs.n }}", "hi3"),
        ("n = {{ inputs.n }}", "n = 3"),
        ("{% for x in inputs.list %}{{ x }};{% endfor %}", "1;2;3;"),
        ("{% if inputs.n > 2 %}many{% else %}few{% endif %}", "many"),
        ("{{ inputs.list | map('string') | join('-') }}", "1-2-3"),
        ("{{ inputs.rows | map(attribute='a') | join(', ') }}", "1, 2"),
        ("{{ inputs.q ~ inputs.n }}", "hi3"),
        ("{{ inputs.list | tojson }}", "[1,2,3]"),
        ("{% raw %}{{ as it is }}{% endraw %}", "{{ as it is }}"),
        ("{{ inputs.q | replace('h', 'H') }}", "Hi"),
        ("{{ inputs.missing | default('none') }}", "none"),
        ("{{ ('[1, 2]' | fromjson)[1] }} of {{ '{' | fromjson('nothing') }}", "2 of nothing"),
    ],
)
def test_anything_else_renders_to_text(source: str, text: str) -> None:
    assert render(source) == text


@pytest.mark.parametrize("source", ["{{ '{' | fromjson }}", "{{ inputs.n | fromjson }}"])
def test_what_is_not_json_is_an_error_without_a_default(source: str) -> None:
    with pytest.raises(TemplateError, match="fromjson"):
        render(source)


def test_keys_come_before_the_methods_of_a_mapping() -> None:
    assert render("{{ inputs.items }}") == 5


def test_references_are_known_without_rendering() -> None:
    found = compile_template("{{ nodes.a.output.text }} {{ inputs['q'] }} {{ nodes.b.status }}")
    assert found.references == {
        Reference("nodes", ("a", "output", "text")),
        Reference("inputs", ("q",)),
        Reference("nodes", ("b", "status")),
    }


def test_what_follows_a_computed_part_is_not_known() -> None:
    assert compile_template("{{ nodes[inputs.q].output }}").references == {
        Reference("nodes", ()),
        Reference("inputs", ("q",)),
    }


def test_only_an_untouched_reference_is_one() -> None:
    assert compile_template("{{ nodes.a.output.text }}").is_reference
    assert not compile_template("{{ nodes.a.output.text | upper }}").is_reference
    assert not compile_template("x {{ nodes.a.output.text }}").is_reference


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("{{", "unexpected"),
        ("{{ foo }}", "there is no 'foo'"),
        ("{% set x = 1 %}", "'set' is not available"),
        ("{% macro m() %}{% endmacro %}", "not available"),
        ("{% include 'x' %}", "not available"),
        ("{% for x in inputs.list recursive %}{% endfor %}", "recursive"),
        ("{{ range(9) }}", "calls are not available"),
        ("{{ 'a'.ljust(1000000000) }}", "calls are not available"),
        ("{{ inputs.q.upper() }}", "calls are not available"),
        ("{{ __tick__ }}", "there is no __tick__"),
        ("{{ inputs.q | center(1000000000) }}", "center"),
        ("x" * (MAX_SOURCE_CHARS + 1), "characters"),
        ("{{ " + "-" * 5000 + "1 }}", "deep"),
    ],
)
def test_what_the_language_does_not_have_is_refused_when_compiled(source: str, part: str) -> None:
    with pytest.raises(TemplateError, match=part):
        compile_template(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ inputs.q.__class__.__mro__ }}",
        "{{ inputs.__class__ }}",
        "{{ (inputs.list | map(attribute='__class__') | list) }}",
    ],
)
def test_nothing_leads_out_of_the_sandbox(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


def test_a_missing_value_is_named() -> None:
    with pytest.raises(TemplateError, match=r"there is no 'zzz' in '\{\{ inputs.zzz"):
        render("{{ inputs.zzz }}")


BOMBS = [
    "{{ 'a' * 10**9 }}",
    "{{ [1] * 10**9 }}",
    "{{ 2 ** (10 ** 9) }}",
    "{{ (2 ** 4000) * (2 ** 4000) }}",
    "{{ '%1000000000d' % 3 }}",
    "{{ inputs.x" + " ~ inputs.x" * 1000 + " }}",
    "{{ inputs.x" + " + inputs.x" * 1000 + " }}",
    "{% for a in inputs.l %}{{ inputs.x }}{% endfor %}",
    "{% for a in inputs.l %}{% for b in inputs.l %}{% endfor %}{% endfor %}",
    "{{ inputs.l | select('in', inputs.l) | list }}",
    "{{ inputs.l | map('string') | join(inputs.x) }}",
    "{{ inputs.x | replace('a', inputs.x) }}",
    "{{ inputs.nested | sum }}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_a_bomb_is_defused(source: str) -> None:
    large = {
        "inputs": {"l": list(range(60_000)), "x": "a" * 1_000_000, "nested": [[1]] * 1000},
        "nodes": {},
    }
    begun_s = time.monotonic()
    with pytest.raises(TemplateError):
        render(source, large)
    # Generous: what would go wrong takes minutes or all memory.
    assert time.monotonic() - begun_s < 20 * MAX_RENDER_S


def test_a_condition_needs_no_braces() -> None:
    assert compile_condition("inputs.n > 2").render(SCOPE) is True
    assert compile_condition("{{ inputs.n > 5 }}").render(SCOPE) is False
    with pytest.raises(TemplateError, match="one expression"):
        compile_condition("{{ inputs.n }} and {{ inputs.q }}")


def test_a_budget_is_spent_and_refills_with_time() -> None:
    template = compile_template("{% for a in inputs.l %}{% endfor %}")
    budget = RenderBudget(start_s=10.0, burst_s=0.001, share=0.1).refill(10.0)
    template.render({"inputs": {"l": list(range(50_000))}}, budget)
    with pytest.raises(TemplateError, match="altogether"):
        template.render({"inputs": {"l": []}}, budget)
    assert template.render({"inputs": {"l": []}}, budget.refill(1000.0)) == ""


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ 2**64 }}", "64 bits"),
        ("{{ 10**10**10 }}", "64 bits"),
        ("{{ [{'a': 0 - 2**63 - 1}] }}", "64 bits"),
        (f"{{{{ '{'[' * 152}{']' * 152}' | fromjson }}}}", "deeper than 150"),
        ("{{ '\\ud800' }}", "surrogate"),
        ("x {{ '\\ud800' }}", "surrogate"),
        ("{{ {'\\ud800': 1} }}", "surrogate"),
        ("{{ {1: 2} }}", "key"),
        ("{{ 'nan'|float }}", "nan"),
        ("{{ 1e308*10 }}", "inf"),
        ("{{ 1.0|round(999999999,'ceil') }}", "20 digits"),
        ("{{ 7|round(100000000) }}", "20 digits"),
        ("{{ 'aaaaaaa'|truncate(5, true, 'bbbbbbb') }}", "in"),
    ],
)
def test_what_json_does_not_have_is_no_value(source: str, told: str) -> None:
    """Nothing of it is computed before it is rendered, either."""
    template = compile_template(source)
    with pytest.raises(TemplateError, match=told):
        template.render({})


def test_the_largest_numbers_are_values() -> None:
    for value in (2**64 - 1, -(2**63), 1.7e308):
        assert compile_template("{{ inputs.x }}").render({"inputs": {"x": value}}) == value


def test_a_number_that_python_does_not_read_is_an_error() -> None:
    with pytest.raises(TemplateError):
        compile_template("{{ " + "9" * 5000 + " }}")


def test_long_texts_are_no_numbers() -> None:
    """Reading one takes time that grows with the square of its length, and so does computing."""
    scope = {"inputs": {"x": "1" * 101, "y": "v" * 200_000}}
    assert render("{{ inputs.x | int }}", scope) == 0
    assert render("{{ inputs.y | int(7, 32) }}", scope) == 7
    assert render("{{ '12' | int + 'ff' | int(0, 16) + 3.9 | int }}", scope) == 270
