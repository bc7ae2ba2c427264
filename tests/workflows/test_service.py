import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anyio
import pytest

from tests.workflows.fakes import Echo, EchoParams, Work, checked, echo, operators
from workflows.checked import CheckedWorkflow, check_workflow
from workflows.errors import InvalidWorkflow, KeyReused, NodeFailed, RunNotFound, TooManyRuns
from workflows.operators.base import NodeContext, NodeResult
from workflows.run import Run, RunKey
from workflows.run_restoring import restored_run
from workflows.run_state import RunState
from workflows.service import WorkflowService
from workflows.signature import Identity
from workflows.stores.runs import StoredRun

pytestmark = pytest.mark.anyio


@pytest.fixture
async def service() -> AsyncIterator[WorkflowService]:
    async with WorkflowService(max_active=5, max_kept=3) as service:
        yield service


async def ended(run: Run) -> Run:
    with anyio.fail_after(5):
        await run.ended.wait()
    run.state.check_invariants()
    return run


async def sleep_long(params: EchoParams, context: NodeContext) -> None:
    await anyio.sleep(60)


async def test_a_run_goes_through_its_nodes(service: WorkflowService) -> None:
    workflow = checked(echo("a", "{{ inputs.q }}"), echo("b", "{{ nodes.a.output.text }}!"))
    run = await ended(service.submit(workflow, {"q": "hi"}, tenant="t"))
    assert run.state.outputs == {"b": {"text": "hi!", "number": 0.0, "items": []}}
    kinds = [event.type for event in await run.events.after(0)]
    assert kinds[0] == "run.created"
    assert kinds[-1] == "run.completed"
    assert kinds.count("node.completed") == 2
    assert service.num_active == 0


async def test_nodes_run_side_by_side(service: WorkflowService) -> None:
    both = anyio.Event()
    seen = []

    async def meet(params: EchoParams, context: NodeContext) -> None:
        seen.append(context.node_id)
        if len(seen) == 2:
            both.set()
        await both.wait()

    await ended(service.submit(checked(echo("a"), echo("b"), work=meet), {}, tenant=""))


async def test_partial_output_is_an_event(service: WorkflowService) -> None:
    async def speak(params: EchoParams, context: NodeContext) -> None:
        context.emit("one")
        context.emit("two")

    run = await ended(service.submit(checked(echo("a"), work=speak), {}, tenant=""))
    events = await run.events.after(0)
    assert [e.data["text"] for e in events if e.type == "node.delta"] == ["one", "two"]


async def test_a_node_is_tried_again_with_the_same_key(service: WorkflowService) -> None:
    keys = []

    async def fail_twice(params: EchoParams, context: NodeContext) -> None:
        keys.append((context.idempotency_key, context.attempt))
        if context.attempt < 3:
            raise NodeFailed("no", code="busy", is_retryable=True)

    retry = {"max_attempts": 3, "backoff_s": 0.0}
    run = await ended(
        service.submit(checked(echo("a", retry=retry), work=fail_twice), {}, tenant="")
    )
    assert run.state.status == "completed"
    assert keys == [(f"{run.id}:a", attempt) for attempt in (1, 2, 3)]


async def test_a_try_that_takes_too_long_fails(service: WorkflowService) -> None:
    workflow = checked(echo("a", timeout_s=0.01), work=sleep_long)
    run = await ended(service.submit(workflow, {}, tenant=""))
    assert run.state.failure is not None
    assert run.state.failure.code == "timeout"


async def test_parameters_are_checked_once_they_are_rendered(service: WorkflowService) -> None:
    workflow = checked({"id": "a", "op": "echo", "params": {"items": "{{ inputs.q }}"}})
    run = await ended(service.submit(workflow, {"q": "no list"}, tenant=""))
    assert run.state.failure is not None
    assert run.state.failure.code == "invalid_params"
    assert "params.items" in run.state.failure.message


