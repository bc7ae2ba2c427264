"""Order in a directed graph of named nodes."""

from __future__ import annotations

from collections.abc import Mapping, Set


def topological_order(dependencies: Mapping[str, Set[str]]) -> list[str]:
    """Every node after what it depends on; ties in the mapping's order. Nodes on or behind a cycle
    are left out, so the order is shorter than the mapping exactly if there is a cycle."""
    children: dict[str, list[str]] = {node: [] for node in dependencies}
    num_missing: dict[str, int] = {}
    for node, parents in dependencies.items():
        num_missing[node] = len(parents)
        for parent in parents:
            children[parent].append(node)
    order = [node for node, missing in num_missing.items() if missing == 0]
    for node in order:
        for child in children[node]:
            num_missing[child] -= 1
            if num_missing[child] == 0:
                order.append(child)
    return order


def find_cycle(dependencies: Mapping[str, Set[str]]) -> list[str] | None:
    """One cycle, as the nodes along it, the first repeated at the end; None if there is none."""
    order = set(topological_order(dependencies))
    left = {node: parents - order for node, parents in dependencies.items() if node not in order}
    if not left:
        return None
    # Every node that is left has a parent that is left: walking up must come back somewhere.
    seen: dict[str, int] = {}
    path: list[str] = []
    node = next(iter(left))
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = min(left[node])
    cycle = path[seen[node] :]
    return [*reversed(cycle), cycle[-1]]
