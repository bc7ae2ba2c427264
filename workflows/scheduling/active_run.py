"""What a run still needs: Ŝ, from predictions and what its nodes really took; φ of its nodes.

Service is the sum over nodes, not the critical path, and not wall time: two nodes at once count
twice (the paper's A and Ŝ do the same, and call it time).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workflows.scheduling.messages import PlannedNode, Size
from workflows.scheduling.parameters import SchedulerParameters

if TYPE_CHECKING:
    from workflows.scheduling.live_ticket import LiveTicket

Predict = Callable[[str, Size], float]


@dataclass(slots=True, eq=False)
class NodeEstimate:
    """One node of a run. Its successors' part of φ is kept apart from their number and depth.

    expected_s: T̄. done_s: the part of it that no longer remains. credited_s: the part that was
    measured.
    successor_s: Σ T̄ of the successors. successor_shape: ω2·Σd + ω3·count.
    """

    expected_s: float
    is_llm: bool
    done_s: float = 0.0
    credited_s: float = 0.0
    has_ended: bool = False
    is_heavy: bool = False
    successor_s: float = 0.0
    successor_shape: float = 0.0
    depth: int = 0


@dataclass(slots=True, eq=False)
class ActiveRun:
    """One run.

    attained_s: A, measured. done_s: ΣT̄ of the work that was measured. remaining_s: ΣT̄ of the rest.
    counted_s: the Ŝ with which the run stands in the partition's statistics.
    """

    id: str
    tenant: str
    arrived_s: float
    deadline_s: float | None
    nodes: dict[str, NodeEstimate] = field(default_factory=dict)
    tickets: dict[str, LiveTicket] = field(default_factory=dict)
    attained_s: float = 0.0
    done_s: float = 0.0
    remaining_s: float = 0.0
    total_s: float = 0.0
    is_long: bool = False
    counted_s: float = 0.0

    def add(
        self, nodes: Iterable[PlannedNode], predict: Predict, parameters: SchedulerParameters
    ) -> None:
        """Take nodes in, at the beginning or later. O(nodes + edges)."""
        nodes = tuple(nodes)
        for node in nodes:
            expected_s = 0.0 if node.resource is None else predict(node.profile, node.size)
            is_llm = node.resource in parameters.heavy_resources
            self.nodes[node.id] = NodeEstimate(expected_s, is_llm)
            self.remaining_s += expected_s
            self.total_s += expected_s
        _set_depths(self.nodes, nodes)
        for node in nodes:
            self._rate(node, parameters)
        self._mark_heavy(parameters.heavy_quantile)

    def expect(self, node_id: str, expected_s: float) -> None:
        """A node is ready, or is again: its size is known, T̄ by that, and all of it remains."""
        node = self.nodes[node_id]
        if not node.has_ended:
            self.take_back(node_id)
            self.remaining_s += expected_s - node.expected_s
            self.total_s += expected_s - node.expected_s
            node.expected_s = expected_s

    def remove(self, node_ids: Iterable[str]) -> None:
        """Forget nodes, none of which has a ticket; what was not done is not done any more."""
        for node_id in node_ids:
            self.end(node_id, was_measured=False)
            self.total_s -= self.nodes.pop(node_id).expected_s

    def _rate(self, node: PlannedNode, parameters: SchedulerParameters) -> None:
        """The two parts of φ (eq. 5 and 9): with direct successors, as the formula has it."""
        estimate = self.nodes[node.id]
        estimate.successor_s, estimate.successor_shape = 0.0, 0.0
        for child in node.children:
            successor = self.nodes[child]
            estimate.successor_s += successor.expected_s
            estimate.successor_shape += parameters.successor_depth * successor.depth
            estimate.successor_shape += parameters.successor_count

    def _mark_heavy(self, quantile: float) -> None:
        """The paper says compute-intensive; we say: an LLM's, or among the longest of the run."""
        ranked = sorted(node.expected_s for node in self.nodes.values())
        bar_s = ranked[min(len(ranked) - 1, int(quantile * len(ranked)))] if ranked else 0.0
        for node in self.nodes.values():
            node.is_heavy = node.is_llm or (node.expected_s >= bar_s > 0)

    def correction(self, parameters: SchedulerParameters, median_s: float) -> float:
        """F of eq. 4: how much longer than predicted the run's nodes took; 1 without history.

        The paper leaves F open; F(x) = x would rank every new run first, since nothing is done.
        """
        prior_s = parameters.correction_prior * median_s
        ratio = (self.attained_s + prior_s) / (self.done_s + prior_s)
        return min(max(ratio, parameters.min_correction), parameters.max_correction)

    def remaining_service_s(self, parameters: SchedulerParameters, median_s: float) -> float:
        """Ŝ of eq. 4 and 10, seconds of service."""
        return self.correction(parameters, median_s) * max(0.0, self.remaining_s)

    def progress(self, node_id: str, done: float, service_s: float, keep: float) -> None:
        """A part of a node was measured.

        done: the share of its expected work that is done in all. service_s: newly measured.
        keep: the share of T̄ that remains until the node has ended, however long it takes.
        """
        node = self.nodes[node_id]
        self.attained_s += service_s
        self._credit(node, min(done, 1.0) * node.expected_s)
        self._reduce(node, min(done, 1.0 - keep) * node.expected_s)

    def end(self, node_id: str, *, was_measured: bool) -> None:
        """A node is over. A measured one counts in F as if it had been predicted to the end."""
        node = self.nodes[node_id]
        if node.has_ended:
            return
        if was_measured:
            self._credit(node, node.expected_s)
        self._reduce(node, node.expected_s)
        node.has_ended = True

    def take_back(self, node_id: str) -> None:
        """A node's work was for nothing: all of it remains. Does nothing to one that has ended."""
        node = self.nodes[node_id]
        if not node.has_ended:
            self.remaining_s += node.done_s
            node.done_s = node.credited_s = 0.0

    def _credit(self, node: NodeEstimate, credited_s: float) -> None:
        self.done_s += max(0.0, credited_s - node.credited_s)
        node.credited_s = max(node.credited_s, credited_s)

    def _reduce(self, node: NodeEstimate, done_s: float) -> None:
        if node.has_ended or done_s <= node.done_s:
            return
        self.remaining_s -= done_s - node.done_s
        node.done_s = done_s

    def contribution(self, node_id: str, median_s: float, work_weight: float) -> float:
        """φ of one logical node, with work in medians: tokens and characters do not add up."""
        node = self.nodes[node_id]
        return work_weight * node.successor_s / median_s + node.successor_shape


def _set_depths(estimates: dict[str, NodeEstimate], nodes: tuple[PlannedNode, ...]) -> None:
    """d of each node: edges on the longest way to a sink."""
    parents: dict[str, list[str]] = {node.id: [] for node in nodes}
    num_open = {node.id: 0 for node in nodes}
    for node in nodes:
        for child in node.children:
            if child in parents:
                parents[child].append(node.id)
                num_open[node.id] += 1
    ready = [name for name, count in num_open.items() if not count]
    for name in ready:
        for parent in parents[name]:
            estimates[parent].depth = max(estimates[parent].depth, estimates[name].depth + 1)
            num_open[parent] -= 1
            if not num_open[parent]:
                ready.append(parent)
