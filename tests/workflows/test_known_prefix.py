from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflows.known_prefix import MIN_CHARS, Known, known_prompt
from workflows.values import compile_value

LONG = "Rules. " * (MIN_CHARS // 7 + 1)
SCOPE = {
    "inputs": {"q": "why", "n": 5},
    "nodes": {"done": {"output": {"text": "D"}, "status": "completed", "error": None}},
}


def known(params: dict[str, Any], *ended: str, **said: str) -> dict[str, Any] | None:
    return known_prompt(compile_value(params), Known(scope=SCOPE, ended=ended, said=said))


def prompt(text: str, *ended: str, **said: str) -> str:
    """What is known of a prompt behind a long beginning."""
    found = known({"prompt": LONG + text}, *ended, **said)
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a {{ nodes.draft.output.text }} b", "a So far"),
        ("a {{ nodes['draft']['output'].text }}", "a So far"),
        ("a\n {{- nodes.draft.output.text -}} b", "aSo far"),
        ("{{ nodes.done.output.text }}{{ nodes.draft.output.text }}", "DSo far"),
        ("{{ nodes.draft.output.text }}{{ nodes.other.output.text }}", "So far"),
        ("{{ nodes.find.output.text }}{{ nodes.draft.output.text }}", ""),
        ("a {{ nodes.draft.output.text | trim }}", "a "),
        ("a {{ nodes.draft.output.text ~ '!' }}", "a "),
        ("a {{ nodes.draft.output }}", "a "),
        ("a {{ nodes.draft.output.message.text }}", "a "),
        ("a {% if inputs.q %}{{ nodes.draft.output.text }}{% endif %}", "a "),
    ],
)
def test_a_text_goes_on_with_what_a_node_has_said(text: str, expected: str) -> None:
    assert prompt(text, "done", draft="So far", other="So good") == expected


@pytest.mark.parametrize("space", ["", "  "])
def test_a_prompt_that_is_a_text_begins_as_it_does(space: str) -> None:
    """Without white space around it, which is not in its value."""
    found = known({"prompt": f"{space}{{{{ nodes.draft.output.text }}}}{space}"}, draft=LONG)
    assert found == {"messages": [{"role": "user", "content": LONG}]}


def test_a_message_goes_on_with_what_a_node_has_said() -> None:
    messages = [
        {"role": "system", "content": LONG},
        {"role": "assistant", "content": "{{ nodes.draft.output.text }}"},
        {"role": "user", "content": "Shorter, please."},
    ]
    found = known({"messages": messages}, draft="So far")
    assert found == {"messages": [messages[0], {"role": "assistant", "content": "So far"}]}


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
        {"messages": [{"role": "user", "content": "{{ inputs.n }}"}]},
        {},
    ],
)
def test_where_little_is_known_there_is_nothing(params: dict[str, Any]) -> None:
    assert known(params) is None


PIECE = st.sampled_from(
    [
        *("a ", "\n", "  ", "{{ inputs.q }}", "{{ inputs.n }}", "{{- inputs.q -}}"),
        *("{{ nodes.b.output }}", "{{ nodes.done.output.text }}", "{# no #}"),
        *("{% if inputs.n %}yes {% endif %}", "{{ nodes.w.output.text }}"),
        *("{{- nodes.w.output.text -}}", "{{ nodes.v.output['text'] }}"),
        *("{{ nodes.w.output.text | upper }}", "{{ nodes.w.output.text[1:] }}"),
    ]
)
SAID = st.text("a {\n", max_size=6)


@given(pieces=st.lists(PIECE, max_size=8), long=st.sampled_from([LONG, ""]), data=st.data())
def test_it_is_how_the_whole_begins(pieces: list[str], long: str, data: st.DataObject) -> None:
    """Whatever the rest turns out to be, of the prompt and of the texts of nodes that write."""
    said = {name: data.draw(SAID, label=name) for name in ("v", "w")}
    texts = {name: text + data.draw(SAID, label="rest") for name, text in said.items()}
    outputs: dict[str, Any] = {name: {"output": {"text": text}} for name, text in texts.items()}
    whole = {**SCOPE, "nodes": {**SCOPE["nodes"], **outputs, "b": {"output": "B"}}}
    contents = {"system": LONG, "user": long + "".join(pieces)}
    messages = [{"role": role, "content": text} for role, text in contents.items()]
    params = compile_value({"messages": messages})
    rendered = params.render(whole)["messages"]
    found = known_prompt(params, Known(scope=SCOPE, ended=("done",), said=said))
    assert found is not None
    for message, one in zip(rendered, found["messages"], strict=False):
        assert str(message["content"]).startswith(one["content"])
