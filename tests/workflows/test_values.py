import pytest

from workflows.errors import TemplateError
from workflows.values import compile_value


def test_templates_are_found_wherever_they_stand() -> None:
    value = compile_value({"a": ["x", "{{ inputs.q }}"], "b": {"c": "n {{ inputs.n }}"}, "d": 1})
    assert set(value.templates) == {("a", 1), ("b", "c")}
    rendered = value.render({"inputs": {"q": [1], "n": 2}, "nodes": {}})
    assert rendered == {"a": ["x", [1]], "b": {"c": "n 2"}, "d": 1}


def test_a_value_without_templates_is_handed_on_as_it_is() -> None:
    raw = {"a": ["{ not one }", 1]}
    assert compile_value(raw).render({}) is raw


def test_errors_are_raised_or_collected_with_their_path() -> None:
    with pytest.raises(TemplateError):
        compile_value(["{{"])
    found = []
    value = compile_value({"a": ["{{", "{{ inputs.q }}"]}, lambda at, _: found.append(at))
    assert found == [("a", 0)]
    assert set(value.templates) == {("a", 1)}
