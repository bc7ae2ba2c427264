"""A workflow as the scheduler sees it before it runs.

A node of an operator with several resources is a chain of parts, one for each: `search` embeds its
query and then asks the collection (the paper's fine split of modules). Sizes are expected ones:
templates hide what there really is until a node is ready.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from workflows.checked import CheckedNode, CheckedWorkflow
from workflows.job import NodeKey
from workflows.scheduling.messages import PlannedNode, Size
from workflows.slots import Slots


@runtime_checkable
class Sized(Protocol):
    """An operator that can say how large a node's work will probably be."""

    def expected_size(self, params: Any, expected_outputs: float) -> Size:
        """params: as they stand in the document. expected_outputs: of one of whose size nothing is
        known."""
        ...


def resources_of(node: CheckedNode) -> tuple[str, ...]:
    """The resources that a node takes slots of, in order. Text and nesting operators take none."""
    return getattr(node.operator, "resources", ())


def planned_nodes(workflow: CheckedWorkflow, prefix: str, slots: Slots) -> tuple[PlannedNode, ...]:
    """Every part of every node. prefix: of the ids, for a workflow inside another one."""
    children: dict[str, list[str]] = {name: [] for name in workflow.nodes}
    for node in workflow.nodes.values():
        for parent in node.dependencies:
            children[parent].append(part_ids(node, prefix)[0])
    return tuple(
        part
        for name, node in workflow.nodes.items()
        for part in _planned(prefix, node, tuple(children[name]), slots)
    )


def part_ids(node: CheckedNode, prefix: str) -> tuple[str, ...]:
    """The ids of a node's parts, in order."""
    key = NodeKey("", prefix + node.spec.id)
    return tuple(map(key.stage, resources_of(node))) or (key.node_id,)


def _planned(
    prefix: str, node: CheckedNode, children: tuple[str, ...], slots: Slots
) -> Iterator[PlannedNode]:
    parts, resources = part_ids(node, prefix), resources_of(node)
    if not resources:
        yield PlannedNode(id=parts[0], profile=node.operator.name, children=children)
    for place, resource in enumerate(resources):
        is_last = place == len(resources) - 1
        profile = slots.usual_profile(resource)
        size = Size()
        if is_last and isinstance(node.operator, Sized):
            expected = slots.profiler.expected_outputs(profile)
            size = node.operator.expected_size(node.spec.params, expected)
        yield PlannedNode(
            id=parts[place],
            profile=profile,
            size=size,
            children=children if is_last else (parts[place + 1],),
            resource=resource,
        )
