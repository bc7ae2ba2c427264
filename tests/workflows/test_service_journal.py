"""The service with its journal, in virtual time, on tables in memory; `test_safety` makes up what
may happen to it, and `tests/integration/test_durable_runs.py` kills real ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from unittest import mock

import anyio
import pytest

from spot.virtual_time import run_virtual
from tests.workflows.fakes import EchoParams, checked, echo, operators
from tests.workflows.memory_runs import MemoryRuns, MemoryStore
from workflows.checked import check_workflow
from workflows.errors import JournalUnavailable
from workflows.operators.base import NodeContext
from workflows.past_run import PastRun
from workflows.run import Run, RunKey
from workflows.run_journal import RunJournal
from workflows.service import WorkflowService


async def nap(params: EchoParams, context: NodeContext) -> None:
    await anyio.sleep(1.0)


@asynccontextmanager
async def serving(memory: MemoryRuns, *, base_s: float = 0.0) -> AsyncIterator[WorkflowService]:
    """base_s: the wall clock at the start."""
    journal = RunJournal(
        MemoryStore(memory),  # type: ignore[arg-type]
        now_wall_s=lambda: base_s + anyio.current_time(),
        identities={},
        tenants=["t"],
    )
    compiled = partial(check_workflow, operators=operators(nap))
    with mock.patch("workflows.run_journal.store", memory):
        async with WorkflowService(journal=journal, compiled=compiled) as service:
            await service.ready()
            yield service


def submitted(service: WorkflowService, num_nodes: int, **fields: float) -> Run:
    assert service.journal is not None
    nodes = [echo("n0")]
    nodes += [echo(f"n{i}", f"{{{{ nodes.n{i - 1}.output.text }}}}") for i in range(1, num_nodes)]
    workflow = checked(*nodes, work=nap, **fields)
    return service.submit(workflow, {}, tenant="t", wall_s=service.journal.now_wall_s())


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_what_a_server_that_stops_can_write_no_more_is_not_shown(num_nodes: int) -> None:
    async def main() -> None:
        memory = MemoryRuns(lambda *_: None)
        async with serving(memory) as service:
            run = submitted(service, num_nodes)
            await anyio.sleep(0.998)
            # The first node ends while the journal gives back its lock.
            await service.suspend()
            assert run.state.nodes["n0"].status == "completed"
            assert run.is_suspended
            shown = [event.type for event in await run.events.after(0)]
            assert await run.events.after(len(shown)) == []
            assert shown == [event[0] for event in memory.stored(run.id).events[""]]
            assert shown[-1] == "node.started"
        async with serving(memory) as service:
            await anyio.sleep(10.0)
            assert not service.num_active
        assert memory.rows[run.id].status == "completed"

    run_virtual(main)


def test_a_run_whose_deadline_passed_while_no_server_was_there_is_ended_by_the_next() -> None:
    memory = MemoryRuns(lambda *_: None)

    async def stops() -> None:
        async with serving(memory) as service:
            submitted(service, 9, deadline_s=5.0)
            await anyio.sleep(0.5)

    async def goes_on() -> None:
        async with serving(memory, base_s=100.0) as service:
            other = submitted(service, 1)
            await anyio.sleep(2.0)
            assert other.state.status == "completed"

    run_virtual(stops)
    run_virtual(goes_on)
    assert sorted(row.status for row in memory.rows.values()) == ["completed", "incomplete"]


def test_a_service_that_is_cancelled_leaves_its_runs_to_the_next() -> None:
    async def main() -> None:
        memory = MemoryRuns(lambda *_: None)
        with anyio.CancelScope() as scope:
            async with serving(memory) as service:
                run = submitted(service, 2)
                await anyio.sleep(0.5)
                scope.cancel()
                await anyio.sleep(0.5)
        assert run.is_suspended
        assert run.ended.is_set()
        assert memory.rows[run.id].finished_s is None
        assert not memory.connections

    run_virtual(main)


def test_a_run_that_waited_for_its_key_knows_when_it_began() -> None:
    async def main() -> None:
        memory = MemoryRuns(lambda *_: None)
        runs: list[Run | PastRun] = []
        async with serving(memory) as service:
            assert service.journal is not None
            await anyio.sleep(0.1)
            ask = partial(
                service.submit_once,
                checked(echo("n0"), work=nap),
                {},
                tenant="t",
                wall_s=service.journal.now_wall_s(),
                key=RunKey(text="k", request_hash=b"h"),
            )

            async def one() -> None:
                with suppress(JournalUnavailable):
                    runs.append(await ask())

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one)
                tasks.start_soon(one)
                await anyio.sleep(0.002)
                memory.lose_connections()  # in which the first was about to be stored
            (run,) = runs
            assert isinstance(run, Run)
            assert run.wall_at(anyio.current_time()) == pytest.approx(service.journal.now_wall_s())

    run_virtual(main)


def test_what_cannot_be_written_of_one_run_keeps_no_other_from_it() -> None:
    async def main() -> None:
        memory = MemoryRuns(lambda *_: None)
        async with serving(memory) as service:
            bad, good = submitted(service, 2), submitted(service, 2)
            await anyio.sleep(0.5)
            bad.events.add("node.delta", "n0", {"text": object()}, now_s=anyio.current_time())
            await anyio.sleep(5.0)
            late = submitted(service, 1)
            await anyio.sleep(5.0)
            assert not service.num_active
            await service.written(late)
            assert {run.state.status for run in (bad, good, late)} == {"completed"}
            # Nobody waits for what is not written any more.
            await bad.events.until_all_shown()
        assert [memory.rows[run.id].status for run in (good, late)] == ["completed"] * 2

    run_virtual(main)
