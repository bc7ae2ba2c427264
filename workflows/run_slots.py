"""What the scheduler learns of runs: that they begin, grow and end. Nested runs belong to the
outermost one."""

from __future__ import annotations

from itertools import chain

from workflows.checked import CheckedWorkflow
from workflows.job import Job, NodeKey
from workflows.planning import part_ids, planned_nodes, resources_of
from workflows.scheduling.messages import NodeEnded, NodesAdded, NodesRemoved, RunArrived, RunEnded
from workflows.slots import Slots


class RunSlots:
    """One run's place in the scheduler. root_id: of the outermost run; the run's own, if it is."""

    def __init__(
        self,
        slots: Slots,
        workflow: CheckedWorkflow,
        *,
        run_id: str,
        root_id: str,
        tenant: str,
        created_s: float,
    ) -> None:
        self._slots = slots
        self._workflow = workflow
        self._root_id = root_id
        self._is_root = run_id == root_id
        self._prefix = "" if self._is_root else f"{run_id}/"
        self._has_ended = False
        self.jobs: dict[str, Job] = {}
        nodes = planned_nodes(workflow, self._prefix, slots)
        if self._is_root:
            limit_s = workflow.spec.deadline_s
            deadline_s = None if limit_s is None else created_s + limit_s
            slots.tell(
                RunArrived(run_id=root_id, nodes=nodes, tenant=tenant, deadline_s=deadline_s)
            )
        else:
            slots.tell(NodesAdded(run_id=root_id, nodes=nodes))

    def job(self, node_id: str) -> Job:
        """For one try of a node's work."""
        node = self._workflow.nodes[node_id]
        key = NodeKey(self._root_id, self._prefix + node_id)
        job = Job(self._slots, key, resources_of(node), priority=node.spec.priority)
        self.jobs[node_id] = job
        return job

    def node_ended(self, node_id: str) -> None:
        """A node is over, however it ended."""
        for part in part_ids(self._workflow.nodes[node_id], self._prefix):
            self._slots.tell(NodeEnded(run_id=self._root_id, node_id=part))

    def ended(self, *, is_completed: bool) -> None:
        """The run is over, and all of its work has stopped. Does nothing a second time."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._is_root:
            self._slots.tell(RunEnded(run_id=self._root_id, is_completed=is_completed))
        else:
            parts = [part_ids(node, self._prefix) for node in self._workflow.nodes.values()]
            self._slots.tell(NodesRemoved(run_id=self._root_id, node_ids=tuple(chain(*parts))))
