"""What the scheduler knows of a workflow before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.workflows.fakes import Echo, EchoParams, echo
from workflows.checked import check_workflow
from workflows.operators.base import JsonType, Operator
from workflows.planning import part_ids, planned_nodes
from workflows.scheduling.messages import PlannedNode, Size
from workflows.slots import Slots


class Found(Echo):
    """Takes slots of two resources, one after the other."""

    name = "found"
    resources = ("embed", "search")


class Said(Echo):
    """As large as its text is long."""

    name = "said"
    params = EchoParams
    resources = ("llm",)
    outputs: Mapping[str, JsonType] = {"text": "string"}

    def expected_size(self, params: Any, expected_outputs: float) -> Size:
        return Size(expected_outputs, len(params["text"]))


OPERATORS: dict[str, Operator] = {one.name: one for one in (Echo(), Found(), Said())}


def planned(*nodes: dict[str, Any], prefix: str = "") -> dict[str, PlannedNode]:
    workflow = check_workflow({"nodes": list(nodes)}, OPERATORS)
    found = planned_nodes(workflow, prefix, Slots())
    ids = [part for node in workflow.nodes.values() for part in part_ids(node, prefix)]
    assert [one.id for one in found] == ids
    return {one.id: one for one in found}


def test_a_node_of_two_resources_is_a_chain() -> None:
    nodes = planned(
        echo("text"),
        {"id": "find", "op": "found", "params": {"text": "{{ nodes.text.output.text }}"}},
        {"id": "say", "op": "said", "params": {"text": "four {{ nodes.find.output.text }}"}},
    )
    assert {name: one.children for name, one in nodes.items()} == {
        "text": ("find/embed",),
        "find/embed": ("find/search",),
        "find/search": ("say/llm",),
        "say/llm": (),
    }
    assert {name: one.resource for name, one in nodes.items()} == {
        "text": None,
        "find/embed": "embed",
        "find/search": "search",
        "say/llm": "llm",
    }
    assert nodes["say/llm"].size.outputs > 1
    assert nodes["say/llm"].size.inputs == len("four {{ nodes.find.output.text }}")


def test_what_is_inside_a_run_has_names_of_its_own() -> None:
    nodes = planned(
        {"id": "a", "op": "said", "params": {"text": ""}}, echo("b", depends_on=["a"]), prefix="x/"
    )
    assert {name: one.children for name, one in nodes.items()} == {
        "x/a/llm": ("x/b",),
        "x/b": (),
    }
