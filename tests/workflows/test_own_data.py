from collections.abc import Iterable
from typing import Any, Final

import pytest

from tests.workflows.fakes import Echo, echo, operators
from workflows.checked import check_workflow
from workflows.errors import InvalidWorkflow

PUBLIC = {"share": {"scope": "public"}}


class Lookup(Echo):
    """Reads what belongs to the tenant."""

    name = "lookup"
    reads_own: Final = True


def lookup(node_id: str, **fields: Any) -> dict[str, Any]:
    return {"id": node_id, "op": "lookup", "params": {"text": "x"}, **fields}


def nesting(node_id: str, *inside: dict[str, Any], **inputs: str) -> dict[str, Any]:
    params = {"workflow": {"nodes": list(inside)}, "inputs": inputs}
    return {"id": node_id, "op": "workflow", "params": params}


def looping(node_id: str, *inside: dict[str, Any]) -> dict[str, Any]:
    params = {"workflow": {"nodes": list(inside)}}
    return {"id": node_id, "op": "loop", "params": params}


def problems(nodes: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """Path and code of all that is wrong."""
    known = {**operators(), "lookup": Lookup()}
    try:
        check_workflow({"nodes": list(nodes)}, known)
    except InvalidWorkflow as error:
        return [(one.path, one.code) for one in error.problems]
    return []


def test_what_reads_own_data_is_not_public_nor_what_follows_on_it() -> None:
    nodes = [
        echo("d", "{{ nodes.c.output.text }}", **PUBLIC),
        lookup("a", **PUBLIC),
        echo("b", **PUBLIC),
        echo("c", "{{ nodes.a.output.text }} {{ nodes.b.output.text }}"),
    ]
    found = [("nodes.1.share.scope", "invalid_value"), ("nodes.0.share.scope", "invalid_value")]
    assert problems(nodes) == found


def test_all_else_is_told_with_it() -> None:
    nodes = [lookup("a", **PUBLIC), {"id": "b", "op": "nothing"}]
    assert sorted(problems(nodes)) == [
        ("nodes.0.share.scope", "invalid_value"),
        ("nodes.1.op", "unknown_operator"),
    ]


@pytest.mark.parametrize(
    ("nodes", "path"),
    [
        # Into a workflow inside, and in it.
        (
            [lookup("a"), nesting("b", echo("c", **PUBLIC), text="{{ nodes.a.output.text }}")],
            "nodes.1.params.workflow.nodes.0.share.scope",
        ),
        (
            [nesting("b", nesting("c", lookup("d"), echo("e", depends_on=["d"], **PUBLIC)))],
            "nodes.0.params.workflow.nodes.0.params.workflow.nodes.1.share.scope",
        ),
        # What is read in one round of a loop is there in the next.
        (
            [looping("b", echo("c", "{{ inputs.previous }}", **PUBLIC), lookup("d"))],
            "nodes.0.params.workflow.nodes.0.share.scope",
        ),
        (
            [looping("b", echo("c", **PUBLIC), nesting("e", lookup("d")))],
            "nodes.0.params.workflow.nodes.0.share.scope",
        ),
        # And out of it.
        ([nesting("b", lookup("c")), echo("d", depends_on=["b"], **PUBLIC)], "nodes.1.share.scope"),
    ],
)
def test_workflows_inside_hide_nothing(nodes: list[dict[str, Any]], path: str) -> None:
    assert problems(nodes) == [(path, "invalid_value")]


def test_own_data_beside_public_work_does_not_matter() -> None:
    inside = nesting("b", echo("c", **PUBLIC), text="x")
    last = echo("e", "{{ nodes.d.output.text }} {{ nodes.a.output.text }}")
    assert problems([lookup("a"), inside, echo("d", depends_on=["b"], **PUBLIC), last]) == []
