"""What one transaction of the journal writes; the journal itself is tested on a real Postgres."""

from typing import Any

import orjson

from workflows.run_events import RunEvents
from workflows.run_journal import Recorded, _Batch, _Log, past_events
from workflows.stores.runs import NewRun


def recorded(**logs: RunEvents) -> Recorded:
    new = NewRun(id="r", tenant="t", name="n", document=b"{}", inputs=b"{}", created_s=100.0)
    run = Recorded(new, wall_offset_s=90.0)
    run.logs = {path.removeprefix("root"): _Log(events) for path, events in logs.items()}
    return run


def log(*names: str, data: dict[str, Any] | None = None) -> RunEvents:
    events = RunEvents()
    for place, name in enumerate(names):
        events.add(name, None, data or {}, now_s=10.0 + place)
    return events


def batch_of(run: Recorded) -> _Batch:
    batch = _Batch()
    batch.add(run)
    return batch


def test_all_that_is_unwritten_of_a_run_is_written_together() -> None:
    run = recorded(root=log("run.created", "node.ready"), inner=log("run.created"))
    batch = batch_of(run)
    assert batch.new == [run.new]
    assert [(one.path, one.first_number) for one in batch.chunks] == [("", 1), ("inner", 1)]
    assert batch.ends == []
    # What was not marked as written is written again, with what has come since.
    run.is_stored = True
    run.logs[""].events.add("node.started", "a", {}, now_s=12.0)
    again = batch_of(run)
    assert again.new == []
    assert len(orjson.loads(again.chunks[0].events)) == 3
    for one, count in again.logs:
        one.num_written = count
    assert run.is_written
    assert batch_of(run).chunks == []


def test_the_end_of_a_run_is_written_with_its_last_event() -> None:
    error = {"code": "c", "message": "m"}
    run = recorded(root=log("run.created", "run.failed", data={"error": error}))
    (end,) = batch_of(run).ends
    assert (end.status, end.error, end.finished_s, end.name) == ("failed", error, 101.0, "n")
    assert end.num_bytes == len(batch_of(run).chunks[0].events)


def test_the_end_of_a_run_inside_is_not_that_of_the_run() -> None:
    run = recorded(root=log("run.created"), inner=log("run.created", "run.completed"))
    assert batch_of(run).ends == []


def test_events_are_read_as_they_were_by_any_clock() -> None:
    events = log("run.created", "node.ready", data={"x": "ü\0"})
    (chunk,) = batch_of(recorded(root=events)).chunks
    values = orjson.loads(chunk.events)
    assert past_events(values, wall_offset_s=90.0) == events.since(0)
    later = past_events(values, wall_offset_s=40.0)
    assert [event.at_s for event in later] == [60.0, 61.0]
