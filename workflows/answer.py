"""A run's outputs as one text, for those who want an answer and no more: a chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from workflows.checked import CheckedWorkflow
from workflows.templates import Template

_NAMES = ("answer", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Which output is the answer: `answer`, else `text`, else the only one; else all of them.

    output: its name; None for all. node_id: the node whose text it is, untouched; None if it is
    made of more.
    """

    output: str | None
    node_id: str | None

    def text(self, outputs: Mapping[str, Any]) -> str:
        """The answer in the outputs of a run that is completed."""
        value: Any = outputs if self.output is None else outputs.get(self.output)
        if isinstance(value, dict) and isinstance(value.get("text"), str):
            value = value["text"]
        if isinstance(value, str):
            return value
        return "" if value is None else orjson.dumps(value).decode()


def answer_of(workflow: CheckedWorkflow) -> Answer:
    """The answer of a workflow's runs."""
    outputs = workflow.outputs.raw
    names = list(outputs) if isinstance(outputs, dict) else []
    name = next((one for one in _NAMES if one in names), None)
    if name is None and len(names) == 1:
        name = names[0]
    if name is None:
        return Answer(output=None, node_id=None)
    return Answer(output=name, node_id=_node_of(workflow.outputs.templates.get((name,))))


def _node_of(template: Template | None) -> str | None:
    """X of `{{ nodes.X.output.text }}` and `{{ nodes.X.output }}`."""
    if template is None or not template.is_reference:
        return None
    (reference,) = template.references
    if reference.root != "nodes" or reference.path[1:] not in (("output",), ("output", "text")):
        return None
    return reference.path[0]
