"""Runs that can be asked for: those in memory, and those in the journal."""

from __future__ import annotations

from collections.abc import Sequence

from workflows.errors import RunElsewhere, RunNotFound
from workflows.past_run import PastRun, past_run
from workflows.run import Run
from workflows.service import WorkflowService


class RunHistory:
    """Finds runs: with a journal all that are kept, without one those in memory."""

    def __init__(self, service: WorkflowService) -> None:
        self._service = service
        self._journal = service.journal

    async def look_up(self, run_id: str, *, tenant: str) -> Run | PastRun:
        """A run that is active or kept, here or in the journal. Raises RunNotFound and
        JournalUnavailable."""
        try:
            return self._service.find(run_id, tenant=tenant)
        except RunNotFound:
            if self._journal is None:
                raise
        stored = await self._journal.find(tenant, run_id)
        if stored is None:
            raise RunNotFound(f"there is no run {run_id[:64]!r}")
        try:  # it may have been taken over meanwhile
            return self._service.find(run_id, tenant=tenant)
        except RunNotFound:
            return past_run(stored)

    async def look_up_here(self, run_id: str, *, tenant: str) -> Run | PastRun:
        """As `look_up`, of what all is known of. Raises RunElsewhere, too."""
        run = await self.look_up(run_id, tenant=tenant)
        if isinstance(run, PastRun) and run.state.finished_s is None:
            raise RunElsewhere(f"run {run_id} is at work on another server; ask that one")
        return run

    async def page(
        self, *, tenant: str, limit: int, after: str | None = None
    ) -> Sequence[Run | PastRun]:
        """A tenant's runs, the newest first, from behind the one with the id `after`. Raises
        RunNotFound if there is no such run, and JournalUnavailable."""
        last = None if after is None else await self.look_up(after, tenant=tenant)
        if isinstance(last, Run):
            await self._service.written(last)
        here = {run.id: run for run in self._service.runs(tenant=tenant)}
        if self._journal is None:
            ids = list(here)
            start = ids.index(after) + 1 if after in here else 0
            return [here[run_id] for run_id in ids[start : start + limit]]
        stored = await self._journal.page(tenant, limit=limit, after=after)
        found: dict[str, Run | PastRun] = {
            one.id: here.get(one.id) or past_run(one) for one in stored
        }
        if after is None:  # the newest may not be stored yet
            found = {**here, **found}
        newest = sorted(
            found.values(), key=lambda run: (run.wall_at(run.state.created_s), run.id), reverse=True
        )
        return newest[:limit]
