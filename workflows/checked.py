"""From a document to a workflow that can run, or to everything that is wrong with it.

Nothing runs here. What only the values of a run can show (a list where its items are too long, say)
fails the node instead; what the document alone shows is found here, all of it at once: fields and
their types, ids, references to nodes, inputs and output fields that do not exist, references whose
type is not what the parameter takes, and cycles.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from workflows.complaints import Path, complaints, nearest, shown_path
from workflows.errors import InvalidWorkflow, Problem, TemplateError
from workflows.graph import find_cycle, topological_order
from workflows.input_schema import MAX_MESSAGE_CHARS, MAX_PROBLEMS, schema_problem
from workflows.operators.base import JsonType, Nesting, Operator
from workflows.own_data import wrongly_public
from workflows.spec import MAX_NODES, Node, Workflow
from workflows.templates import Reference, Template, code_chars, compile_condition
from workflows.values import TemplatedValue, compile_value

MAX_DEPTH = 4
MAX_CODE_CHARS = 131_072
MAX_EDGES = 100_000
# Hints at what was meant are given for so many problems only: each looks through all names.
_MAX_HINTS = 10

# A custom check of a value with a template in it may complain of what is not known yet.
_JUDGES_A_WHOLE = ("value_error", "assertion_error")
_NODE_FIELDS = ("output", "status", "error")
# Operators that not every server has.
_HOW_TO_GET = {"python": "; start the server with --workflow-functions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedNode:
    """A node that can run.

    dependencies: ids, declared and referred to. nested: the workflow in its parameters.
    """

    spec: Node
    operator: Operator
    params: TemplatedValue
    when: Template | None
    dependencies: frozenset[str]
    nested: CheckedWorkflow | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedWorkflow:
    """A workflow that can run. nodes: in topological order. outputs: rendered at the end."""

    spec: Workflow
    nodes: Mapping[str, CheckedNode]
    outputs: TemplatedValue


def check_workflow(document: Any, operators: Mapping[str, Operator]) -> CheckedWorkflow:
    """Raises InvalidWorkflow with every problem that is found (at most MAX_PROBLEMS)."""
    return _Checker(operators, _Whole()).check(document)


@dataclass(slots=True)
class _Whole:
    """What a document and those inside it have together, since a check must not cost more."""

    num_nodes: int = 0
    num_edges: int = 0
    code_chars: int = 0


class _Checker:
    """One document's check; collects problems. depth: how many documents are around it."""

    def __init__(self, operators: Mapping[str, Operator], whole: _Whole, *, depth: int = 0) -> None:
        self._operators = operators
        self._whole = whole
        self._depth = depth
        self._problems: list[Problem] = []
        self._ids: dict[str, Node | None] = {}
        self._indexes: dict[str, int] = {}
        self._dependencies: dict[str, frozenset[str]] = {}
        self._input_names: set[str] | None = None

    def check(self, document: Any) -> CheckedWorkflow:
        workflow = self._parse(Workflow, document, ()) or self._sound_part(document)
        if workflow is None:
            raise InvalidWorkflow(self._problems)
        self._check_size(workflow, document)
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
        by_id = {one.spec.id: one for one in checked if one is not None}
        ordered = {
            name: by_id[name] for name in topological_order(self._dependencies) if name in by_id
        }
        self._check_public(ordered)
        if self._problems:
            raise InvalidWorkflow(self._problems[:MAX_PROBLEMS])
        return CheckedWorkflow(spec=workflow, nodes=ordered, outputs=outputs)

    def _sound_part(self, document: Any) -> Workflow | None:
        """The document without the fields that are wrong, so that the others are checked too."""
        if not isinstance(document, dict):
            return None
        wrong = {problem.path.partition(".")[0] for problem in self._problems}
        sound = {name: value for name, value in document.items() if name not in wrong}
        try:
            return Workflow.model_validate(sound)
        except ValidationError:
            return None

    def _check_size(self, workflow: Workflow, document: Any) -> None:
        """Raises InvalidWorkflow at once where the rest would take long to check."""
        self._whole.num_nodes += len(workflow.nodes)
        if self._whole.num_nodes > MAX_NODES:
            self._report(("nodes",), "too_long", f"all together there may be {MAX_NODES} nodes")
            raise InvalidWorkflow(self._problems)
        listed = [raw.get("depends_on") for raw in workflow.nodes if isinstance(raw, dict)]
        self._whole.num_edges += sum(len(one) for one in listed if isinstance(one, list))
        if self._whole.num_edges > MAX_EDGES:
            message = f"all depends_on together may name {MAX_EDGES:,} nodes"
            self._report(("nodes",), "too_long", message)
            raise InvalidWorkflow(self._problems)
        if self._depth:
            return
        self._whole.code_chars = sum(map(code_chars, _texts(document)))
        if self._whole.code_chars > MAX_CODE_CHARS:
            message = f"all templates may have {MAX_CODE_CHARS:,} characters in braces together"
            self._report(("nodes",), "too_long", message)
            raise InvalidWorkflow(self._problems)

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
        if len(self._problems) >= MAX_PROBLEMS:
            return
        self._problems.append(
            Problem(path=shown_path(path), code=code, message=message[:MAX_MESSAGE_CHARS])
        )

    def _hint(self, name: str, known: Iterable[str]) -> str:
        return nearest(name, known) if len(self._problems) < _MAX_HINTS else ""

    def _parse(self, kind: type[Any], raw: Any, path: Path) -> Any:
        """An instance of a pydantic model, or None and problems."""
        try:
            return kind.model_validate(raw)
        except ValidationError as error:
            for one in complaints(_errors(error), raw, kind):
                self._report((*path, *one.path), one.code, one.message)
            return None

    def _check_schema(self, workflow: Workflow) -> None:
        schema = workflow.input_schema
        if schema is None:
            return
        problem = schema_problem(schema)
        if problem is not None:
            path, message = problem
            self._report(("input_schema", *path), "invalid_schema", message)
            return
        properties = schema.get("properties")
        if isinstance(properties, dict) and schema.get("additionalProperties") is False:
            self._input_names = set(properties)

    def _check_node(self, node: Node, path: Path) -> CheckedNode | None:
        num_before = len(self._problems)
        operator = self._operators.get(node.op)
        if operator is None:
            hint = _HOW_TO_GET.get(node.op) or self._hint(node.op, self._operators)
            self._report((*path, "op"), "unknown_operator", f"there is no {node.op!r}{hint}")
        params_path = (*path, "params")
        params = compile_value(
            node.params,
            lambda at, message: self._report((*params_path, *at), "invalid_template", message),
            literal=operator.nested_param if isinstance(operator, Nesting) else None,
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
        nested = self._check_nested(operator, node, params_path)
        if len(self._problems) > num_before:
            return None
        return CheckedNode(
            spec=node,
            operator=operator,
            params=params,
            when=when,
            dependencies=frozenset(dependencies),
            nested=nested,
        )

    def _check_nested(self, operator: Operator, node: Node, path: Path) -> CheckedWorkflow | None:
        if not isinstance(operator, Nesting) or operator.nested_param not in node.params:
            return None
        path = (*path, operator.nested_param)
        if self._depth + 1 >= MAX_DEPTH:
            self._report(path, "too_deep", f"workflows nest {MAX_DEPTH} deep at most")
            return None
        inner = _Checker(self._operators, self._whole, depth=self._depth + 1)
        try:
            return inner.check(node.params[operator.nested_param])
        except InvalidWorkflow as error:
            self._problems += [
                replace(one, path=".".join(filter(None, (shown_path(path), one.path))))
                for one in error.problems
            ]
            return None

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
                    hint = self._hint(name, self._input_names)
                    self._report(path, "unknown_input", f"there is no input {name!r}{hint}")
            elif self._check_id(reference.path[0], path):
                found.add(reference.path[0])
                self._check_field(reference, path)
        return found

    def _check_id(self, name: str, path: Path) -> bool:
        if name in self._ids:
            return True
        hint = self._hint(name, self._ids)
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
            message = f"the output of {node_id!r} has no {rest[1]!r}{self._hint(rest[1], fields)}"
            self._report(path, "unknown_field", message)

    def _output_fields(self, node_id: str) -> Mapping[str, JsonType] | None:
        node = self._ids.get(node_id)
        operator = None if node is None else self._operators.get(node.op)
        return None if operator is None else operator.outputs

    def _check_params(self, operator: Operator, params: TemplatedValue, path: Path) -> None:
        """What is wrong with the parameters whatever the templates will give."""
        samples: dict[int, tuple[Path, Template, Any]] = {}

        def sample(at: Path, template: Template) -> Any:
            value = _sample(self._kind(template))
            samples[id(value)] = (at, template, value)
            return value

        filled = params.replaced(sample)
        try:
            operator.params.model_validate(filled)
            return
        except ValidationError as error:
            errors = _errors(error)
        certain = []
        for one in errors:
            known = samples.get(id(one["input"]))
            if known is None or one["type"] == "extra_forbidden":
                if one["type"] not in _JUDGES_A_WHOLE or not _holds(one["input"], samples):
                    certain.append(one)
                continue
            at, template, _ = known
            kind = self._kind(template)
            if kind != "any" and one["type"].endswith("_type"):
                message = f"{template.source} is a {kind}; {one['msg']}"
                self._report((*path, *at), "type_mismatch", message)
        for complaint in complaints(certain, filled, operator.params):
            self._report((*path, *complaint.path), complaint.code, complaint.message)

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

    def _check_public(self, nodes: Mapping[str, CheckedNode]) -> None:
        if self._depth:
            return
        for path, reader in wrongly_public(nodes.values(), self._indexes):
            message = (
                f"{reader!r} reads what belongs to the tenant: no other tenant may have what is "
                "made of it; use 'tenant'"
            )
            self._report(path, "invalid_value", message)

    def _check_cycles(self) -> None:
        cycle = find_cycle(self._dependencies)
        if cycle is not None:
            path = ("nodes", self._indexes[cycle[0]])
            self._report(path, "cycle", f"waits for itself: {' → '.join(cycle)}")


def _texts(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys not."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _errors(error: ValidationError) -> list[ErrorDetails]:
    return error.errors(include_url=False, include_context=False)


class _Unknown:
    """Stands for a value of a type that only a run can tell."""


def _sample(kind: JsonType) -> Any:
    """A value of a type, that is no other one (by identity)."""
    match kind:
        case "string":
            return "".join(("a", " text"))
        case "number":
            return float("1.5")
        case "integer":
            return int("1000003")
        case "object":
            return {}
        case "array":
            return []
    return _Unknown()


def _holds(value: Any, samples: Container[int]) -> bool:
    if id(value) in samples:
        return True
    if isinstance(value, dict):
        return any(_holds(item, samples) for item in value.values())
    return isinstance(value, list) and any(_holds(item, samples) for item in value)
