from typing import Any

import anyio
import orjson
import pytest

from tests.workflows.fakes import checked, echo, operators
from workflows.checked import check_workflow
from workflows.errors import InvalidWorkflow, Problem
from workflows.past_run import past_run
from workflows.run import Run, RunKey
from workflows.run_restoring import end_lost_run, new_row, restored_run, stored_events
from workflows.run_state import RunState
from workflows.stores.runs import StoredRun

pytestmark = pytest.mark.anyio

EVENTS: list[list[Any]] = [
    ["run.created", 1000.0, None, {}],
    ["node.ready", 1000.0, "a", {}],
    ["node.started", 1001.0, "a", {"attempt": 1}],
]


def stored(**fields: Any) -> StoredRun:
    given: dict[str, Any] = {
        "document": {"nodes": [echo("a", "x"), echo("b", "{{ nodes.a.output.text }}")]},
        "inputs": {"q": 1},
        "events": {"": EVENTS},
        **fields,
    }
    return StoredRun(
        id="run_1",
        tenant="key:abc",
        owner=1,
        name="n",
        error=None,
        status="in_progress",
        created_s=999.5,
        finished_s=None,
        **given,
    )


async def test_a_new_run_is_stored_as_it_can_be_read_again() -> None:
    workflow = checked(echo("a", "{{ inputs.q }}"), name="n", deadline_s=5.0)
    state = RunState(workflow, {"q": "x"}, now_s=1.0)
    key = RunKey(text="k", request_hash=b"h")
    row = new_row(Run(id="run_1", tenant="t", wall_s=9.0, state=state, key=key), "key:abc")
    assert (row.tenant, row.name, row.key, row.request_hash) == ("key:abc", "n", "k", b"h")
    assert (row.created_s, orjson.loads(row.inputs)) == (9.0, {"q": "x"})
    again = check_workflow(orjson.loads(row.document), operators())
    assert again.spec == workflow.spec


async def test_a_restored_run_keeps_its_times_on_the_wall() -> None:
    now_s = anyio.current_time()
    offset_s = 1010.0 - now_s
    workflow = check_workflow(stored().document, operators())
    run = restored_run(stored(key="k", request_hash=b"h"), "t", workflow, wall_offset_s=offset_s)
    assert (run.tenant, run.key) == ("t", RunKey(text="k", request_hash=b"h"))
    assert run.wall_at(now_s) == pytest.approx(1010.0)
    started_s = run.state.nodes["a"].started_s
    assert started_s is not None
    assert run.wall_at(started_s) == pytest.approx(1001.0)
    assert run.state.inputs == {"q": 1}


async def test_a_run_that_cannot_go_on_ends_as_failed() -> None:
    events = stored_events(stored(), wall_offset_s=0.0)
    problem = Problem(path="nodes.0.op", code="unknown_operator", message="there is no 'echo'")
    end_lost_run(stored(), events, InvalidWorkflow([problem]))
    fresh = events.since(len(EVENTS))
    assert [(event.type, event.node_id) for event in fresh] == [
        ("node.cancelled", "a"),
        ("node.cancelled", "b"),
        ("run.failed", None),
    ]
    assert fresh[-1].data["error"]["code"] == "cannot_resume"
    assert "'echo'" in fresh[-1].data["error"]["message"]


async def test_a_past_run_is_shown_without_its_operators() -> None:
    run = past_run(stored(document={"nodes": [{"id": "a", "op": "gone"}, {"id": "b", "op": "x"}]}))
    assert {name: node.status for name, node in run.state.nodes.items()} == {
        "a": "running",
        "b": "pending",
    }
    assert run.wall_at(run.state.created_s) == 999.5
