"""A run is what its events say: replayed at any moment, and gone on with from there."""

import random
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workflows.fakes import checked, echo
from tests.workflows.test_run_state import workflows
from workflows.checked import CheckedWorkflow
from workflows.errors import NodeFailed
from workflows.operators.base import NodeResult
from workflows.run_events import RunEvent
from workflows.run_progress import RUN_ENDS, NodeProgress, replayed
from workflows.run_state import MAX_RESTARTS, Command, Happened, RunState, StartNode, StopNode

FAILURES = {"no": NodeFailed("no", code="no", is_retryable=False)}
FAILURES["busy"] = NodeFailed("busy", code="busy", is_retryable=True)


class Player:
    """Plays a run with what each try of each node is fated to: `fates[node, attempt]`."""

    def __init__(
        self,
        workflow: CheckedWorkflow,
        fates: dict[tuple[str, int], str],
        rng: random.Random,
        past: list[RunEvent] | None = None,
    ) -> None:
        self.workflow, self.fates, self.rng = workflow, fates, rng
        self.events = list(past or [])
        self.now_s = self.events[-1].at_s if self.events else 0.0
        self.at_work: dict[str, StartNode] = {}
        self.worked: list[str] = []
        progress = replayed(workflow.nodes, self.events, created_s=0.0)
        self.state = RunState.restored(
            workflow, {}, progress, now_s=self.now_s, rng=random.Random(7)
        )
        self.take(self.state.resume(now_s=self.now_s))

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case StartNode(node=node):
                    self.at_work[node.spec.id] = command
                case StopNode(node_id=node_id):
                    self.at_work.pop(node_id, None)
                case Happened(type=kind, node_id=node_id, data=data):
                    event = RunEvent(
                        sequence_number=len(self.events) + 1,
                        type=kind,
                        at_s=self.now_s,
                        node_id=node_id,
                        data=data,
                    )
                    self.events.append(event)
        self.state.check_invariants()

    def step(self) -> None:
        """One thing happens: the work of a node begins, or ends."""
        self.now_s += 1
        name = self.rng.choice(sorted(self.at_work))
        node = self.state.nodes[name]
        if not node.has_begun:
            self.take(self.state.work_started(name, now_s=self.now_s))
            return
        start = self.at_work.pop(name)
        self.worked.append(name)
        failure = FAILURES.get(self.fates.get((name, start.attempt), ""))
        if failure is not None:
            self.take(self.state.work_failed(name, failure, now_s=self.now_s))
            return
        text = f"{name}({start.params['text']})"
        result = NodeResult(output={"text": text}, usage={"tokens": len(text)})
        self.take(
            self.state.work_completed(
                name, result, now_s=self.now_s, shared="cache", shared_reason="because"
            )
        )

    def play(self) -> "Player":
        while not self.state.has_ended:
            self.step()
        return self


fates = st.dictionaries(
    st.tuples(st.sampled_from([f"n{index}" for index in range(9)]), st.integers(1, 2)),
    st.sampled_from(["no", "busy"]),
    max_size=4,
)
randoms = st.randoms(use_true_random=False)


def progress_of(node: NodeProgress) -> dict[str, Any]:
    return {one.name: getattr(node, one.name) for one in fields(NodeProgress)}


@given(workflows(), fates, randoms)
def test_events_tell_all_that_there_is_to_know(
    nodes: list[dict[str, Any]], fates: dict[tuple[str, int], str], rng: random.Random
) -> None:
    run = Player(checked(*nodes), fates, rng)
    while True:
        told = replayed(run.workflow.nodes, run.events, created_s=0.0)
        for name, state in run.state.nodes.items():
            assert progress_of(told.nodes[name]) == progress_of(state)
        assert (told.status, told.failure, told.outputs, told.finished_s, told.usage) == (
            run.state.status,
            run.state.failure,
            run.state.outputs,
            run.state.finished_s,
            run.state.usage,
        )
        if run.state.has_ended:
            return
        run.step()


