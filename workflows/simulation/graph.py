"""The DAG of a query, as a system cuts it: modules, or fine nodes in one or two pipelines."""

from __future__ import annotations

from dataclasses import dataclass, field

from workflows.scheduling.messages import Size
from workflows.simulation.workload import MEDIAN_OUTPUT, Query

# What is known before a run about lengths that only the run will show: the means by kind, as a
# profiler would have learnt them.
EXPECTED_OUTPUT = {kind: 1.2 * median for kind, median in MEDIAN_OUTPUT.items()}
EXPECTED_REWRITTEN = 22.0


@dataclass(slots=True, kw_only=True)
class SimulatedNode:
    """expected: what the scheduler is told. actual: what it takes. level: for barriers."""

    id: str
    profile: str
    resource: str
    expected: Size
    actual: Size
    signature: str
    num_items: int = 1
    max_split: int = 1
    parents: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    level: int = 0


class GraphBuilder:
    """Nodes by name. num_pipelines: into which splittable stages are cut beforehand.

    max_split: what the scheduler may cut them into at run time.
    """

    def __init__(self, query: Query, *, num_pipelines: int, max_split: int) -> None:
        self._query = query
        self._num_pipelines = num_pipelines
        self._max_split = max_split
        self.nodes: dict[str, SimulatedNode] = {}

    def build(self) -> dict[str, SimulatedNode]:
        """Nodes in topological order."""
        query = self._query
        if query.kind == "web":
            rewrite = self._llm("rewrite", 80, EXPECTED_REWRITTEN, query.num_rewritten, [])
            web = self._node("web", "web", "web", [rewrite])
            self._llm("llm", query.num_prompt, EXPECTED_OUTPUT[query.kind], query.num_output, [web])
            return self.nodes
        question = self._node("embed-query", "embed", "embed", [])
        ingested = self._stage("ingest", "database", self._stage("embed", "embed", [[]]))
        last = [one for group in ingested for one in group]
        found = [self._node("search", "search", "database", [question, *last])]
        if query.kind == "rag-rerank":
            ranked = self._items("rerank", "rerank", 12, [found])
            found = [one for group in ranked for one in group]
        self._llm("llm", query.num_prompt, EXPECTED_OUTPUT[query.kind], query.num_output, found)
        return self.nodes

    def _stage(self, profile: str, resource: str, parents: list[list[str]]) -> list[list[str]]:
        return self._items(profile, resource, self._query.num_chunks, parents)

    def _items(
        self, profile: str, resource: str, num_items: int, parents: list[list[str]]
    ) -> list[list[str]]:
        """A stage over items, in pipelines; each goes on from its own part of the stage before."""
        count = min(self._num_pipelines, num_items)
        names: list[list[str]] = []
        for index in range(count):
            own = num_items // count + (index < num_items % count)
            before = parents[index] if len(parents) == count else [p for g in parents for p in g]
            names.append([self._node(f"{profile}{index}", profile, resource, before, own)])
        return names

    def _llm(
        self, profile: str, num_prompt: int, expected: float, actual: int, parents: list[str]
    ) -> str:
        name = self._node(profile, profile, "llm", parents)
        self.nodes[name].expected = Size(expected, float(num_prompt))
        self.nodes[name].actual = Size(float(actual), float(num_prompt))
        return name

    def _node(
        self, name: str, profile: str, resource: str, parents: list[str], num_items: int = 1
    ) -> str:
        size = Size(float(num_items))
        self.nodes[name] = SimulatedNode(
            id=name,
            profile=profile,
            resource=resource,
            expected=size,
            actual=size,
            signature=f"{self._query.id}/{name}",
            num_items=num_items,
            max_split=self._max_split if num_items > 1 else 1,
            parents=parents,
            level=1 + max((self.nodes[parent].level for parent in parents), default=-1),
        )
        for parent in parents:
            self.nodes[parent].children.append(name)
        return name
