"""Events of the fleet, for watchers that come and go."""

from __future__ import annotations

import anyio
import pytest

from spot.fleet_events import FleetEvents

pytestmark = pytest.mark.anyio


async def test_a_watcher_gets_what_it_has_not_seen() -> None:
    events = FleetEvents()
    events.add("added", "a")
    events.add("ready", "a")
    assert [event.kind for event in await events.after(0)] == ["added", "ready"]
    assert [event.number for event in await events.after(1)] == [2]


async def test_a_watcher_waits_for_what_comes() -> None:
    events = FleetEvents()
    heard: list[str] = []

    async def watch() -> None:
        heard.extend(event.kind for event in await events.after(0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await anyio.lowlevel.checkpoint()
        assert not heard
        events.add("down", "a", "killed")
    assert heard == ["down"]


async def test_a_number_of_another_run_starts_anew() -> None:
    events = FleetEvents()
    events.add("added", "a")
    assert [event.number for event in await events.after(68)] == [1]


async def test_only_the_last_events_are_kept() -> None:
    events = FleetEvents(max_kept=3)
    for _ in range(10):
        events.add("ready", "a")
    assert [event.number for event in await events.after(0)] == [8, 9, 10]
