"""Runs out of what is stored of them, and what is to be stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import orjson

from workflows.checked import CheckedWorkflow
from workflows.errors import InvalidWorkflow
from workflows.run import Run, RunKey, new_run_id
from workflows.run_events import RunEvents
from workflows.run_journal import past_events
from workflows.run_progress import ENDED, replayed
from workflows.run_state import RunState
from workflows.stores.runs import NewRun, StoredRun


def new_row(run: Run, tenant: str) -> NewRun:
    """What the journal keeps of a new run. tenant: as the database knows it."""
    spec = run.state.workflow.spec
    return NewRun(
        id=run.id,
        tenant=tenant,
        name=spec.name,
        document=orjson.dumps(spec.model_dump(mode="json", exclude_unset=True)),
        inputs=orjson.dumps(run.state.inputs),
        created_s=run.wall_s,
        key=None if run.key is None else run.key.text,
        request_hash=run.request_hash,
    )


def restored_run(
    stored: StoredRun, tenant: str, workflow: CheckedWorkflow, *, wall_offset_s: float
) -> Run:
    """A run as it was when its server ended. tenant: as this server calls it. wall_offset_s: from
    the event loop's clock to the wall's."""
    past = {
        path: past_events(values, wall_offset_s=wall_offset_s)
        for path, values in stored.events.items()
    }
    events = past.pop("", [])
    progress = replayed(workflow.nodes, events, created_s=stored.created_s - wall_offset_s)
    key = None
    if stored.key is not None and stored.request_hash is not None:
        key = RunKey(text=stored.key, request_hash=stored.request_hash)
    run = Run(
        id=stored.id,
        tenant=tenant,
        wall_s=stored.created_s,
        key=key,
        state=RunState.restored(workflow, stored.inputs, progress, now_s=anyio.current_time()),
        events=RunEvents(events),
        past=past,
    )
    run.num_bytes = run.state.output_bytes
    return run


def stored_events(stored: StoredRun, *, wall_offset_s: float) -> RunEvents:
    """What had happened in a run itself."""
    return RunEvents(past_events(stored.events.get("", []), wall_offset_s=wall_offset_s))


def end_lost_run(stored: StoredRun, events: RunEvents, error: InvalidWorkflow) -> None:
    """The last events of a run whose document is none any more: nobody can go on with it."""
    now_s = anyio.current_time()
    ids = [node["id"] for node in stored.document["nodes"]]
    progress = replayed(ids, events.since(0), created_s=now_s)
    for name, node in progress.nodes.items():
        if node.status not in ENDED:
            events.add("node.cancelled", name, {}, now_s=now_s)
    message = f"this version of the server cannot go on with it: {error.message}"
    failure = {"code": "cannot_resume", "message": message}
    events.add("run.failed", None, {"error": failure}, now_s=now_s)


def run_inside(run: Run, workflow: CheckedWorkflow, inputs: Mapping[str, Any], path: str) -> Run:
    """The run at a path inside of another one: new, or as it was in an earlier try of its node, or
    before the server's end."""
    root, now_s = run.root or run, anyio.current_time()
    former = root.inside.get(path)
    events = RunEvents(root.past.pop(path, ())) if former is None else former.events
    past = events.since(0)
    created_s = past[0].at_s if past else now_s
    progress = replayed(workflow.nodes, past, created_s=created_s, is_nested=True)
    state = RunState.restored(
        workflow, inputs, progress, now_s=now_s, rendering=root.state.rendering
    )
    if former is None:
        root.num_bytes += state.output_bytes
    inner = root.inside[path] = Run(
        id=new_run_id(),
        tenant=run.tenant,
        wall_s=run.wall_s,
        root=root,
        path=path,
        state=state,
        events=events,
    )
    return inner