async def test_a_bug_in_an_operator_ends_its_run_only(
    service: WorkflowService, caplog: pytest.LogCaptureFixture
) -> None:
    async def crash(params: EchoParams, context: NodeContext) -> None:
        raise ZeroDivisionError("secret detail")

    run = await ended(service.submit(checked(echo("a"), work=crash), {}, tenant=""))
    assert run.state.failure is not None
    assert run.state.failure.code == "internal_error"
    assert "secret" not in run.state.failure.message
    assert "secret detail" in caplog.text
    fine = await ended(service.submit(checked(echo("a")), {}, tenant=""))
    assert fine.state.status == "completed"


class Huge(Echo):
    """Gives what JSON does not have."""

    async def run(self, params: EchoParams, context: NodeContext) -> NodeResult:
        return NodeResult(output={"number": 2**64})


async def test_an_output_that_is_no_json_fails_its_node(service: WorkflowService) -> None:
    workflow = check_workflow({"nodes": [echo("a")]}, {"echo": Huge()})
    run = await ended(service.submit(workflow, {}, tenant=""))
    assert run.state.failure is not None
    assert run.state.failure.code == "invalid_output"


async def test_a_bug_around_a_node_ends_its_run_only(
    service: WorkflowService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(run: Run, result: NodeResult) -> None:
        raise ZeroDivisionError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr(service, "_count_bytes", crash)
        run = await ended(service.submit(checked(echo("a")), {}, tenant=""))
    assert run.state.failure is not None
    assert run.state.failure.code == "internal_error"
    assert "secret detail" in caplog.text
    fine = await ended(service.submit(checked(echo("a")), {}, tenant=""))
    assert fine.state.status == "completed"


async def test_a_bug_in_what_a_run_decides_ends_it_alone(
    service: WorkflowService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr(RunState, "work_completed", crash)
        run = await ended(service.submit(checked(echo("a")), {}, tenant=""))
    assert run.state.status == "cancelled"
    assert "secret detail" in caplog.text
    fine = await ended(service.submit(checked(echo("a")), {}, tenant=""))
    assert fine.state.status == "completed"


async def test_cancel_stops_the_work(service: WorkflowService) -> None:
    stopped = []

    async def until_stopped(params: EchoParams, context: NodeContext) -> None:
        try:
            await anyio.sleep(60)
        finally:
            stopped.append(context.node_id)

    workflow = checked(echo("a"), echo("b"), echo("c", depends_on=["a"]), work=until_stopped)
    run = service.submit(workflow, {}, tenant="")
    await anyio.wait_all_tasks_blocked()
    service.cancel(run)
    await ended(run)
    assert sorted(stopped) == ["a", "b"]
    assert run.state.status == "cancelled"
    service.cancel(run)


async def test_cancel_in_the_moment_of_submission_stops_it_too(service: WorkflowService) -> None:
    run = service.submit(checked(echo("a"), work=sleep_long), {}, tenant="")
    service.cancel(run)
    await ended(run)
    assert run.state.status == "cancelled"


async def test_a_deadline_ends_the_run(service: WorkflowService) -> None:
    run = service.submit(checked(echo("a"), work=sleep_long, deadline_s=0.02), {}, tenant="")
    await ended(run)
    assert run.state.status == "incomplete"
    assert service.num_active == 0


async def test_a_deadline_does_not_outlive_the_run(service: WorkflowService) -> None:
    await ended(service.submit(checked(echo("a"), deadline_s=3600.0), {}, tenant=""))


async def test_tenants_do_not_see_each_other(service: WorkflowService) -> None:
    run = await ended(service.submit(checked(echo("a")), {}, tenant="alice"))
    assert service.find(run.id, tenant="alice") is run
    with pytest.raises(RunNotFound):
        service.find(run.id, tenant="bob")
    assert service.runs(tenant="alice") == [run]
    assert service.runs(tenant="bob") == []


async def test_limits_are_kept(service: WorkflowService) -> None:
    for _ in range(5):
        await ended(service.submit(checked(echo("a")), {}, tenant=""))
    assert len(service.runs(tenant="")) == 3
    slow: Any = checked(echo("a"), work=sleep_long)
    for _ in range(5):
        service.submit(slow, {}, tenant="")
    with pytest.raises(TooManyRuns):
        service.submit(slow, {}, tenant="")


async def test_wrong_inputs_start_nothing(service: WorkflowService) -> None:
    workflow = checked(echo("a"), input_schema={"required": ["q"]})
    with pytest.raises(InvalidWorkflow):
        service.submit(workflow, {}, tenant="")
    assert service.runs(tenant="") == []


async def test_leaving_cancels_what_runs() -> None:
    async with WorkflowService() as service:
        run = service.submit(checked(echo("a"), work=sleep_long), {}, tenant="")
        await anyio.wait_all_tasks_blocked()
    assert run.state.status == "cancelled"
    assert run.ended.is_set()


class Sharing(Echo):
    """Echo, whose work may be shared unless its text begins with a question mark."""

    def identity(self, params: EchoParams) -> Identity:
        sampled = "it is a question" if params.text.startswith("?") else ""
        return Identity(content=params.model_dump(), sampled=sampled, wants_deltas=True)


def sharing(*nodes: dict[str, Any], work: Work | None = None) -> CheckedWorkflow:
    return check_workflow({"nodes": list(nodes)}, {"echo": Sharing(work)})


async def test_equal_nodes_of_concurrent_runs_are_one_execution(service: WorkflowService) -> None:
    executed = []
    may_end = anyio.Event()

    async def wait(params: EchoParams, context: NodeContext) -> None:
        executed.append(context.run_id)
        context.emit("said")
        await may_end.wait()

    runs = [
        service.submit(sharing(echo("a", "{{ inputs.q }}"), work=wait), {"q": "x"}, tenant=tenant)
        for tenant in ("alice", "alice", "bob")
    ]
    await anyio.wait_all_tasks_blocked()
    may_end.set()
    for run in runs:
        await ended(run)
    # One of alice's, and bob's own.
    assert executed == [runs[0].id, runs[2].id]
    assert [run.state.nodes["a"].shared for run in runs] == ["none", "inflight", "none"]
    assert runs[1].state.usage == {"tokens": 0, "shared_tokens": 0}
    for run in runs:
        said = [e.data["text"] for e in await run.events.after(0) if e.type == "node.delta"]
        assert said == ["said"]
    kinds = [event.type for event in await runs[1].events.after(0)]
    assert kinds.count("node.shared") == 1


@pytest.mark.parametrize(
    ("text", "share", "executions"),
    [
        ("x", {}, 1),
        ("x", {"scope": "none"}, 4),
        ("x", {"scope": "run"}, 2),
        ("?", {}, 4),
        ("?", {"sampled": True}, 1),
    ],
)
async def test_the_author_says_what_is_shared(
    service: WorkflowService, text: str, share: dict[str, Any], executions: int
) -> None:
    executed = []

    async def wait(params: EchoParams, context: NodeContext) -> None:
        executed.append(context.node_id)
        await anyio.sleep(0.01)

    nodes = [echo(name, text, share=share) for name in ("a", "b")]
    for run in [service.submit(sharing(*nodes, work=wait), {}, tenant="") for _ in range(2)]:
        await ended(run)
    assert len(executed) == executions


async def test_a_workflow_shares_among_its_own_runs(service: WorkflowService) -> None:
    executed = []

    async def wait(params: EchoParams, context: NodeContext) -> None:
        executed.append(context.tenant)
        await anyio.sleep(0.01)

    node = echo("a", "x", share={"scope": "workflow"})
    other = echo("b", "y", depends_on=["a"])
    runs = [
        service.submit(sharing(*nodes, work=wait), {}, tenant=tenant)
        for nodes, tenant in (((node,), "t"), ((node,), "t"), ((node, other), "t"), ((node,), "u"))
    ]
    for run in runs:
        await ended(run)
    assert [run.state.nodes["a"].shared for run in runs] == ["none", "inflight", "none", "none"]


async def test_what_is_public_is_shared_by_all_tenants_that_say_so(
    service: WorkflowService,
) -> None:
    executed, may_end = [], anyio.Event()

    async def wait(params: EchoParams, context: NodeContext) -> None:
        executed.append(context.tenant)
        await may_end.wait()

    scopes = (("t", "public"), ("u", "public"), ("v", "tenant"), ("public", "tenant"))
    runs = [
        service.submit(
            sharing(echo("a", "x", share={"scope": scope}), work=wait), {}, tenant=tenant
        )
        for tenant, scope in scopes
    ]
    # The first may leave: the work is not its own.
    await anyio.wait_all_tasks_blocked()
    service.cancel(runs[0])
    await ended(runs[0])
    may_end.set()
    for run in runs:
        await ended(run)
    assert executed == ["t", "v", "public"]
    assert [run.state.nodes["a"].shared for run in runs[1:]] == ["none", "none", "none"]
    assert runs[1].state.status == "completed"
    assert runs[1].state.usage == {"tokens": 1}


async def test_a_salt_keeps_nodes_apart_and_a_ttl_lets_later_ones_share(
    service: WorkflowService,
) -> None:
    kept = {"cache": {"ttl_s": 60.0}}
    for share, expected in (("", "none"), ("", "cache"), ("s", "none"), ("s", "cache")):
        node = echo("a", "x", share={"salt": share}, **kept)
        run = await ended(service.submit(sharing(node), {}, tenant=""))
        assert run.state.nodes["a"].shared == expected
        assert run.state.nodes["a"].shared_reason


class Pure(Sharing):
    """Echo, whose content says all; live where its text begins with an exclamation mark."""

    def __init__(self, work: Work | None = None, *, may_be_kept: bool = True) -> None:
        super().__init__(work)
        self._may_be_kept = may_be_kept

    def identity(self, params: EchoParams) -> Identity:
        is_pure = not params.text.startswith(("?", "!"))
        return replace(super().identity(params), is_pure=is_pure)

    async def run(self, params: EchoParams, context: NodeContext) -> NodeResult:
        return replace(await super().run(params, context), may_be_kept=self._may_be_kept)


class Bench:
    """Runs of `a`, which ends at once, and of further nodes behind it, which end when told."""

    def __init__(self, service: WorkflowService, **options: Any) -> None:
        self.service = service
        self.executed: list[str] = []
        self.may_end = anyio.Event()
        self.operators = {**operators(), "echo": Pure(self._work, **options)}

    async def _work(self, params: EchoParams, context: NodeContext) -> None:
        self.executed.append(context.node_id)
        if context.node_id != "a":
            await self.may_end.wait()

    async def submit(
        self, text: str = "x", *, behind: str = "b", tenant: str = "t", **a: Any
    ) -> Run:
        """A run whose first node has ended."""
        nodes = [echo("a", text, **a), echo(behind, f"{behind} {{{{ nodes.a.output.text }}}}")]
        workflow = check_workflow({"nodes": nodes}, self.operators)
        run = self.service.submit(workflow, {}, tenant=tenant)
        await anyio.wait_all_tasks_blocked()
        assert run.state.nodes["a"].status == "completed"
        assert run.state.nodes[behind].status == "running"
        return run

    async def end(self, *runs: Run) -> None:
        self.may_end.set()
        for run in runs:
            assert (await ended(run)).state.status == "completed"


async def test_an_equal_run_that_comes_late_catches_up(service: WorkflowService) -> None:
    bench = Bench(service)
    first = await bench.submit()
    second = await bench.submit()
    assert bench.executed == ["a", "b"]
    await bench.end(first, second)
    a, b = (second.state.nodes[name] for name in "ab")
    assert (a.shared, b.shared) == ("cache", "inflight")
    assert "active" in a.shared_reason
    assert a.usage == {"tokens": 0, "shared_tokens": 0}
    assert first.state.outputs == second.state.outputs
    kinds = [(event.type, event.node_id) for event in await second.events.after(0)]
    assert ("node.shared", "a") in kinds
    # With the runs, what they held is gone.
    assert service.shared_work.num_held == 0
    bench.may_end = anyio.Event()
    await bench.end(await bench.submit())
    assert bench.executed == ["a", "b"] * 2


async def test_who_used_a_result_hands_it_on_when_who_made_it_has_ended(
    service: WorkflowService,
) -> None:
    bench = Bench(service)
    first, second = await bench.submit(), await bench.submit(behind="c")
    service.cancel(first)
    await ended(first)
    third = await bench.submit(behind="d")
    assert third.state.nodes["a"].shared == "cache"
    await bench.end(second, third)
    assert bench.executed == ["a", "b", "c", "d"]
    assert service.shared_work.num_held == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"share": {"scope": "none"}}, {}),
        ({}, {"share": {"scope": "none"}}),
        ({"share": {"scope": "run"}}, {"share": {"scope": "run"}}),
        ({}, {"share": {"salt": "s"}}),
        ({}, {"text": "y"}),
        ({}, {"tenant": "u"}),
        ({}, {"effects": "write"}),
        ({"text": "!"}, {"text": "!"}),
        ({"text": "?"}, {"text": "?"}),
        ({"text": "?", "share": {"sampled": True}}, {"text": "?", "share": {"sampled": True}}),
    ],
)
async def test_what_is_not_equal_or_not_pure_or_not_to_be_shared_is_done_again(
    service: WorkflowService, first: dict[str, Any], second: dict[str, Any]
) -> None:
    bench = Bench(service)
    asked = {"b": first, "c": second}
    runs = [await bench.submit(behind=name, **fields) for name, fields in asked.items()]
    assert bench.executed == ["a", "b", "a", "c"]
    assert runs[1].state.nodes["a"].shared == "none"
    await bench.end(*runs)


