"""Workflows written in Python: the same document as JSON, checked by the same rules.

    flow = WorkflowBuilder("summary")
    text = flow.input("text")
    facts = flow.node("llm", prompt=f"List the facts in: {text}", temperature=0)
    title = flow.node("llm", id="title", prompt=f"A title for: {facts['text']}")
    flow.output(title=title["text"], facts=facts["text"])
    body = {**flow.document(), "inputs": {"text": "…"}}    # for POST /v1/workflows

Inputs and nodes are references: in a parameter they stand for their value with its type, in an
f-string for its text. A node that is referred to is a dependency.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workflows.checked import CheckedWorkflow, check_workflow
from workflows.operators.base import Operator


class Ref:
    """A value that a run will have: an input, or a part of a node's output.

    `ref["field"]` and `ref[0]` are parts of it.
    """

    def __init__(self, expression: str) -> None:
        self.expression = expression

    def __getitem__(self, key: str | int) -> Ref:
        return Ref(f"{self.expression}[{key!r}]")

    def __str__(self) -> str:
        return "{{ " + self.expression + " }}"

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(f"the value of {self.expression} is not known yet: no format {spec!r}")
        return str(self)

    def __iter__(self) -> Any:
        raise TypeError(f"the value of {self.expression} is not known yet; see the operator map")

    def __bool__(self) -> bool:
        raise TypeError(f"the value of {self.expression} is not known yet; see `when` of a node")


class NodeRef(Ref):
    """A node's output. id: of the node. status: of the node, as a reference."""

    def __init__(self, node_id: str) -> None:
        super().__init__(f"nodes.{node_id}.output")
        self.id = node_id
        self.status = Ref(f"nodes.{node_id}.status")


class WorkflowBuilder:
    """Collects inputs, nodes and outputs; `document` is the workflow."""

    def __init__(
        self, name: str | None = None, *, description: str | None = None, **fields: Any
    ) -> None:
        """fields: others of the document, such as `deadline_s`."""
        self._head = {"name": name, "description": description, **fields}
        self._properties: dict[str, Any] = {}
        self._required: list[str] = []
        self._nodes: list[dict[str, Any]] = []
        self._outputs: dict[str, Any] = {}

    def input(
        self, name: str, schema: Mapping[str, Any] | None = None, *, required: bool = True
    ) -> Ref:
        """Declares an input. schema: its JSON Schema, a string if none is given."""
        self._properties[name] = dict(schema or {"type": "string"})
        if required:
            self._required.append(name)
        return Ref(f"inputs.{name}")

    def node(
        self,
        op: str,
        *,
        id: str | None = None,
        after: tuple[NodeRef, ...] = (),
        when: Ref | str | None = None,
        settings: Mapping[str, Any] | None = None,
        **params: Any,
    ) -> NodeRef:
        """Adds a node. id: by default its operator and a number. after: nodes that must end first,
        without being referred to. settings: the node's other fields (`retry`, `cache`, …)."""
        node_id = id or f"{op}_{len(self._nodes) + 1}"
        node: dict[str, Any] = {"id": node_id, "op": op, "params": _as_json(params)}
        if after:
            node["depends_on"] = [one.id for one in after]
        if when is not None:
            node["when"] = str(when)
        self._nodes.append({**node, **_as_json(dict(settings or {}))})
        return NodeRef(node_id)

    def output(self, **values: Any) -> None:
        """Names outputs of the run. Without any, those of the last nodes are."""
        self._outputs.update(_as_json(values))

    def document(self) -> dict[str, Any]:
        """The workflow as JSON."""
        document = {name: value for name, value in self._head.items() if value is not None}
        if self._properties:
            document["input_schema"] = {
                "type": "object",
                "properties": dict(self._properties),
                "required": list(self._required),
                "additionalProperties": False,
            }
        document["nodes"] = list(self._nodes)
        if self._outputs:
            document["outputs"] = dict(self._outputs)
        return document

    def check(self, operators: Mapping[str, Operator]) -> CheckedWorkflow:
        """Raises InvalidWorkflow with everything that is wrong."""
        return check_workflow(self.document(), operators)


def _as_json(value: Any) -> Any:
    """The value with references as templates and inner workflows as documents."""
    if isinstance(value, Ref):
        return str(value)
    if isinstance(value, WorkflowBuilder):
        return value.document()
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return value
