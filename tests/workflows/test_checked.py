import time
from typing import Any

import pytest

from tests.workflows.fakes import checked, echo, operators
from workflows.checked import MAX_CODE_CHARS, MAX_EDGES, check_workflow
from workflows.errors import InvalidWorkflow
from workflows.input_schema import MAX_PROBLEMS
from workflows.spec import MAX_NODES


def problems(*nodes: Any, **fields: Any) -> list[tuple[str, str]]:
    """(path, code) of all that is wrong."""
    with pytest.raises(InvalidWorkflow) as caught:
        check_workflow({"nodes": list(nodes), **fields}, operators())
    return [(one.path, one.code) for one in caught.value.problems]


def test_references_are_dependencies_and_nodes_come_in_order() -> None:
    workflow = checked(
        echo("c", "{{ nodes.b.output.text }}", when="nodes.a.output.number > 0"),
        echo("b", "{{ nodes.a.output.text }} {{ inputs.q }}"),
        echo("a", "{{ inputs.q }}"),
        echo("d", depends_on=["c"]),
    )
    assert list(workflow.nodes) == ["a", "b", "c", "d"]
    assert workflow.nodes["c"].dependencies == {"a", "b"}
    assert workflow.nodes["d"].dependencies == {"c"}


def test_outputs_default_to_the_nodes_that_nothing_depends_on() -> None:
    nodes = [echo("a"), echo("b", "{{ nodes.a.output.text }}"), echo("c")]
    assert set(checked(*nodes).outputs.raw) == {"b", "c"}
    assert set(checked(*nodes, outputs="a").outputs.raw) == {"a"}
    assert checked(*nodes, outputs={"x": "{{ nodes.a.output.text }}"}).outputs.raw.keys() == {"x"}


def test_all_problems_are_told_at_once() -> None:
    found = problems(
        {"id": "a", "op": "ecko"},
        echo("b", "{{ nodes.zz.output.text }}", retri=1),
        {"id": "c", "op": "echo", "params": {"text": 3, "numbr": 1}},
        echo("d", "{{ nodes.c.output.txt }} {{ nodes.e.output.text }}"),
        echo("e", "{{ nodes.d.output.text }}"),
        echo("f", "{{ 1 +"),
        outputs=["g"],
    )
    assert set(found) == {
        ("nodes.0.op", "unknown_operator"),
        ("nodes.1.retri", "extra_forbidden"),
        ("nodes.2.params.text", "string_type"),
        ("nodes.2.params.numbr", "extra_forbidden"),
        ("nodes.3.params.text", "unknown_field"),
        ("nodes.4", "cycle"),
        ("nodes.5.params.text", "invalid_template"),
        ("outputs.0", "unknown_node"),
    }


def test_what_is_wrong_around_the_nodes_hides_nothing_in_them() -> None:
    with pytest.raises(InvalidWorkflow) as caught:
        checked(echo("a", retri=1), deadline_s=-3, nodez=1, outputs=["b"])
    assert {problem.path for problem in caught.value.problems} == {
        "deadline_s",
        "nodez",
        "nodes.0.retri",
        "outputs.0",
    }


def test_a_node_that_is_wrong_elsewhere_can_be_referred_to() -> None:
    assert problems(echo("a", nope=1), echo("b", "{{ nodes.a.output.text }}")) == [
        ("nodes.0.nope", "extra_forbidden")
    ]


@pytest.mark.parametrize(
    ("params", "found"),
    [
        ({"items": "{{ nodes.a.output.text }}"}, [("nodes.1.params.items", "type_mismatch")]),
        ({"number": "{{ nodes.a.output.items }}"}, [("nodes.1.params.number", "type_mismatch")]),
        ({"items": "x {{ nodes.a.output.items }}"}, [("nodes.1.params.items", "type_mismatch")]),
    ],
)
def test_a_reference_of_the_wrong_type_is_found(params: Any, found: list[Any]) -> None:
    assert problems(echo("a"), {"id": "b", "op": "echo", "params": params}) == found


@pytest.mark.parametrize(
    "params",
    [
        {"items": "{{ nodes.a.output.items }}"},
        {"items": "{{ inputs.list }}"},
        {"number": "{{ nodes.a.output.items | length }}"},
        {"items": ["{{ nodes.a.output.text }}", 3]},
    ],
)
def test_what_may_fit_is_let_through(params: Any) -> None:
    checked(echo("a"), {"id": "b", "op": "echo", "params": params})