async def test_a_result_that_was_cut_is_made_again(service: WorkflowService) -> None:
    bench = Bench(service, may_be_kept=False)
    runs = [await bench.submit(behind=name) for name in "bc"]
    assert bench.executed == ["a", "b", "a", "c"]
    await bench.end(*runs)


@pytest.mark.parametrize("how", ["cancelled", "abandoned", "left"])
async def test_however_a_run_ends_it_holds_nothing_afterwards(how: str) -> None:
    async with WorkflowService() as service:
        bench = Bench(service)
        run = await bench.submit()
        assert service.shared_work.num_held == 1
        if how == "cancelled":
            service.cancel(run)
        elif how == "abandoned":
            service._abandon(run.id)
        if how != "left":
            await anyio.wait_all_tasks_blocked()
            assert service.shared_work.num_held == 0
    assert service.shared_work.num_held == 0


async def test_a_run_that_fails_or_expires_holds_nothing_afterwards(
    service: WorkflowService,
) -> None:
    may_fail = anyio.Event()

    async def fail(params: EchoParams, context: NodeContext) -> None:
        if context.node_id == "b":
            await may_fail.wait()
            raise NodeFailed("no", code="x", is_retryable=False)

    nodes = [echo("a", "x"), echo("b", "y", depends_on=["a"])]
    workflow = check_workflow({"nodes": nodes, "deadline_s": 60}, {"echo": Pure(fail)})
    for status in ("incomplete", "failed"):
        run = service.submit(workflow, {}, tenant="")
        await anyio.wait_all_tasks_blocked()
        assert service.shared_work.num_held == 1
        if status == "incomplete":
            await service._expire(run, 0.0)
        else:
            may_fail.set()
        assert (await ended(run)).state.status == status
        assert service.shared_work.num_held == 0


