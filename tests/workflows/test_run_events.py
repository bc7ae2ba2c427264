import anyio
import pytest

from workflows.run_events import RunEvents

pytestmark = pytest.mark.anyio


async def test_a_reader_gets_what_it_missed_and_then_what_comes() -> None:
    events = RunEvents()
    events.add("a", None, {}, now_s=1.0)
    events.add("b", "n", {"x": 1}, now_s=2.0)
    assert [event.sequence_number for event in await events.after(0)] == [1, 2]
    assert [event.type for event in await events.after(1)] == ["b"]
    seen: list[str] = []

    async def read() -> None:
        number = 2
        while batch := await events.after(number):
            seen.extend(event.type for event in batch)
            number = batch[-1].sequence_number

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        group.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        events.add("c", None, {}, now_s=3.0)
        await anyio.wait_all_tasks_blocked()
        events.close()
    assert seen == ["c", "c"]


async def test_after_the_end_there_is_nothing_to_wait_for() -> None:
    events = RunEvents()
    events.close()
    assert await events.after(0) == []
    assert await events.after(99) == []


async def test_what_was_not_shown_when_it_was_cut_has_not_happened() -> None:
    events = RunEvents()
    events.on_add = lambda: None
    for name in "abc":
        events.add(name, None, {}, now_s=1.0)
    events.show(1)
    events.cut()
    events.add("d", None, {}, now_s=2.0)
    assert [event.type for event in await events.after(0)] == ["a"]
    assert await events.after(1) == []
    assert len(events) == 1


async def test_readers_see_what_is_shown_where_someone_records() -> None:
    events = RunEvents()
    noted: list[int] = []
    events.on_add = lambda: noted.append(len(events))
    for name in "abc":
        events.add(name, None, {}, now_s=1.0)
    assert noted == [1, 2, 3]
    events.show(2)
    assert [event.type for event in await events.after(0)] == ["a", "b"]
    events.close()
    seen: list[list[str]] = []

    async def read() -> None:
        seen.append([event.type for event in await events.after(2)])
        seen.append([event.type for event in await events.after(3)])

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        group.start_soon(events.until_all_shown)
        await anyio.wait_all_tasks_blocked()
        assert seen == []
        events.show(3)
    assert seen == [["c"], []]
