import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.workflows.fakes import checked, echo
from workflows.errors import NodeFailed
from workflows.operators.base import NodeResult
from workflows.run_state import Command, Happened, RunState, StartNode, StopNode


class Driver:
    """Plays the shell: keeps what was asked for, checks the state after every step."""

    def __init__(self, *nodes: dict[str, Any], inputs: dict[str, Any] | None = None, **fields: Any):
        self.state = RunState(
            checked(*nodes, **fields), inputs or {}, now_s=0.0, rng=random.Random(1)
        )
        self.started: dict[str, StartNode] = {}
        self.stopped: set[str] = set()
        self.events: list[str] = []
        self.now_s = 0.0
        self.take(self.state.start(now_s=0.0))

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case StartNode(node=node):
                    self.started[node.spec.id] = command
                case StopNode(node_id=node_id):
                    self.stopped.add(node_id)
                    del self.started[node_id]
                case Happened(type=kind, node_id=None):
                    self.events.append(kind)
                case Happened(type=kind, node_id=node_id):
                    self.events.append(f"{kind} {node_id}")
        self.state.check_invariants()

    def complete(self, node_id: str, **output: Any) -> None:
        self.now_s += 1
        start = self.started.pop(node_id)
        self.take(self.state.work_started(node_id, now_s=self.now_s))
        result = NodeResult(output={**start.params, **output}, usage={"tokens": 2})
        self.take(self.state.work_completed(node_id, result, now_s=self.now_s))

    def fail(self, node_id: str, *, is_retryable: bool = False) -> None:
        self.now_s += 1
        self.started.pop(node_id)
        self.take(self.state.work_started(node_id, now_s=self.now_s))
        error = NodeFailed("no", code="broken", is_retryable=is_retryable)
        self.take(self.state.work_failed(node_id, error, now_s=self.now_s))

    def status(self, node_id: str) -> str:
        return self.state.nodes[node_id].status


def test_a_node_starts_as_soon_as_its_own_inputs_are_there() -> None:
    # A diamond with one slow branch: the other branch's child does not wait for it.
    run = Driver(
        echo("root", "r"),
        echo("slow", "{{ nodes.root.output.text }}"),
        echo("fast", "{{ nodes.root.output.text }}"),
        echo("child", "{{ nodes.fast.output.text }}!"),
        echo("join", "{{ nodes.slow.output.text }}{{ nodes.child.output.text }}"),
    )
    run.complete("root")
    assert set(run.started) == {"slow", "fast"}
    run.complete("fast")
    assert set(run.started) == {"slow", "child"}
    assert run.started["child"].params["text"] == "r!"
    run.complete("child")
    run.complete("slow")
    run.complete("join")
    assert run.state.status == "completed"
    assert run.state.outputs == {"join": {"text": "rr!"}}
    assert run.state.usage == {"tokens": 10}


def test_a_false_condition_skips_a_node_and_what_only_hangs_on_it() -> None:
    run = Driver(
        echo("yes", when="inputs.n > 1"),
        echo("no", when="inputs.n < 1"),
        echo("after_no", "{{ nodes.no.output }}"),
        echo("join", "{{ nodes.no.status }} {{ nodes.yes.status }} {{ nodes.no.output }}"),
        inputs={"n": 2},
    )
    assert (run.status("no"), run.status("after_no")) == ("skipped", "skipped")
    run.complete("yes")
    assert run.started["join"].params["text"] == "skipped completed None"


def test_a_failure_ends_the_run_and_stops_the_others() -> None:
    run = Driver(echo("a"), echo("b"), echo("c", "{{ nodes.a.output.text }}"))
    run.fail("a")
    assert run.state.status == "failed"
    assert run.state.failure is not None
    assert (run.state.failure.code, run.state.failure.node_id) == ("broken", "a")
    assert run.stopped == {"b"}
    assert (run.status("b"), run.status("c")) == ("cancelled", "cancelled")
    assert run.events[-1] == "run.failed"


def test_a_failure_can_be_skipped_or_replaced() -> None:
    run = Driver(
        echo("a", on_error="skip"),
        echo("b", on_error="default", default={"text": "instead"}),
        echo("c", "{{ nodes.a.error.code }} {{ nodes.b.output.text }}"),
    )
    run.fail("a")
    run.fail("b")
    assert run.started["c"].params["text"] == "broken instead"
    run.complete("c")
    assert run.state.status == "completed"