async def test_nodes_of_runs_inside_are_held_by_the_run_around_them(
    service: WorkflowService,
) -> None:
    bench = Bench(service)
    inner = {"nodes": [echo("a", "{{ inputs.item }}")]}
    over = {"workflow": inner, "over": ["x", "y"]}
    nodes = [{"id": "m", "op": "map", "params": over}, echo("b", "z", depends_on=["m"])]
    run = service.submit(check_workflow({"nodes": nodes}, bench.operators), {}, tenant="t")
    await anyio.wait_all_tasks_blocked()
    assert service.shared_work.num_held == 2
    other = await bench.submit("y", behind="c")
    assert other.state.nodes["a"].shared == "cache"
    await bench.end(run, other)
    assert service.shared_work.num_held == 0


async def test_a_run_that_is_gone_on_with_holds_what_it_does_now(service: WorkflowService) -> None:
    bench = Bench(service)
    document = {"nodes": [echo("a", "x"), echo("b", "y", depends_on=["a"])]}
    events: list[list[Any]] = [
        ["run.created", 1.0, None, {}],
        ["node.ready", 1.0, "a", {}],
        ["node.started", 1.0, "a", {"attempt": 1}],
    ]
    stored = StoredRun(
        id="run_1",
        tenant="key:t",
        owner=1,
        name=None,
        error=None,
        status="in_progress",
        created_s=1.0,
        finished_s=None,
        document=document,
        inputs={},
        events={"": events},
    )
    workflow = check_workflow(document, bench.operators)
    run = restored_run(stored, "t", workflow, wall_offset_s=0.0)
    service._enter(run)
    await anyio.wait_all_tasks_blocked()
    assert bench.executed == ["a", "b"]
    late = await bench.submit(behind="c")
    assert late.state.nodes["a"].shared == "cache"
    await bench.end(run, late)
    assert service.shared_work.num_held == 0