@given(workflows(), fates, randoms, st.data())
def test_an_interrupted_run_ends_as_it_would_have(
    nodes: list[dict[str, Any]],
    fates: dict[tuple[str, int], str],
    rng: random.Random,
    data: st.DataObject,
) -> None:
    whole = Player(checked(*nodes), fates, rng).play()
    # Interrupted anywhere, and then again: also in the midst of what is always stored together.
    events = whole.events
    for _ in range(data.draw(st.integers(1, 3))):
        cut = data.draw(st.integers(0, len(events)))
        done = {
            event.node_id
            for event in events[:cut]
            if event.type in ("node.completed", "node.skipped", "node.failed")
        }
        again = Player(whole.workflow, fates, rng, past=events[:cut]).play()
        assert not done & set(again.worked)
        events = again.events
        assert [event.sequence_number for event in events] == list(range(1, len(events) + 1))
        assert again.state.status == whole.state.status
        assert again.state.outputs == whole.state.outputs
        assert [event.type for event in events if event.type in RUN_ENDS] == [events[-1].type]
        if whole.state.status == "completed":
            for name, state in whole.state.nodes.items():
                resumed = again.state.nodes[name]
                assert (resumed.output, resumed.usage) == (state.output, state.usage)
                assert (resumed.status, resumed.attempt) == (state.status, state.attempt)


def restored(events: list[RunEvent], now_s: float, **node_fields: Any) -> RunState:
    workflow = checked(echo("a", "x", **node_fields), echo("b", "{{ nodes.a.output.text }}"))
    progress = replayed(workflow.nodes, events, created_s=0.0)
    return RunState.restored(workflow, {}, progress, now_s=now_s)


def log(*entries: tuple[str, str | None, dict[str, Any]]) -> list[RunEvent]:
    return [
        RunEvent(sequence_number=place, type=kind, at_s=float(place), node_id=node_id, data=data)
        for place, (kind, node_id, data) in enumerate(entries, start=1)
    ]


CREATED: tuple[str, None, dict[str, Any]] = ("run.created", None, {})
READY = ("node.ready", "a", {})
STARTED = ("node.started", "a", {"attempt": 1})


def test_work_that_had_begun_begins_again_as_the_same_try() -> None:
    state = restored(log(CREATED, READY, STARTED), 10.0)
    happened, start = state.resume(now_s=10.0)
    assert happened == Happened(type="node.restarted", node_id="a", data={"attempt": 1})
    assert isinstance(start, StartNode)
    assert (start.attempt, start.delay_s, start.is_restart) == (1, 0.0, True)
    assert state.nodes["a"].started_s == 3.0


def test_work_that_had_not_begun_is_not_restarted() -> None:
    (start,) = restored(log(CREATED, READY), 10.0).resume(now_s=10.0)
    assert isinstance(start, StartNode)
    assert not start.is_restart


@pytest.mark.parametrize(("now_s", "delay_s"), [(5.0, 29.0), (60.0, 0.0)])
def test_a_wait_for_the_next_try_goes_on(now_s: float, delay_s: float) -> None:
    retrying = ("node.retrying", "a", {"attempt": 2, "delay_s": 30.0, "error": None})
    state = restored(log(CREATED, READY, STARTED, retrying), now_s, retry={"max_attempts": 3})
    (start,) = state.resume(now_s=now_s)
    assert isinstance(start, StartNode)
    assert (start.attempt, start.delay_s, start.is_restart) == (2, delay_s, False)


def test_work_that_ends_the_server_each_time_is_given_up() -> None:
    restarts = [STARTED, ("node.restarted", "a", {"attempt": 1})] * MAX_RESTARTS
    state = restored(log(CREATED, READY, *restarts, STARTED), 99.0)
    state.resume(now_s=99.0)
    assert state.status == "failed"
    assert state.failure is not None
    assert (state.failure.code, state.failure.node_id) == ("interrupted", "a")


def test_a_cancellation_that_was_not_stored_whole_has_not_happened() -> None:
    cancelled = [("node.cancelled", name, {}) for name in ("a", "b")]
    state = restored(log(CREATED, READY, STARTED, *cancelled), 9.0)
    assert [one.status for one in state.nodes.values()] == ["running", "pending"]
    whole = restored(log(CREATED, READY, STARTED, *cancelled, ("run.cancelled", None, {})), 9.0)
    assert (whole.status, whole.resume(now_s=9.0)) == ("cancelled", [])


def test_a_run_inside_that_was_cancelled_goes_on_with_its_node() -> None:
    done = ("node.completed", "a", {"output": {"text": "x"}, "shared": "none", "usage": {"t": 1}})
    events = log(
        CREATED, READY, STARTED, done, ("node.cancelled", "b", {}), ("run.cancelled", None, {})
    )
    workflow = checked(echo("a", "x"), echo("b", "{{ nodes.a.output.text }}"))
    progress = replayed(workflow.nodes, events, created_s=0.0, is_nested=True)
    state = RunState.restored(workflow, {}, progress, now_s=9.0)
    _, start = state.resume(now_s=9.0)
    assert isinstance(start, StartNode)
    assert (start.node.spec.id, start.params["text"]) == ("b", "x")
