"""What must hold of runs that have ended, whatever happened to them; for `test_safety`.

The oracle is local: each node's parameters are rendered anew from what its run says of the nodes
before it, and what work of these parameters gives for this tenant, alone, is computed. By
induction over the nodes that is what the run would have been if nobody had shared anything.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import orjson

from tests.workflows.safety_world import (
    BAD,
    TENANTS,
    Execution,
    WorkParams,
    World,
    answer,
    is_write,
    marker,
)
from workflows.checked import CheckedNode
from workflows.run import Run
from workflows.run_progress import ENDED, RUN_ENDS, NodeProgress, replayed, total_usage
from workflows.run_state import NodeState

_EPSILON_S = 1e-6


@dataclass(frozen=True, slots=True)
class Entered:
    """A run that a server worked on. base_s: the wall clock at the start of its event loop."""

    run: Run
    base_s: float

    @property
    def root(self) -> Run:
        return self.run.root or self.run

    @property
    def place(self) -> tuple[str, str]:
        """The same for a run that goes on elsewhere, or again."""
        return self.root.id, self.run.path

    @property
    def began_s(self) -> float:
        return self.base_s + self.run.state.created_s

    @property
    def ended_s(self) -> float:
        """Not yet, where the server was killed before."""
        finished_s = self.run.state.finished_s
        return math.inf if finished_s is None else self.base_s + finished_s

    def key(self, node_id: str) -> str:
        """Of idempotency."""
        return f"{self.root.id}:{self.run.path}{node_id}"


class Ledger:
    """All runs that there were, also those inside others, as they have ended. Its methods raise
    AssertionError.

    entered: in order; the last one of each place counts. What was at work inside a node when a
    server was killed counts only where that node has ended well.
    """

    def __init__(self, world: World, entered: Sequence[Entered]) -> None:
        self._world = world
        latest = {one.place: one for one in entered}
        self.latest = {place: one for place, one in latest.items() if _counts(one, latest)}
        self._entered = entered
        self._by_id = {one.run.id: one.run for one in entered}
        self._users: defaultdict[int, list[Entered]] = defaultdict(list)
        for one in entered:
            for node in one.run.state.nodes.values():
                for key in node.usage:
                    if key.startswith("work "):
                        self._users[int(key[5:])].append(one)

    def check(self) -> None:
        assert not self._world.wrongs
        for one in self.latest.values():
            self._check_run(one)
        self._check_costs()
        self._check_effects()

    # One run -------------------------------------------------------------------------------

    def _check_run(self, one: Entered) -> None:
        state = one.run.state
        assert one.run.ended.is_set()
        assert state.has_ended
        state.check_invariants()
        said = orjson.dumps([[event.data for event in one.run.events.since(0)], state.outputs])
        for tenant in TENANTS:
            assert tenant == one.run.tenant or marker(tenant).encode() not in said
        if one.run.root is None:
            _check_events(one.run)
        _check_end(one.run)
        for name, node in state.nodes.items():
            self._check_node(one, name, node)
            assert node.status == "completed" or not node.usage
        usages = [Counter(node.usage) for node in state.nodes.values()]
        assert Counter(state.usage) == sum(usages, Counter())

    def _check_node(self, one: Entered, name: str, node: NodeState) -> None:
        spec, state = node.node.spec, one.run.state
        parents = [state.nodes[parent] for parent in node.node.dependencies]
        assert node.status == "cancelled" or all(one.status in ENDED for one in parents)
        if node.status == "cancelled":
            assert state.status != "completed"
        elif node.failure is not None:
            outcome = {"fail": "failed", "skip": "skipped", "default": "completed"}[spec.on_error]
            assert node.status == outcome
            assert node.output == (spec.default if spec.on_error == "default" else None)
            self._check_failure(one, node)
        elif node.status == "skipped":
            is_wanted = node.node.when is None or node.node.when.render(_scope(one.run))
            assert not is_wanted or (parents and all(one.status == "skipped" for one in parents))
        else:
            assert node.status == "completed"
            if node.node.nested is None:
                self._check_result(one, name, node)
            else:
                self._check_nested(one, name, node)

    def _check_failure(self, one: Entered, node: NodeState) -> None:
        """Nobody fails by what happened to others, or by a bug."""
        assert node.failure is not None
        code, spec = node.failure.code, node.node.spec
        if node.node.nested is not None:
            assert code not in ("internal_error", "cancelled")
            return
        if code == "deadline_exceeded":
            # Of a run inside, in the moment in which the one around it ends.
            assert one.run.root is not None
            assert one.root.state.status in ("incomplete", "cancelled")
            return
        if code in ("timeout", "busy"):
            assert node.attempt == spec.retry.max_attempts
        if code == "timeout":
            assert spec.timeout_s is not None
        elif code not in ("template_error", "interrupted", "store_unavailable"):
            params = _params(one.run, node.node)
            is_refused = params.is_refused or BAD in params.items
            reasons = {"refused": is_refused, "busy": params.num_failures > 0}
            assert reasons.get(code), code

    def _check_result(self, one: Entered, name: str, node: NodeState) -> None:
        """It is what this work gives, and done by someone whose work this node may have."""
        (number,) = (int(key[5:]) for key in node.usage if key.startswith("work "))
        params, execution = _params(one.run, node.node), self._world.done[number]
        assert execution.content == params.content
        assert execution.context.tenant == one.run.tenant
        is_shared = node.shared in ("inflight", "cache")
        assert node.usage[f"work {number}"] == (not is_shared)
        assert node.usage.get("shared_tokens", 0) == is_shared
        assert node.output == {"text": _expected(node.node.spec.op, params, execution)}
        if execution.context.idempotency_key != one.key(name):
            self._check_sharing(one, node.node, params, execution)
        assert node.finished_s is not None
        self._check_times(one, node, params, execution, node.finished_s + one.base_s)
        if one.run.root is None:
            text = node.output["text"] if params.stream else ""
            assert _said(one.run, name) == text

    def _check_sharing(
        self, one: Entered, node: CheckedNode, params: WorkParams, execution: Execution
    ) -> None:
        """Of a node that has the result of another one's execution."""
        context = execution.context
        other_run = self._by_id[context.run_id]
        other = other_run.state.workflow.nodes[context.node_id]
        mine, its = node.spec.share, other.spec.share
        assert node.spec.op == other.spec.op
        assert mine.scope == its.scope != "none"
        if mine.scope == "workflow":
            documents = [(run.root or run).state.workflow.spec for run in (one.run, other_run)]
            assert documents[0] == documents[1]
        else:
            assert mine.scope == "tenant" or context.run_id == one.run.id
        assert mine.salt == its.salt
        assert not is_write(node)
        assert not is_write(other)
        assert not params.is_sampled or (mine.sampled and its.sampled)

    def _check_times(
        self,
        one: Entered,
        node: NodeState,
        params: WorkParams,
        execution: Execution,
        finished_s: float,
    ) -> None:
        """No result is older than may be, or read before its node began."""
        started_s = one.base_s + _last_start_s(one.run, node.node.spec.id)
        if node.shared == "cache":
            cache, age_s = node.node.spec.cache, finished_s - execution.ended_s
            assert age_s >= -_EPSILON_S
            is_kept = cache is not None and age_s <= cache.ttl_s + _EPSILON_S
            assert is_kept or self._is_held(node, params, execution, finished_s)
            assert not params.is_cut
        else:
            assert abs(execution.ended_s - finished_s) < _EPSILON_S
        if node.node.spec.op == "read":
            assert self._world.version(started_s - _EPSILON_S) <= execution.version
            assert execution.version <= self._world.version(finished_s + _EPSILON_S)

    def _is_held(
        self, node: NodeState, params: WorkParams, execution: Execution, at_s: float
    ) -> bool:
        """Whether a run that used the result was active then, and the work's content says all."""
        if node.node.spec.op == "read" or params.is_sampled:
            return False
        users = {one.root.id for one in self._users[execution.number]}
        return any(
            one.run.root is None
            and one.run.id in users
            and one.began_s <= at_s + _EPSILON_S
            and at_s <= one.ended_s + _EPSILON_S
            for one in self._entered
        )

    def _check_nested(self, one: Entered, name: str, node: NodeState) -> None:
        """It is put together of the runs inside."""
        assert node.output is not None
        prefix = f"{one.run.path}{name}["
        inside = {
            place[1][len(prefix) : -2]: inner.run.state
            for place, inner in self.latest.items()
            if place[0] == one.root.id and place[1].startswith(prefix)
        }
        if node.node.spec.op == "map":
            outputs = [inside[str(index)].outputs for index in range(len(node.output["items"]))]
            assert node.output == {"items": outputs}
        else:
            last = inside[max(inside)]
            assert node.output["outputs"] == last.outputs
        assert all(inner.status == "completed" for inner in inside.values())
        assert node.usage == total_usage(
            node for inner in inside.values() for node in inner.nodes.values()
        )

    # All together --------------------------------------------------------------------------

    def _check_costs(self) -> None:
        """What somebody has, exactly one has paid; and nobody else's tenant has it."""
        paid: Counter[str] = Counter()
        tenants: dict[str, str] = {}
        for one in self.latest.values():
            for node in one.run.state.nodes.values():
                if node.node.nested is None:
                    costs = {key: num for key, num in node.usage.items() if " " in key}
                    paid.update(costs)
                    for key in costs:
                        assert tenants.setdefault(key, one.run.tenant) == one.run.tenant, key
        for one in self._entered:
            if one.place not in self.latest:
                # Nobody came back to it, but what it had done may be on record.
                for node in one.run.state.nodes.values():
                    for key in paid.keys() & node.usage.keys():
                        paid[key] = max(paid[key], node.usage[key])
        assert set(paid.values()) <= {1}, paid

    def _check_effects(self) -> None:
        """Each has the key of its own node, as often as that has begun."""
        begun: dict[str, int] = {}
        for one in self._entered:
            kinds = Counter((event.type, event.node_id) for event in one.run.events.since(0))
            for name, node in one.run.state.nodes.items():
                if node.node.spec.op == "write":
                    num_starts = kinds["node.started", name]
                    begun[one.key(name)] = max(begun.get(one.key(name), 0), num_starts)
                    if node.status == "completed" and node.failure is None:
                        assert self._world.effects[one.key(name)] >= 1
        for key, num_times in self._world.effects.items():
            assert num_times <= begun[key], key