async def test_what_is_too_large_for_a_run_it_holds_for_nobody() -> None:
    async with WorkflowService(max_run_bytes=1000) as service:
        bench = Bench(service)
        nodes = [echo("a", "x" * 2000, on_error="skip"), echo("b", "y")]
        run = service.submit(check_workflow({"nodes": nodes}, bench.operators), {}, tenant="t")
        await anyio.wait_all_tasks_blocked()
        assert run.state.nodes["a"].status == "skipped"
        assert not run.state.has_ended
        assert service.shared_work.num_held == 0
        service.cancel(run)


async def test_no_tenants_name_is_another_ones_scope(service: WorkflowService) -> None:
    executed = []

    async def wait(params: EchoParams, context: NodeContext) -> None:
        executed.append(context.tenant)
        await anyio.sleep(0.01)

    narrow = sharing(echo("a", "x", share={"scope": "run"}), work=wait)
    mine = service.submit(narrow, {}, tenant="t")
    other = f"t run {mine.id}"
    yours = service.submit(sharing(echo("a", "x"), work=wait), {}, tenant=other)
    await ended(mine)
    await ended(yours)
    assert executed == ["t", other]


async def test_cancelling_one_sharer_leaves_the_other(service: WorkflowService) -> None:
    may_end = anyio.Event()

    async def wait(params: EchoParams, context: NodeContext) -> None:
        await may_end.wait()

    first, second = (
        service.submit(sharing(echo("a", "x"), work=wait), {}, tenant="") for _ in range(2)
    )
    await anyio.wait_all_tasks_blocked()
    service.cancel(first)
    await ended(first)
    may_end.set()
    assert (await ended(second)).state.status == "completed"
    assert second.state.usage == {"tokens": 1}


