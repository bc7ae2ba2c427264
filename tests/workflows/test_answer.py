from __future__ import annotations

from typing import Any

import pytest

from tests.workflows.fakes import checked, echo
from workflows.answer import Answer, answer_of

TWO = [echo("a"), echo("b")]


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ("b", Answer(output="b", node_id="b")),
        (["a", "b"], Answer(output=None, node_id=None)),
        ({"x": "{{ nodes.a.output.text }}"}, Answer(output="x", node_id="a")),
        ({"x": 1, "text": "{{ nodes.a.output.text }}"}, Answer(output="text", node_id="a")),
        (
            {"text": 1, "answer": "{{ nodes.b.output.text }}"},
            Answer(output="answer", node_id="b"),
        ),
        ({"answer": "So: {{ nodes.b.output.text }}"}, Answer(output="answer", node_id=None)),
        ({"answer": "{{ nodes.b.output.text | upper }}"}, Answer(output="answer", node_id=None)),
        ({"answer": "{{ nodes.b.output.number }}"}, Answer(output="answer", node_id=None)),
        ({"answer": "{{ inputs.q }}"}, Answer(output="answer", node_id=None)),
    ],
)
def test_the_answer_is_the_output_that_is_called_so_or_the_only_one(
    outputs: Any, expected: Answer
) -> None:
    assert answer_of(checked(*TWO, outputs=outputs)) == expected


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({"x": "hi", "y": 1}, "hi"),
        ({"x": {"text": "hi", "more": 1}}, "hi"),
        ({"x": {"value": [1]}}, '{"value":[1]}'),
        ({"x": None}, ""),
        ({}, ""),
    ],
)
def test_an_answer_is_a_text(outputs: dict[str, Any], text: str) -> None:
    assert Answer(output="x", node_id=None).text(outputs) == text


def test_without_an_answer_all_outputs_are_it() -> None:
    assert Answer(output=None, node_id=None).text({"a": 1, "b": "x"}) == '{"a":1,"b":"x"}'
