"""How far a run has come, as what has happened in it tells.

The events of a run are its journal: whatever must outlive the process stands in one of them, so
that those of any moment give the run as it was then. `workflows.run_state` decides, and goes on
from here; a run that has ended is shown from here, without its workflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from workflows.run_events import RunEvent

NodeStatus = Literal["pending", "running", "waiting", "completed", "failed", "skipped", "cancelled"]
RunStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled", "incomplete"]

ENDED = frozenset({"completed", "failed", "skipped", "cancelled"})
RUN_ENDS = frozenset({"run.completed", "run.failed", "run.cancelled", "run.incomplete"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a node or a run failed. node_id: of the node that failed, in a run's failure."""

    code: str
    message: str
    node_id: str | None = None


@dataclass(slots=True, kw_only=True)
class NodeProgress:
    """How far one node has come. Times are of the clock of the events, in seconds.

    shared: whose work its result is: its own (`none`), or another node's (`inflight`, `cache`).
    has_begun: whether the work of its last try has. next_try_s: when it does, while it waits for
    that. num_restarts: how often its work was interrupted.
    """

    status: NodeStatus = "pending"
    attempt: int = 0
    output: dict[str, Any] | None = None
    failure: Failure | None = None
    usage: dict[str, int] = field(default_factory=dict)
    shared: str = "none"
    shared_reason: str = ""
    started_s: float | None = None
    finished_s: float | None = None
    has_begun: bool = False
    next_try_s: float | None = None
    num_restarts: int = 0

    def take_over(self, other: NodeProgress) -> None:
        """Become what `other` is."""
        for one in fields(NodeProgress):
            setattr(self, one.name, getattr(other, one.name))


@dataclass(slots=True, kw_only=True)
class RunProgress:
    """How far a run has come. created_s: before its first event."""

    created_s: float
    nodes: dict[str, NodeProgress]
    status: RunStatus = "queued"
    failure: Failure | None = None
    outputs: dict[str, Any] | None = None
    finished_s: float | None = None

    @property
    def usage(self) -> dict[str, int]:
        return total_usage(self.nodes.values())


def total_usage(nodes: Iterable[NodeProgress]) -> dict[str, int]:
    """The sum over nodes, by name."""
    total: dict[str, int] = {}
    for node in nodes:
        for name, count in node.usage.items():
            total[name] = total.get(name, 0) + count
    return total


def replayed(
    node_ids: Iterable[str],
    events: Sequence[RunEvent],
    *,
    created_s: float,
    is_nested: bool = False,
) -> RunProgress:
    """The progress that a run's first events tell of.

    is_nested: of a run inside another one's node. Such a run is cancelled where the work of that
    node stops; when it begins again, so does the run inside: that cancellation does not count. Nor
    does one of nodes where the end of their run, which follows it at once, is not among the events.
    """
    run = RunProgress(created_s=created_s, nodes={name: NodeProgress() for name in node_ids})
    ends = RUN_ENDS - {"run.cancelled"} if is_nested else RUN_ENDS
    has_ended = bool(events) and events[-1].type in ends
    for event in events:
        if event.type.endswith(".cancelled") and not has_ended:
            continue
        if event.node_id is None:
            _apply_to_run(run, event)
        else:
            _apply_to_node(run.nodes[event.node_id], event)
    return run


def _apply_to_run(run: RunProgress, event: RunEvent) -> None:
    if event.type == "run.created":
        run.status = "in_progress"
    elif event.type in RUN_ENDS:
        run.status = event.type.removeprefix("run.")  # type: ignore[assignment]
        run.finished_s = event.at_s
        run.failure = _failure(event)
        run.outputs = event.data.get("outputs")


def _apply_to_node(node: NodeProgress, event: RunEvent) -> None:
    data = event.data
    match event.type:
        case "node.ready":
            node.status, node.attempt, node.has_begun = "running", 1, False
        case "node.started":
            node.status, node.has_begun, node.next_try_s = "running", True, None
            if node.started_s is None:
                node.started_s = event.at_s
        case "node.restarted":
            node.num_restarts, node.has_begun = node.num_restarts + 1, False
        case "node.retrying":
            node.status, node.attempt, node.has_begun = "waiting", data["attempt"], False
            node.next_try_s = event.at_s + data["delay_s"]
        case "node.completed" | "node.failed" | "node.skipped" | "node.cancelled":
            node.status = event.type.removeprefix("node.")  # type: ignore[assignment]
            node.finished_s, node.next_try_s = event.at_s, None
            node.failure = _failure(event)
            node.output, node.usage = data.get("output"), data.get("usage", {})
            node.shared = data.get("shared", "none")
            node.shared_reason = data.get("reason", "")


def _failure(event: RunEvent) -> Failure | None:
    error = event.data.get("error")
    if error is None:
        return None
    return Failure(code=error["code"], message=error["message"], node_id=error.get("node_id"))
