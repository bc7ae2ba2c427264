"""What the scheduler knows: runs, tickets, what runs, resources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from workflows.scheduling.active_run import ActiveRun
from workflows.scheduling.live_ticket import LiveTicket, Running
from workflows.scheduling.parameters import SchedulerParameters
from workflows.scheduling.pool import Pool


class UnknownRun(KeyError):
    """An event names a run that has not arrived, or is over."""


class Book:
    """The state that the scheduler's parts share. weights: of tenants. now_s: of the last event."""

    def __init__(self, parameters: SchedulerParameters, weights: Mapping[str, float]) -> None:
        self._parameters = parameters
        self._weights = weights
        self.now_s = 0.0
        self.runs: dict[str, ActiveRun] = {}
        self.tickets: dict[str, LiveTicket] = {}
        self.running: dict[int, Running] = {}
        self.pools: dict[str, Pool] = {}

    def run(self, run_id: str) -> ActiveRun:
        try:
            return self.runs[run_id]
        except KeyError:
            raise UnknownRun(run_id) from None

    def pool(self, resource: str) -> Pool:
        """A resource, also one of which nothing is known yet."""
        pool = self.pools.get(resource)
        if pool is None:
            pool = self.pools[resource] = Pool(self._parameters, self._weights)
        return pool

    def check_invariants(self) -> None:
        """Raises AssertionError if the state cannot be. For tests and simulation."""
        for name, pool in self.pools.items():
            running = [one for one in self.running.values() if one.resource == name]
            assert pool.num_running == len(running)
            assert pool.num_running_heavy == sum(one.is_heavy for one in running)
            queued = [
                live
                for live in self.tickets.values()
                if live.ticket.resource == name and live.is_queued
            ]
            assert len(pool) == len(queued)
            assert pool.num_items == sum(live.num_left for live in queued)
        for live in self.tickets.values():
            assert not live.has_ended
            assert live.members
            assert live.is_queued == (live.num_left > 0)
            assert live.is_queued or live.dispatches
            assert any(run is live.leader for run in runs_of(live))
            for run in runs_of(live):
                assert self.runs[run.id] is run
                assert run.tickets[live.ticket.id] is live
        for run in self.runs.values():
            assert run.remaining_s > -1e-6 * max(1.0, run.total_s)
            assert all(name in self.tickets for name in run.tickets)


def runs_of(live: LiveTicket) -> Iterator[ActiveRun]:
    """Whose nodes share a ticket, the leader first."""
    return (member.run for member in live.members.values())
