"""What tenants own must not reach others: which nodes may not be shared among all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from workflows.operators.base import FeedingBack, Nesting, ReadingOwn

if TYPE_CHECKING:
    from workflows.checked import CheckedNode
    from workflows.complaints import Path


def wrongly_public(
    nodes: Iterable[CheckedNode], indexes: Mapping[str, int]
) -> list[tuple[Path, str]]:
    """Nodes with the scope `public` that read, or follow on what reads, data of the tenant.

    nodes: in topological order. indexes: where each stands in the document. Returns the path of
    each scope, and the id of the node that reads.
    """
    found: list[tuple[Path, str]] = []
    _trace(nodes, indexes, (), "", found)
    return found


def _trace(
    nodes: Iterable[CheckedNode],
    indexes: Mapping[str, int],
    path: Path,
    reader: str,
    found: list[tuple[Path, str]],
) -> str:
    """A reader among these nodes, or around them; empty if there is none."""
    readers: dict[str, str] = {}
    for node in nodes:
        name, operator = node.spec.id, node.operator
        at = (*path, "nodes", indexes[name])
        before = [readers[one] for one in sorted(node.dependencies) if readers.get(one)]
        mine = reader or next(iter(before), "")
        if isinstance(operator, ReadingOwn):
            mine = mine or name
        if mine and node.spec.share.scope == "public":
            found.append(((*at, "share", "scope"), mine))
        if node.nested is not None:
            assert isinstance(operator, Nesting)
            inner = node.nested
            places = {one["id"]: index for index, one in enumerate(inner.spec.nodes)}
            within = (*at, "params", operator.nested_param)
            if isinstance(operator, FeedingBack):
                # What a later node has read comes to the earlier ones in the next round.
                mine = mine or _trace(inner.nodes.values(), places, within, "", [])
            mine = _trace(inner.nodes.values(), places, within, mine, found)
        readers[name] = mine
    return reader or next(filter(None, readers.values()), "")