async def test_nothing_is_said_in_a_run_that_has_ended(service: WorkflowService) -> None:
    runs: list[Run] = []
    may_end = anyio.Event()

    async def speak(params: EchoParams, context: NodeContext) -> None:
        await may_end.wait()
        service.cancel(runs[1])
        context.emit("to those who still listen")

    runs += [service.submit(sharing(echo("a", "x"), work=speak), {}, tenant="") for _ in range(2)]
    await anyio.wait_all_tasks_blocked()
    may_end.set()
    said = {}
    for run in runs:
        await ended(run)
        said[run.id] = [event.type for event in await run.events.after(0)]
    assert said[runs[0].id].count("node.delta") == 1
    assert said[runs[1].id][-1] == "run.cancelled"
    assert "node.delta" not in said[runs[1].id]


async def test_the_time_limit_of_one_sharer_is_its_own(service: WorkflowService) -> None:
    may_end = anyio.Event()

    async def wait(params: EchoParams, context: NodeContext) -> None:
        await may_end.wait()

    hasty = service.submit(sharing(echo("a", "x", timeout_s=0.02), work=wait), {}, tenant="")
    patient = service.submit(sharing(echo("a", "x"), work=wait), {}, tenant="")
    assert (await ended(hasty)).state.status == "failed"
    may_end.set()
    assert (await ended(patient)).state.status == "completed"


