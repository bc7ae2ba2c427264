"""One run of a workflow, as a pure state machine: what has happened in, what to do next out.

States of a node:

    pending ──► running ──► completed
       │           │ └────► waiting (for its next try) ──► running
       │           ├──────► failed
       │           └──────► cancelled
       ├──► skipped
       └──► cancelled

A node starts as soon as all that it depends on has ended; there are no levels. It is skipped where
its `when` is false, where `on_error: skip` takes its failure, and where everything that it depends
on was skipped. The output of a skipped node is null.

A run ends when all of its nodes have ended: `completed`; `failed` with the first node whose failure
nothing takes, which stops all others; `cancelled` on request; `incomplete` when its deadline is
over.

A run that was interrupted is restored from what had happened in it (`workflows.run_progress`), and
`resume` goes on: what has ended stays as it is, what was at work begins again as the same try.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from workflows.checked import CheckedNode, CheckedWorkflow
from workflows.errors import NodeFailed, TemplateError
from workflows.json_values import check_json
from workflows.known_prefix import MIN_CHARS, Known, known_prompt, prompt_chars
from workflows.operators.base import Foreseeing, NodeResult
from workflows.run_progress import (
    ENDED,
    Failure,
    NodeProgress,
    NodeStatus,
    RunProgress,
    RunStatus,
    total_usage,
)
from workflows.templates import RenderBudget

MAX_RESTARTS = 10
# A prompt is foreseen again when it has grown by this share, and by MIN_CHARS. The share, since all
# of it is encoded anew each time; MIN_CHARS, some hundred tokens, are read in a decode step's time.
_GROWTH = 1 / 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StartNode:
    """Run a node's work after `delay_s`. params: rendered, not yet checked by the operator.

    is_restart: this try had begun before, and was interrupted: nobody knows how far it came.
    """

    node: CheckedNode
    params: Any
    attempt: int
    delay_s: float = 0.0
    is_restart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StopNode:
    """Stop a node's work, or the wait for it. Nothing needs to be reported.

    In a run that is resumed the work may not have begun anew.
    """

    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """Something that those who watch the run learn. type: `node.completed`, `run.failed`, …"""

    type: str
    node_id: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeseeNode:
    """A node waits for others, and so much of its parameters is known already (see
    `workflows.known_prefix`). Nothing needs to be done about it, nor reported."""

    node: CheckedNode
    params: dict[str, Any]


Command = StartNode | StopNode | Happened | ForeseeNode


@dataclass(slots=True, kw_only=True)
class NodeState(NodeProgress):
    """One node of one run. params: rendered, while it runs. said: how its `output.text` begins, as
    far as its work has said so; num_new_chars: of that, since its children were last looked at."""

    node: CheckedNode
    num_missing: int
    children: list[str] = field(default_factory=list)
    params: Any = None
    said: list[str] = field(default_factory=list)
    num_new_chars: int = 0


class RunState:
    """Holds one run. Every method returns the commands that follow, in order.

    rng: for the jitter of retries. rendering: the budget of the run around it, if there is one.
    """

    def __init__(
        self,
        workflow: CheckedWorkflow,
        inputs: Mapping[str, Any],
        *,
        now_s: float,
        rng: random.Random | None = None,
        rendering: RenderBudget | None = None,
    ) -> None:
        self.workflow = workflow
        self.inputs = inputs
        self.status: RunStatus = "queued"
        self.failure: Failure | None = None
        self.outputs: dict[str, Any] | None = None
        self.created_s = now_s
        self.finished_s: float | None = None
        self._rng = rng or random.Random()
        self.rendering = rendering or RenderBudget(now_s)
        self.nodes = {
            name: NodeState(node=node, num_missing=len(node.dependencies))
            for name, node in workflow.nodes.items()
        }
        self._num_open = len(self.nodes)
        # Of nodes that wait: how much of their prompts was foreseen, in characters.
        self._foreseen = {
            name: 0
            for name, node in workflow.nodes.items()
            if node.dependencies and isinstance(node.operator, Foreseeing)
        }
        # What templates see: each node's output, status and error.
        self._views: dict[str, dict[str, Any]] = {}
        for name, node in workflow.nodes.items():
            for parent in node.dependencies:
                self.nodes[parent].children.append(name)

    @classmethod
    def restored(
        cls,
        workflow: CheckedWorkflow,
        inputs: Mapping[str, Any],
        past: RunProgress,
        *,
        now_s: float,
        rng: random.Random | None = None,
        rendering: RenderBudget | None = None,
    ) -> RunState:
        """The run as it was; `resume` goes on with it. past: of the clock that `now_s` is of."""
        run = cls(
            workflow,
            inputs,
            now_s=past.created_s,
            rng=rng,
            rendering=rendering or RenderBudget(now_s),
        )
        run.status, run.failure, run.outputs = past.status, past.failure, past.outputs
        run.finished_s = past.finished_s
        for name, progress in past.nodes.items():
            state = run.nodes[name]
            state.take_over(progress)
            if state.status in ENDED:
                run._close(state)
        return run

    @property
    def has_ended(self) -> bool:
        return self.finished_s is not None

    @property
    def usage(self) -> dict[str, int]:
        """The sum over all nodes, by name."""
        return total_usage(self.nodes.values())

    @property
    def output_bytes(self) -> int:
        """Of the outputs of all nodes, as JSON."""
        return sum(len(orjson.dumps(one.output)) for one in self.nodes.values() if one.output)

    def start(self, *, now_s: float) -> list[Command]:
        """Begin: every node without dependencies is ready."""
        assert self.status == "queued"
        self.status = "in_progress"
        commands: list[Command] = [Happened(type="run.created")]
        ready = [name for name, state in self.nodes.items() if not state.num_missing]
        return commands + self._advance(ready, now_s)

    def resume(self, *, now_s: float) -> list[Command]:
        """Go on with a restored run: begin anew what was at work, and what is ready now."""
        if self.status == "queued":
            return self.start(now_s=now_s)
        for name, state in self.nodes.items():
            if state.status == "failed" and state.failure is not None:
                whole = replace(state.failure, node_id=name)
                return self._end_run("failed", whole, now_s)
        commands: list[Command] = []
        released: list[str] = []
        for state in self.nodes.values():
            if state.status in ("running", "waiting") and not self.has_ended:
                commands += self._begin_again(state, now_s)
                released += self._released(state)
        ready = [
            name
            for name, state in self.nodes.items()
            if state.status == "pending" and not state.num_missing and name not in released
        ]
        return commands + self._advance(ready + released, now_s)

    def work_started(self, node_id: str, *, now_s: float) -> list[Command]:
        """The work of a node begins, the first time or again."""
        state = self.nodes[node_id]
        if state.status not in ("running", "waiting"):
            return []
        state.status, state.has_begun, state.next_try_s = "running", True, None
        if state.started_s is None:
            state.started_s = now_s
        return [Happened(type="node.started", node_id=node_id, data={"attempt": state.attempt})]

    def work_completed(
        self,
        node_id: str,
        result: NodeResult,
        *,
        now_s: float,
        shared: str = "none",
        shared_reason: str = "",
    ) -> list[Command]:
        """The work of a node is done. shared, shared_reason: whose work it was, and why."""
        state = self.nodes[node_id]
        if state.status != "running":
            return []
        state.output, state.usage = result.output, result.usage
        state.shared, state.shared_reason = shared, shared_reason
        commands = self._end_node(state, "completed", now_s)
        return commands + self._advance(self._released(state), now_s)

    def work_failed(self, node_id: str, error: NodeFailed, *, now_s: float) -> list[Command]:
        """The work of a node failed: another try, or the end of the node."""
        state = self.nodes[node_id]
        if state.status != "running":
            return []
        retry = state.node.spec.retry
        if error.is_retryable and state.attempt < retry.max_attempts:
            return self._try_again(state, error, now_s)
        commands = self._give_up(state, Failure(code=error.code, message=error.message), now_s)
        return commands + self._advance(self._released(state), now_s)

    def cancel(self, *, now_s: float) -> list[Command]:
        """Stop everything. Does nothing if the run has ended."""
        return self._end_run("cancelled", None, now_s)

    def expire(self, *, now_s: float) -> list[Command]:
        """The deadline has passed."""
        limit_s = self.workflow.spec.deadline_s
        failure = Failure(code="deadline_exceeded", message=f"not done within {limit_s:g} s")
        return self._end_run("incomplete", failure, now_s)

    def check_invariants(self) -> None:
        """Raises AssertionError if the state cannot be. For tests and simulation."""
        open_nodes = [state for state in self.nodes.values() if state.status not in ENDED]
        assert self._num_open == len(open_nodes)
        for state in self.nodes.values():
            missing = [
                parent
                for parent in state.node.dependencies
                if self.nodes[parent].status not in ENDED
            ]
            assert state.num_missing == len(missing)
            assert state.status in ("pending", "cancelled") or not missing
            assert (state.finished_s is not None) == (state.status in ENDED)
        if self.has_ended:
            assert not open_nodes
            assert self.status not in ("queued", "in_progress")
        elif self.status == "in_progress":
            assert any(state.status in ("running", "waiting") for state in open_nodes)

    def _advance(self, ready: list[str], now_s: float) -> list[Command]:
        """Go on with nodes whose dependencies have ended, and with those that they release."""
        commands: list[Command] = []
        for name in ready:
            if self.has_ended:
                return commands
            state = self.nodes[name]
            commands += self._make_ready(state, now_s)
            if state.status in ENDED:
                ready += self._released(state)
        if not self._num_open and not self.has_ended:
            commands += self._complete(now_s)
        return commands

    def foresee(self, *, now_s: float) -> list[ForeseeNode]:
        """What has become known of the prompts of nodes that wait, since the last time."""
        return self._foresee(self._foreseen, now_s)

    def is_heard(self, node_id: str) -> bool:
        """Whether some node may begin with the text of this one before it has ended."""
        return any(child in self._foreseen for child in self.nodes[node_id].children)

    def work_said(self, node_id: str, text: str, *, now_s: float) -> list[ForeseeNode]:
        """The `output.text` that a node's work will have goes on with `text`."""
        state = self.nodes[node_id]
        if state.status != "running":
            return []
        state.said.append(text)
        state.num_new_chars += len(text)
        if state.num_new_chars < MIN_CHARS:
            return []
        state.num_new_chars = 0
        return self._foresee(state.children, now_s)

    def _foresee(self, names: Iterable[str], now_s: float) -> list[ForeseeNode]:
        found: list[ForeseeNode] = []
        if self.has_ended:
            return found
        budget = self.rendering.ahead.refill(now_s)
        for name in names:
            if name not in self._foreseen or self.nodes[name].status != "pending":
                continue
            node = self.nodes[name].node
            known = Known(
                scope={"inputs": self.inputs, "nodes": self._views},
                ended=self._views,
                said={one: "".join(self.nodes[one].said) for one in node.dependencies},
                budget=budget,
            )
            if node.when is not None and not known.has(node.when):
                continue
            try:
                params = known_prompt(node.params, known)
            except TemplateError:
                continue  # it will fail by itself
            num_chars = 0 if params is None else prompt_chars(params)
            if params is not None and num_chars >= _next_chars(self._foreseen[name]):
                self._foreseen[name] = num_chars
                found.append(ForeseeNode(node=node, params=params))
        return found

    def _unsay(self, state: NodeState) -> None:
        """What a node's work has said is void: its children may begin otherwise."""
        if state.said:
            self._foreseen.update((child, 0) for child in state.children if child in self._foreseen)
        state.said, state.num_new_chars = [], 0

    def _make_ready(self, state: NodeState, now_s: float) -> list[Command]:
        """A node whose dependencies have ended: start it, skip it, or see it fail at once."""
        node = state.node
        parents = [self.nodes[parent] for parent in node.dependencies]
        if parents and all(parent.status == "skipped" for parent in parents):
            return self._end_node(state, "skipped", now_s)
        scope = {"inputs": self.inputs, "nodes": self._views}
        budget = self.rendering.refill(now_s)
        try:
            if node.when is not None and not node.when.render(scope, budget):
                return self._end_node(state, "skipped", now_s)
            params = node.params.render(scope, budget)
        except TemplateError as error:
            failure = Failure(code="template_error", message=error.message)
            return self._give_up(state, failure, now_s)
        state.status, state.attempt, state.params = "running", 1, params
        state.has_begun = False
        return [
            Happened(type="node.ready", node_id=node.spec.id),
            StartNode(node=node, params=params, attempt=1),
        ]

    def _try_again(self, state: NodeState, error: NodeFailed, now_s: float) -> list[Command]:
        retry, node = state.node.spec.retry, state.node
        wait_s = min(retry.backoff_s * 2 ** (state.attempt - 1), retry.max_backoff_s)
        wait_s *= 1 - retry.jitter * self._rng.random()
        self._unsay(state)
        state.attempt += 1
        state.status, state.has_begun, state.next_try_s = "waiting", False, now_s + wait_s
        data = {"attempt": state.attempt, "delay_s": wait_s, "error": _error(error)}
        return [
            Happened(type="node.retrying", node_id=node.spec.id, data=data),
            StartNode(
                node=node,
                params=state.params,
                attempt=state.attempt,
                delay_s=wait_s,
            ),
        ]

    def _begin_again(self, state: NodeState, now_s: float) -> list[Command]:
        """The try that was under way, or waited for, when the run was interrupted."""
        node, node_id = state.node, state.node.spec.id
        scope = {"inputs": self.inputs, "nodes": self._views}
        try:
            state.params = node.params.render(scope, self.rendering.refill(now_s))
        except TemplateError as error:
            return self._give_up(
                state, Failure(code="template_error", message=error.message), now_s
            )
        start = StartNode(
            node=node,
            params=state.params,
            attempt=state.attempt,
            delay_s=max(0.0, (state.next_try_s or now_s) - now_s),
            is_restart=state.has_begun,
        )
        if not state.has_begun:
            return [start]
        if state.num_restarts >= MAX_RESTARTS:
            message = f"was interrupted {MAX_RESTARTS + 1} times"
            return self._give_up(state, Failure(code="interrupted", message=message), now_s)
        state.num_restarts, state.has_begun = state.num_restarts + 1, False
        data = {"attempt": state.attempt}
        return [Happened(type="node.restarted", node_id=node_id, data=data), start]

    def _give_up(self, state: NodeState, failure: Failure, now_s: float) -> list[Command]:
        """A node's last failure, and what `on_error` makes of it."""
        state.failure = failure
        self._unsay(state)
        spec = state.node.spec
        if spec.on_error == "skip":
            return self._end_node(state, "skipped", now_s)
        if spec.on_error == "default":
            state.output = dict(spec.default or {})
            return self._end_node(state, "completed", now_s)
        commands = self._end_node(state, "failed", now_s)
        whole = Failure(code=failure.code, message=failure.message, node_id=spec.id)
        return commands + self._end_run("failed", whole, now_s)

    def _end_node(self, state: NodeState, status: NodeStatus, now_s: float) -> list[Command]:
        state.status, state.finished_s, state.params = status, now_s, None
        state.next_try_s, state.said = None, []
        self._close(state)
        failure = None if state.failure is None else _error(state.failure)
        data: dict[str, Any] = {} if failure is None else {"error": failure}
        if status == "completed":
            data["output"] = state.output
            data["usage"] = state.usage
            data["shared"] = state.shared
            data["reason"] = state.shared_reason
        return [Happened(type=f"node.{status}", node_id=state.node.spec.id, data=data)]

    def _close(self, state: NodeState) -> None:
        """A node that has ended: its children wait for one less, and templates see it."""
        self._num_open -= 1
        for child in state.children:
            self.nodes[child].num_missing -= 1
        failure = None if state.failure is None else _error(state.failure)
        view = {"output": state.output, "status": state.status, "error": failure}
        self._views[state.node.spec.id] = view

    def _released(self, state: NodeState) -> list[str]:
        """The children that waited for this node alone."""
        if state.status not in ENDED:
            return []
        return [
            child
            for child in state.children
            if not self.nodes[child].num_missing and self.nodes[child].status == "pending"
        ]

    def _complete(self, now_s: float) -> list[Command]:
        scope = {"inputs": self.inputs, "nodes": self._views}
        try:
            outputs = self.workflow.outputs.render(scope, self.rendering.refill(now_s))
            check_json(outputs)
        except (TemplateError, ValueError) as error:
            failure = Failure(code="template_error", message=f"outputs: {error}")
            return self._end_run("failed", failure, now_s)
        self.outputs = outputs
        return self._end_run("completed", None, now_s)

    def _end_run(self, status: RunStatus, failure: Failure | None, now_s: float) -> list[Command]:
        if self.has_ended:
            return []
        self.status, self.failure, self.finished_s = status, failure, now_s
        commands: list[Command] = []
        for name, state in self.nodes.items():
            if state.status in ENDED:
                continue
            if state.status in ("running", "waiting"):
                commands.append(StopNode(node_id=name))
            commands += self._end_node(state, "cancelled", now_s)
        data: dict[str, Any] = {} if failure is None else {"error": _error(failure)}
        if status == "completed":
            data["outputs"] = self.outputs
        return [*commands, Happened(type=f"run.{status}", data=data)]


def _next_chars(num_chars: int) -> int:
    """How long a prompt is when it is foreseen again."""
    return num_chars + max(MIN_CHARS, int(_GROWTH * num_chars))


def _error(failure: Failure | NodeFailed) -> dict[str, Any]:
    error = {"code": failure.code, "message": failure.message}
    node_id = getattr(failure, "node_id", None)
    return error if node_id is None else {**error, "node_id": node_id}
