from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflows.known_prefix import MIN_CHARS, known_prompt
from workflows.values import compile_value

LONG = "Rules. " * (MIN_CHARS // 7 + 1)
SCOPE = {
    "inputs": {"q": "why", "n": 5},
    "nodes": {"done": {"output": {"text": "D"}, "status": "completed", "error": None}},
}


def known(params: dict[str, Any], *ended: str) -> dict[str, Any] | None:
    return known_prompt(compile_value(params), SCOPE, ended)


def prompt(text: str, *ended: str) -> str:
    """What is known of a prompt behind a long beginning."""
    found = known({"prompt": LONG + text}, *ended)
    assert found is not None
    (message,) = found["messages"]
    assert message["role"] == "user"
    return str(message["content"].removeprefix(LONG))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ nodes.find.output.text }} after", ""),
        ("{{ inputs.q }} {{ inputs.n }} {{ nodes.find.output.text }}", "why 5 "),
        ("{{ inputs.q }}\n {{- nodes.find.output.text }}", "why"),
        ("{% for x in nodes.find.output.items %}{{ x }}{% endfor %}", ""),
        ("a {% if inputs.q %}b{% endif %}", "a "),
        ("a {{ '}}' ~ nodes.find.output.text }}", "a "),
        ("a {{ nodes.done.output.text }} b", "a "),
        ("no template", "no template"),
    ],
)
def test_a_text_is_known_up_to_what_is_not(text: str, expected: str) -> None:
    assert prompt(text) == expected


def test_what_has_ended_is_known() -> None:
    text = "a {{ nodes.done.output.text }} b {{ nodes.find.output.text }}"
    assert prompt(text, "done") == "a D b "


def test_messages_are_known_up_to_the_first_that_is_not() -> None:
    messages = [
        {"role": "system", "content": LONG},
        {"role": "user", "content": "{{ inputs.q }}: {{ nodes.find.output.text }}"},
        {"role": "user", "content": "more"},
    ]
    found = known({"messages": messages, "max_tokens": "{{ inputs.n }}"})
    assert found == {
        "messages": [messages[0], {"role": "user", "content": "why: "}],
        "max_tokens": 5,
    }


@pytest.mark.parametrize(
    "params",
    [
        {"prompt": "short {{ nodes.find.output.text }}"},
        {"prompt": LONG, "max_tokens": "{{ nodes.find.output.number }}"},
        {"messages": "{{ nodes.find.output.items }}"},
        {"messages": [{"role": "{{ nodes.find.output.text }}", "content": LONG}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
        {"messages": ["x"]},
        {},
    ],
)
def test_where_little_is_known_there_is_nothing(params: dict[str, Any]) -> None:
    assert known(params) is None


PIECE = st.sampled_from(
    [
        *("a ", "\n", "  ", "{{ inputs.q }}", "{{ inputs.n }}", "{{- inputs.q -}}"),
        *("{{ nodes.b.output }}", "{{ nodes.done.output.text }}", "{# no #}"),
        "{% if inputs.n %}yes {% endif %}",
    ]
)


@given(pieces=st.lists(PIECE, max_size=8))
def test_it_is_how_the_whole_begins(pieces: list[str]) -> None:
    """Whatever the rest turns out to be."""
    source = LONG + "".join(pieces)
    whole = {**SCOPE, "nodes": {**SCOPE["nodes"], "b": {"output": "B"}}}
    rendered = compile_value({"prompt": source}).render(whole)["prompt"]
    found = known_prompt(compile_value({"prompt": source}), SCOPE, ("done",))
    assert found is not None
    assert rendered.startswith(found["messages"][0]["content"])