async def test_each_sharer_of_a_failure_has_its_own_tries(service: WorkflowService) -> None:
    attempts = []

    async def fail_once(params: EchoParams, context: NodeContext) -> None:
        attempts.append(context.run_id)
        await anyio.sleep(0.01)
        if len(attempts) == 1:
            raise NodeFailed("no", code="busy", is_retryable=True)

    retry = {"max_attempts": 2, "backoff_s": 0.0}
    tries = service.submit(sharing(echo("a", "x", retry=retry), work=fail_once), {}, tenant="")
    gives_up = service.submit(sharing(echo("a", "x"), work=fail_once), {}, tenant="")
    assert (await ended(gives_up)).state.status == "failed"
    assert (await ended(tries)).state.status == "completed"
    assert len(attempts) == 2


async def test_a_bug_in_shared_work_ends_its_runs_only(service: WorkflowService) -> None:
    async def crash(params: EchoParams, context: NodeContext) -> None:
        raise ZeroDivisionError

    for _ in range(2):
        run = await ended(service.submit(sharing(echo("a", "x"), work=crash), {}, tenant=""))
        assert run.state.failure is not None
        assert run.state.failure.code == "internal_error"


async def test_a_run_holds_only_so_much() -> None:
    async with WorkflowService(max_run_bytes=1000) as service:
        fits = await ended(service.submit(checked(echo("a", "x" * 600)), {}, tenant=""))
        assert fits.state.status == "completed"
        nodes = [echo("a", "x" * 600), echo("b", "{{ nodes.a.output.text }}")]
        run = await ended(service.submit(checked(*nodes), {}, tenant=""))
        assert run.state.failure is not None
        assert run.state.failure.code == "output_too_large"


async def test_ended_runs_are_forgotten_when_they_hold_too_much() -> None:
    async with WorkflowService(max_kept_bytes=1500) as service:
        runs = [
            await ended(service.submit(checked(echo("a", "x" * 600)), {}, tenant=""))
            for _ in range(3)
        ]
        assert service.runs(tenant="") == runs[:0:-1]


async def test_templates_of_a_run_take_only_so_long(service: WorkflowService) -> None:
    slow = "{% for a in inputs.l %}{{ a }}{% endfor %}"
    nodes = [echo(f"n{i}", slow, on_error="skip") for i in range(200)]
    begun_s = time.monotonic()
    run = await ended(service.submit(checked(*nodes), {"l": list(range(20_000))}, tenant=""))
    assert time.monotonic() - begun_s < 5
    failures = [state.failure for state in run.state.nodes.values()]
    assert failures[0] is None
    assert failures[-1] is not None
    assert "altogether" in failures[-1].message


async def test_a_node_of_runs_goes_on_where_it_was_when_it_is_tried_again(
    service: WorkflowService,
) -> None:
    seen: list[tuple[str, str]] = []
    first_try = True

    async def hang_once(params: EchoParams, context: NodeContext) -> None:
        nonlocal first_try
        seen.append((params.text, context.idempotency_key))
        if params.text == "y" and first_try:
            first_try = False
            await anyio.sleep(60)

    inner = {"nodes": [echo("e", "{{ inputs.item }}")]}
    node = {
        "id": "m",
        "op": "map",
        "params": {"workflow": inner, "over": ["x", "y"]},
        "timeout_s": 0.2,
        "retry": {"max_attempts": 2, "backoff_s": 0.0},
    }
    run = await ended(service.submit(checked(node, work=hang_once), {}, tenant=""))
    assert run.state.status == "completed"
    # The item that was done is not done again; the other one is, under the same key.
    keys = {text: f"{run.id}:m[{index}].e" for index, text in enumerate("xy")}
    assert sorted(seen) == sorted([("x", keys["x"]), ("y", keys["y"]), ("y", keys["y"])])
    assert run.state.outputs is not None
    items = run.state.outputs["m"]["items"]
    assert [item["e"]["text"] for item in items] == ["x", "y"]
    assert run.inside == {}