@pytest.mark.parametrize(
    ("nodes", "fields", "path", "code"),
    [
        ([], {}, "nodes", "too_short"),
        ([echo(f"n{i}") for i in range(MAX_NODES + 1)], {}, "nodes", "too_long"),
        ([3], {}, "nodes.0", "model_type"),
        ([echo("9a")], {}, "nodes.0.id", "string_pattern_mismatch"),
        ([echo("a"), echo("a")], {}, "nodes.1.id", "duplicate_id"),
        ([echo("a", depends_on=["b"])], {}, "nodes.0.depends_on.0", "unknown_node"),
        ([echo("a", "{{ nodes.a.output.text }}")], {}, "nodes.0", "cycle"),
        ([echo("a", "{{ nodes[inputs.q] }}")], {}, "nodes.0.params.text", "invalid_reference"),
        ([echo("a", on_error="default")], {}, "nodes.0.default", "invalid_value"),
        ([echo("a", default={})], {}, "nodes.0.default", "invalid_value"),
        ([echo("a", timeout_s=0)], {}, "nodes.0.timeout_s", "greater_than"),
        (
            [echo("a", retry={"max_attempts": 99})],
            {},
            "nodes.0.retry.max_attempts",
            "less_than_equal",
        ),
        ([echo("a", when="{{ 1 }} x")], {}, "nodes.0.when", "invalid_template"),
        ([echo("a")], {"input_schema": {"type": "objct"}}, "input_schema.type", "invalid_schema"),
        (
            [echo("a")],
            {"input_schema": {"$ref": "http://127.0.0.1/schema"}},
            "input_schema",
            "invalid_schema",
        ),
        (
            [echo("a", "{{ inputs.z }}")],
            {"input_schema": {"properties": {"q": {}}, "additionalProperties": False}},
            "nodes.0.params.text",
            "unknown_input",
        ),
    ],
)
def test_a_bad_document_is_refused(nodes: Any, fields: Any, path: str, code: str) -> None:
    assert (path, code) in problems(*nodes, **fields)


@pytest.mark.parametrize("document", [None, [], "x", {}, {"nodes": {}}, {"nodes": [{}], "x": 1}])
def test_what_is_no_workflow_at_all_is_refused(document: Any) -> None:
    with pytest.raises(InvalidWorkflow):
        check_workflow(document, operators())


def test_documents_inside_count_to_the_whole() -> None:
    many = [echo(f"n{i}") for i in range(MAX_NODES // 2)]
    inner = {"id": "inner", "op": "workflow", "params": {"workflow": {"nodes": many}}}
    other = {**inner, "id": "other"}
    checked(inner)
    assert ("nodes.1.params.workflow.nodes", "too_long") in problems(inner, other)


def test_code_is_bounded_over_all_templates() -> None:
    code = "{{ inputs.q }}" * 500
    nodes = [echo(f"n{i}", code) for i in range(MAX_CODE_CHARS // len(code))]
    checked(*nodes)
    inner = {"id": "x", "op": "workflow", "params": {"workflow": {"nodes": [echo("a", code)]}}}
    assert problems(*nodes, inner) == [("nodes", "too_long")]


def test_dependencies_are_bounded_over_all_nodes() -> None:
    first = [echo(f"a{i}") for i in range(MAX_EDGES // 400)]
    names = [node["id"] for node in first]
    half = [echo(f"b{i}", depends_on=names) for i in range(200)]
    checked(*first, *half)
    inside = [*first, *half]
    inner = {"id": "x", "op": "workflow", "params": {"workflow": {"nodes": inside}}}
    checked(inner, *first)
    more = [echo(f"c{i}", depends_on=names) for i in range(201)]
    path = f"nodes.{len(first) + len(more)}.params.workflow.nodes"
    assert problems(*first, *more, inner) == [(path, "too_long")]


def test_many_unknown_names_do_not_take_long() -> None:
    nodes = [echo(f"n{i}" + "x" * 50, depends_on=[f"m{i}" + "x" * 50]) for i in range(MAX_NODES)]
    begun_s = time.monotonic()
    assert len(problems(*nodes)) == MAX_PROBLEMS
    # Generous: a hint for each would take a minute.
    assert time.monotonic() - begun_s < 10