def test_what_may_pass_is_tried_again_with_growing_delays() -> None:
    retry = {"max_attempts": 3, "backoff_s": 2.0, "jitter": 0.0}
    run = Driver(echo("a", "x", retry=retry))
    run.fail("a", is_retryable=True)
    assert (run.started["a"].attempt, run.started["a"].delay_s) == (2, 2.0)
    run.fail("a", is_retryable=True)
    assert (run.started["a"].attempt, run.started["a"].delay_s) == (3, 4.0)
    run.fail("a", is_retryable=True)
    assert run.state.status == "failed"
    assert run.events.count("node.retrying a") == 2


def test_what_will_not_pass_is_not_tried_again() -> None:
    run = Driver(echo("a", retry={"max_attempts": 3}))
    run.fail("a", is_retryable=False)
    assert run.state.status == "failed"


def test_jitter_only_shortens_the_delay() -> None:
    delays = set()
    for seed in range(20):
        state = RunState(
            checked(echo("a", retry={"backoff_s": 4.0, "jitter": 0.5})),
            {},
            now_s=0.0,
            rng=random.Random(seed),
        )
        state.start(now_s=0.0)
        error = NodeFailed("no", code="x", is_retryable=True)
        commands = state.work_failed("a", error, now_s=1.0)
        delays |= {one.delay_s for one in commands if isinstance(one, StartNode)}
    assert all(2.0 <= delay_s <= 4.0 for delay_s in delays)
    assert len(delays) > 10


def test_a_template_that_fails_fails_its_node() -> None:
    run = Driver(echo("a", "{{ inputs.missing }}"))
    assert run.state.status == "failed"
    assert run.state.failure is not None
    assert run.state.failure.code == "template_error"


def test_outputs_that_fail_fail_the_run() -> None:
    run = Driver(echo("a"), outputs={"x": "{{ nodes.a.output.text.nope.nope }}"})
    run.complete("a")
    assert run.state.status == "failed"


def test_cancel_and_deadline_stop_everything_once() -> None:
    for end, status in (("cancel", "cancelled"), ("expire", "incomplete")):
        run = Driver(echo("a"), echo("b", "{{ nodes.a.output.text }}"), deadline_s=5.0)
        run.take(getattr(run.state, end)(now_s=1.0))
        assert run.state.status == status
        assert run.stopped == {"a"}
        assert getattr(run.state, end)(now_s=2.0) == []
        late = NodeResult(output={"text": "late"})
        assert run.state.work_completed("a", late, now_s=3.0) == []
        assert run.state.nodes["a"].output is None


@st.composite
def workflows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Random DAGs of nodes that may be conditional and may take failures."""
    nodes = []
    for index in range(draw(st.integers(1, 9))):
        parents = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        fields: dict[str, Any] = {"depends_on": [f"n{parent}" for parent in sorted(parents)]}
        if draw(st.booleans()):
            fields["when"] = draw(st.sampled_from(["true", "false"]))
        match draw(st.sampled_from(["fail", "skip", "default"])):
            case "skip":
                fields["on_error"] = "skip"
            case "default":
                fields |= {"on_error": "default", "default": {"text": "d"}}
        if draw(st.booleans()):
            fields["retry"] = {"max_attempts": 2}
        nodes.append(echo(f"n{index}", "x", **fields))
    return nodes


@given(workflows(), st.randoms(use_true_random=False))
def test_every_run_ends_whatever_happens(nodes: list[dict[str, Any]], rng: random.Random) -> None:
    run = Driver(*nodes)
    while not run.state.has_ended:
        name = rng.choice(sorted(run.started))
        match rng.randrange(8):
            case 0:
                run.fail(name, is_retryable=True)
            case 1:
                run.fail(name)
            case 2 if rng.randrange(4) == 0:
                run.take(run.state.cancel(now_s=run.now_s))
            case _:
                run.complete(name)
    assert not run.started
    # Each node is said to have ended exactly once, and nothing comes after the run's own end.
    ends = [
        event
        for event in run.events
        if event.split()[0].split(".")[1] in ("completed", "failed", "skipped", "cancelled")
        and event.startswith("node.")
    ]
    assert len(ends) == len(set(ends)) == len(nodes)
    assert run.events[-1] == f"run.{run.state.status}"