async def test_nodes_with_effects_are_each_done(service: WorkflowService) -> None:
    runs = []
    work = Counted()
    for effects in ("none", "write", "write"):
        node = {"id": "a", "op": "counted", "params": {"text": "x"}, "effects": effects}
        workflow = check_workflow({"nodes": [node]}, {"counted": work})
        runs.append(service.submit(workflow, {}, tenant=""))
    work.go.set()
    for run in runs:
        await ended(run)
    assert work.num_runs == 3
    reasons = [run.state.nodes["a"].shared_reason for run in runs]
    assert reasons[1:] == ["it has effects"] * 2


class Counted(Echo):
    """Work that equal nodes share."""

    name = "counted"

    def __init__(self) -> None:
        super().__init__(self._wait)
        self.num_runs = 0
        self.go = anyio.Event()

    def identity(self, params: EchoParams) -> Identity:
        return Identity(content=params.model_dump())

    async def _wait(self, params: EchoParams, context: NodeContext) -> None:
        self.num_runs += 1
        await self.go.wait()


async def test_a_key_stands_for_one_run_of_a_tenant(service: WorkflowService) -> None:
    async def submit(tenant: str, request_hash: bytes = b"h", workflow: Any = None) -> str:
        run = await service.submit_once(
            workflow or checked(echo("a")),
            {},
            tenant=tenant,
            wall_s=0.0,
            key=RunKey(text="k", request_hash=request_hash),
        )
        assert isinstance(run, Run)
        await ended(run)
        return run.id

    first = await submit("t")
    assert await submit("t") == first
    assert await submit("u") != first
    with pytest.raises(KeyReused):
        await submit("t", b"other")
    # A run that is forgotten takes its key along.
    for _ in range(3):
        await ended(service.submit(checked(echo("a")), {}, tenant="t"))
    assert await submit("t", b"other") != first


async def test_a_key_is_free_when_its_run_was_refused(service: WorkflowService) -> None:
    schema = {"type": "object", "required": ["q"]}
    key = RunKey(text="k", request_hash=b"h")
    for inputs in ({}, {}):
        with pytest.raises(InvalidWorkflow):
            await service.submit_once(
                checked(echo("a"), input_schema=schema), inputs, tenant="", wall_s=0.0, key=key
            )
    run = await service.submit_once(checked(echo("a")), {}, tenant="", wall_s=0.0, key=key)
    assert isinstance(run, Run)
    await ended(run)


@pytest.mark.parametrize("place", ["output", "params", "outputs"])
async def test_what_is_too_deep_to_be_kept_fails_where_it_comes_from(
    service: WorkflowService, place: str
) -> None:
    deep: Any = 1
    for _ in range(149):
        deep = [deep]

    async def work(params: EchoParams, context: NodeContext) -> None:
        if place == "output":
            params.items = [deep]

    nodes = [echo("a")]
    fields: dict[str, Any] = {}
    if place == "params":
        nodes[0]["params"] = {"items": [["{{ inputs.deep }}"]]}
    if place == "outputs":
        fields["outputs"] = {"x": [["{{ inputs.deep }}"]]}
    run = service.submit(checked(*nodes, work=work, **fields), {"deep": deep}, tenant="")
    assert (await ended(run)).state.status == "failed"
    failure = run.state.failure
    assert failure is not None
    assert "deeper than 150" in failure.message