def _counts(one: Entered, latest: Mapping[tuple[str, str], Entered]) -> bool:
    root = latest[one.root.id, ""]
    if one.run.root is None or one.base_s == root.base_s:
        return True
    node = root.run.state.nodes[one.run.path.partition("[")[0]]
    return node.status == "completed" and node.failure is None


def _check_events(run: Run) -> None:
    """Whole, with one end, and enough to know the run by."""
    events = run.events.since(0)
    assert [event.sequence_number for event in events] == list(range(1, len(events) + 1))
    assert [event.type for event in events if event.type in RUN_ENDS] == [events[-1].type]
    ends = Counter(
        event.node_id
        for event in events
        if event.node_id is not None and event.type.removeprefix("node.") in ENDED
    )
    assert ends == dict.fromkeys(run.state.nodes, 1)
    progress = replayed(run.state.nodes, events, created_s=run.state.created_s)
    for name, node in run.state.nodes.items():
        for one in fields(NodeProgress):
            known = getattr(progress.nodes[name], one.name)
            assert getattr(node, one.name) == known, (name, one.name)
    assert (progress.status, progress.outputs) == (run.state.status, run.state.outputs)


def _check_end(run: Run) -> None:
    state, limit_s = run.state, run.state.workflow.spec.deadline_s
    assert state.finished_s is not None
    took_s = state.finished_s - state.created_s
    if state.status == "completed":
        assert state.outputs == state.workflow.outputs.render(_scope(run))
    if state.status == "failed":
        assert state.failure is not None
        assert state.nodes[state.failure.node_id or ""].status == "failed"
    if state.status == "incomplete":
        assert limit_s is not None
        assert took_s >= limit_s - _EPSILON_S
    elif limit_s is not None and took_s > limit_s + _EPSILON_S:
        # Another server has gone on with it after its deadline, and there was nothing left to do.
        last_s = state.created_s + limit_s + _EPSILON_S
        for node in state.nodes.values():
            assert node.started_s is None or node.started_s <= last_s
            assert node.status != "completed" or (node.finished_s or 0.0) <= last_s


