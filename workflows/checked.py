"""From a document to a workflow that can run, or to everything that is wrong with it.

Nothing runs here. What only the values of a run can show (a list where its items are too long, say)
fails the node instead; what the document alone shows is found here, all of it at once: fields and
their types, ids, references to nodes, inputs and output fields that do not exist, references whose
type is not what the parameter takes, and cycles.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema_rs
from pydantic import BaseModel, ValidationError

from workflows.errors import InvalidWorkflow, Problem, TemplateError
from workflows.graph import find_cycle, topological_order
from workflows.operators.base import JsonType, Operator
from workflows.spec import Node, Workflow
from workflows.templates import Reference, Template, compile_condition
from workflows.values import Path, TemplatedValue, compile_value, shown_path

MAX_PROBLEMS = 100

_SAMPLES: dict[str, Any] = {
    "string": "x",
    "number": 1.0,
    "integer": 1,
    "boolean": True,
    "object": {},
    "array": [],
}
_NODE_FIELDS = ("output", "status", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedNode:
    """A node that can run. dependencies: ids, declared and referred to."""

    spec: Node
    operator: Operator
    params: TemplatedValue
    when: Template | None
    dependencies: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedWorkflow:
    """A workflow that can run. nodes: in topological order. outputs: rendered at the end."""

    spec: Workflow
    nodes: Mapping[str, CheckedNode]
    outputs: TemplatedValue


def check_workflow(document: Any, operators: Mapping[str, Operator]) -> CheckedWorkflow:
    """Raises InvalidWorkflow with every problem that is found (at most MAX_PROBLEMS)."""
    return _Checker(operators).check(document)


def check_inputs(workflow: Workflow, inputs: Mapping[str, Any]) -> None:
    """Raises InvalidWorkflow for inputs that are not what `input_schema` says."""
    if workflow.input_schema is None:
        return
    problems = [
        Problem(
            path=shown_path(("inputs", *error.instance_path)),
            code="invalid_input",
            message=error.message[:500],
        )
        for error in _schema_validator(workflow.input_schema).iter_errors(dict(inputs))
    ]
    if problems:
        raise InvalidWorkflow(problems[:MAX_PROBLEMS])


class _Checker:
    """One document's check; collects problems."""

    def __init__(self, operators: Mapping[str, Operator]) -> None:
        self._operators = operators
        self._problems: list[Problem] = []
        self._ids: dict[str, Node | None] = {}
        self._indexes: dict[str, int] = {}
        self._dependencies: dict[str, frozenset[str]] = {}
        self._input_names: set[str] | None = None

    def check(self, document: Any) -> CheckedWorkflow:
        workflow = self._parse(Workflow, document, ())
        if workflow is None:
            raise InvalidWorkflow(self._problems)
        self._check_schema(workflow)
        nodes = [
            (index, self._parse(Node, raw, ("nodes", index)))
            for index, raw in enumerate(workflow.nodes)
        ]
        for index, node in nodes:
            self._note_id(index, node, workflow.nodes[index])
        checked = [
            self._check_node(node, ("nodes", index)) for index, node in nodes if node is not None
        ]
        outputs = self._check_outputs(workflow)
        self._check_cycles()
        if self._problems:
            raise InvalidWorkflow(self._problems[:MAX_PROBLEMS])
        by_id = {one.spec.id: one for one in checked if one is not None}
        return CheckedWorkflow(
            spec=workflow,
            nodes={name: by_id[name] for name in topological_order(self._dependencies)},
            outputs=outputs,
        )

    def _note_id(self, index: int, node: Node | None, raw: Any) -> None:
        """Ids of nodes that are wrong elsewhere count too, so that references to them are fine."""
        name = node.id if node is not None else raw.get("id") if isinstance(raw, dict) else None
        if not isinstance(name, str):
            return
        if name in self._ids:
            self._report(("nodes", index, "id"), "duplicate_id", f"{name!r} is taken")
            return
        self._ids[name] = node
        self._indexes[name] = index
        self._dependencies[name] = frozenset()

    def _report(self, path: Path, code: str, message: str) -> None:
        self._problems.append(Problem(path=shown_path(path), code=code, message=message))

    def _parse(self, kind: type[Any], raw: Any, path: Path) -> Any:
        """An instance of a pydantic model, or None and problems."""
        try:
            return kind.model_validate(raw)
        except ValidationError as error:
            for one in error.errors(include_url=False, include_context=False):
                self._report((*path, *_location(one["loc"])), one["type"], _message(one, kind))
            return None

    def _check_schema(self, workflow: Workflow) -> None:
        schema = workflow.input_schema
        if schema is None:
            return
        try:
            _schema_validator(schema)
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
            path = ("input_schema", *getattr(error, "instance_path", ()))
            self._report(path, "invalid_schema", getattr(error, "message", str(error))[:500])
            return
        properties = schema.get("properties")
        if isinstance(properties, dict) and schema.get("additionalProperties") is False:
            self._input_names = set(properties)

    def _check_node(self, node: Node, path: Path) -> CheckedNode | None:
        num_before = len(self._problems)
        operator = self._operators.get(node.op)
        if operator is None:
            hint = _nearest(node.op, self._operators)
            self._report((*path, "op"), "unknown_operator", f"there is no {node.op!r}{hint}")
        params_path = (*path, "params")
        params = compile_value(
            node.params,
            lambda at, message: self._report((*params_path, *at), "invalid_template", message),
        )
        dependencies: set[str] = set()
        for at, template in params.templates.items():
            dependencies |= self._check_references(template, (*params_path, *at))
        when = self._check_condition(node, (*path, "when"))
        if when is not None:
            dependencies |= self._check_references(when, (*path, "when"))
        for index, name in enumerate(node.depends_on):
            if self._check_id(name, (*path, "depends_on", index)):
                dependencies.add(name)
        if (node.on_error == "default") != (node.default is not None):
            self._report(
                (*path, "default"), "invalid_value", "goes together with on_error: default"
            )
        self._dependencies[node.id] |= dependencies
        if operator is None:
            return None
        self._check_params(operator, params, params_path)
        if len(self._problems) > num_before:
            return None
        return CheckedNode(
            spec=node,
            operator=operator,
            params=params,
            when=when,
            dependencies=frozenset(dependencies),
        )

    def _check_condition(self, node: Node, path: Path) -> Template | None:
        if node.when is None:
            return None
        try:
            return compile_condition(node.when)
        except TemplateError as error:
            self._report(path, "invalid_template", error.message)
            return None

    def _check_references(self, template: Template, path: Path) -> set[str]:
        """The nodes that a template refers to; reports those that do not exist."""
        found = set()
        for reference in sorted(template.references, key=lambda one: one.path):
            if not reference.path:
                self._report(
                    path,
                    "invalid_reference",
                    f"name what of '{reference.root}' is meant: {reference.root}.NAME",
                )
            elif reference.root == "inputs":
                name = reference.path[0]
                if self._input_names is not None and name not in self._input_names:
                    hint = _nearest(name, self._input_names)
                    self._report(path, "unknown_input", f"there is no input {name!r}{hint}")
            elif self._check_id(reference.path[0], path):
                found.add(reference.path[0])
                self._check_field(reference, path)
        return found

    def _check_id(self, name: str, path: Path) -> bool:
        if name in self._ids:
            return True
        hint = _nearest(name, self._ids)
        self._report(path, "unknown_node", f"there is no node {name!r}{hint}")
        return False

    def _check_field(self, reference: Reference, path: Path) -> None:
        node_id, *rest = reference.path
        if not rest:
            return
        if rest[0] not in _NODE_FIELDS:
            hint = f"a node has {', '.join(_NODE_FIELDS)}"
            self._report(path, "unknown_field", f"nodes.{node_id} has no {rest[0]!r}; {hint}")
            return
        fields = self._output_fields(node_id)
        if rest[0] == "output" and len(rest) > 1 and fields is not None and rest[1] not in fields:
            message = f"the output of {node_id!r} has no {rest[1]!r}{_nearest(rest[1], fields)}"
            self._report(path, "unknown_field", message)

    def _output_fields(self, node_id: str) -> Mapping[str, JsonType] | None:
        node = self._ids.get(node_id)
        operator = None if node is None else self._operators.get(node.op)
        return None if operator is None else operator.outputs

    def _check_params(self, operator: Operator, params: TemplatedValue, path: Path) -> None:
        """What is wrong with the parameters whatever the templates will give."""
        unknown = object()
        kinds = {at: self._kind(template) for at, template in params.templates.items()}

        def sample(at: Path, template: Template) -> Any:
            return _SAMPLES.get(kinds[at], unknown)

        try:
            operator.params.model_validate(params.replaced(sample))
        except ValidationError as error:
            for one in error.errors(include_url=False, include_context=False):
                location = _location(one["loc"])
                template_at = next((at for at in kinds if location[: len(at)] == at), None)
                if template_at is not None:
                    kind = kinds[template_at]
                    if kind == "any" or not one["type"].endswith("_type"):
                        continue
                    message = f"{params.templates[template_at].source} is a {kind}; {one['msg']}"
                    self._report((*path, *template_at), "type_mismatch", message)
                elif not _contains_template(location, kinds):
                    self._report((*path, *location), one["type"], _message(one, operator.params))

    def _kind(self, template: Template) -> JsonType:
        """The JSON type of what a template gives, as far as it can be known."""
        if not template.is_expression:
            return "string"
        if not template.is_reference:
            return "any"
        (reference,) = template.references
        if reference.root != "nodes" or len(reference.path) != 3 or reference.path[1] != "output":
            return "any"
        fields = self._output_fields(reference.path[0])
        return "any" if fields is None else fields.get(reference.path[2], "any")

    def _check_outputs(self, workflow: Workflow) -> TemplatedValue:
        outputs = workflow.outputs
        if outputs is None:
            inner = frozenset[str]().union(*self._dependencies.values())
            outputs = [name for name in self._ids if name not in inner]
        elif isinstance(outputs, str):
            outputs = [outputs]
        if isinstance(outputs, list):
            for index, name in enumerate(outputs):
                self._check_id(name, ("outputs", index))
            outputs = {
                name: "{{ nodes." + name + ".output }}" for name in outputs if name in self._ids
            }
        compiled = compile_value(
            outputs,
            lambda at, message: self._report(("outputs", *at), "invalid_template", message),
        )
        for at, template in compiled.templates.items():
            self._check_references(template, ("outputs", *at))
        return compiled

    def _check_cycles(self) -> None:
        cycle = find_cycle(self._dependencies)
        if cycle is not None:
            path = ("nodes", self._indexes[cycle[0]])
            self._report(path, "cycle", f"waits for itself: {' → '.join(cycle)}")


def _schema_validator(schema: dict[str, Any]) -> jsonschema_rs.Draft202012Validator:
    """Of a schema from outside: it fetches nothing, and its patterns take linear time."""
    return jsonschema_rs.Draft202012Validator(
        schema, pattern_options=jsonschema_rs.RegexOptions(), retriever=_no_retrieval
    )


def _no_retrieval(uri: str) -> Any:
    raise ValueError(f"$ref to {uri[:200]} is not followed; write the schema in place")


def _location(loc: Sequence[str | int]) -> Path:
    return tuple(loc)


def _contains_template(location: Path, templates: Iterable[Path]) -> bool:
    """Whether the value at `location` has a template inside, so that it is not known yet."""
    return bool(location) and any(at[: len(location)] == location for at in templates)


def _message(error: Any, kind: type[BaseModel]) -> str:
    if error["type"] == "model_type":
        return "must be an object"
    if error["type"] == "extra_forbidden":
        name = str(error["loc"][-1])
        return f"unknown field{_nearest(name, kind.model_fields)}"
    return str(error["msg"])


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