def _scope(run: Run) -> Mapping[str, Any]:
    views = {
        name: {
            "output": node.output,
            "status": node.status,
            "error": node.failure and {"code": node.failure.code, "message": node.failure.message},
        }
        for name, node in run.state.nodes.items()
    }
    return {"inputs": run.state.inputs, "nodes": views}


def _params(run: Run, node: CheckedNode) -> WorkParams:
    return WorkParams.model_validate(node.params.render(_scope(run)))


def _expected(op: str, params: WorkParams, execution: Execution) -> str:
    """What work gives if it is done alone; of a sample, if it is this one."""
    asked: dict[str, Callable[[], Sequence[object]]] = {
        "think": lambda: (params.prompt, params.seed),
        "write": lambda: (params.prompt, params.seed),
        "read": lambda: (params.prompt, execution.version),
        "look": lambda: (params.items,),
    }
    text = answer(execution.context.tenant, *asked[op]())
    return f"{text}#{execution.number}" if op == "think" and params.is_sampled else text


def _last_start_s(run: Run, node_id: str) -> float:
    return max(
        event.at_s
        for event in run.events.since(0)
        if event.type == "node.started" and event.node_id == node_id
    )


def _said(run: Run, node_id: str) -> str:
    """By a node, in its last try."""
    text = ""
    for event in run.events.since(0):
        if event.node_id == node_id:
            text = "" if event.type == "node.started" else text + event.data.get("text", "")
    return text
