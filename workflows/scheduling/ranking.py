"""Keeps runs labelled and tickets ranked, with little work for each event."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from workflows.scheduling.active_run import ActiveRun
from workflows.scheduling.book import Book, runs_of
from workflows.scheduling.live_ticket import LiveTicket
from workflows.scheduling.messages import Command, PlannedNode, Reprioritise
from workflows.scheduling.parameters import SchedulerParameters
from workflows.scheduling.partition import Partition
from workflows.scheduling.priority import KEYS, engine_priority, least_remaining_s, score
from workflows.scheduling.scale import Scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A ticket's rank and what it is made of.

    key: lower goes first; for `hera` a time. gain_s: how much earlier than its run it counts as
    having come, below 0 for later; 0 under a policy whose keys are no such times. score: π.
    remaining_s: Ŝ, the least of those who share it. is_heavy: it may use reserved slots. is_urgent:
    it must go on now to meet a deadline.
    """

    key: float
    gain_s: float
    score: float
    remaining_s: float
    is_heavy: bool
    is_urgent: bool
    is_queued: bool
    num_sharers: int


class Ranking:
    """Labels, keys, and the yardsticks that they are measured with.

    An event ranks anew the tickets of the runs that it touches. All others keep their keys, which
    do not change by waiting. When a yardstick has drifted, `sweep` ranks everything anew, a few
    tickets with each event, so that none is slow.
    """

    def __init__(self, book: Book, parameters: SchedulerParameters) -> None:
        self._book = book
        self._parameters = parameters
        self._policy = KEYS[parameters.policy]
        self._scale = Scale(window=parameters.window, drift=parameters.scale_drift)
        self._partition = Partition(parameters)
        self._stale: deque[str] = deque()
        self._swept_threshold_s = 0.0

    @property
    def median_s(self) -> float:
        """The unit of most parameters: the median service of recent runs."""
        return self._scale.service_s

    def remaining_s(self, run: ActiveRun) -> float:
        """Ŝ."""
        return run.remaining_service_s(self._parameters, self._scale.service_s)

    def standing(self, live: LiveTicket) -> Standing:
        arrived_s = min(run.arrived_s for run in runs_of(live))
        return Standing(
            key=live.key,
            gain_s=arrived_s - live.key if self._parameters.policy == "hera" else 0.0,
            score=score(live, self._parameters, self._scale),
            remaining_s=least_remaining_s(live, self._parameters, self._scale),
            is_heavy=live.is_heavy,
            is_urgent=live.is_urgent,
            is_queued=live.is_queued,
            num_sharers=len(live.members),
        )

    def arrived(self, run: ActiveRun) -> None:
        """Count a new run; its nodes are known, but not yet in the yardsticks."""
        self._partition.add(run, 0.0)
        self._scale.add_service(run.total_s)
        if not self._scale.epoch:
            self._scale.update()

    def grew(self, run: ActiveRun, nodes: Iterable[PlannedNode]) -> list[Command]:
        """Count the φ of new nodes, and rank the run."""
        for node in nodes:
            weight = self._parameters.successor_work
            self._scale.add_contribution(run.contribution(node.id, self.median_s, weight))
        return self.refresh([run])

    def ended(self, run: ActiveRun) -> None:
        self._partition.remove(run)

    def refresh(self, runs: Iterable[ActiveRun]) -> list[Command]:
        """These runs' Ŝ may be others: label them anew, and rank their tickets.

        Runs that are over are left out.
        """
        commands: list[Command] = []
        for run in {run.id: run for run in runs}.values():
            if run.id not in self._book.runs:
                continue
            self._partition.change(run, self.remaining_s(run))
            self._partition.label(run)
            for live in run.tickets.values():
                commands += self.rank(live)
        return commands

    def rank(self, live: LiveTicket) -> list[Command]:
        """Give a ticket the class and the key that it should have now."""
        is_heavy = self._is_heavy(live)
        urgent_s = self.urgent_s(live)
        live.is_urgent = urgent_s is not None and urgent_s <= self._book.now_s
        if not live.is_queued:
            live.is_heavy, live.key = is_heavy, self._key(live)
        elif is_heavy != live.is_heavy or self._key(live) != live.key:
            pool = self._book.pool(live.ticket.resource)
            pool.remove(live)
            live.is_heavy = is_heavy
            live.key = self._key(live)
            pool.add(live)
        return self._reprioritise(live) if live.dispatches else []

    def urgent_s(self, live: LiveTicket) -> float | None:
        """When the first of its runs must go on to meet its deadline; None without deadlines."""
        slack = self._parameters.deadline_slack
        times = [
            run.deadline_s - slack * self.remaining_s(run)
            for run in runs_of(live)
            if run.deadline_s is not None
        ]
        return min(times, default=None)

    def engine_priority(self, live: LiveTicket) -> int:
        return engine_priority(live.key, self._parameters, self._scale)

    def sweep(self) -> list[Command]:
        """Go on with ranking everything anew, where the yardsticks have moved."""
        threshold_s = self._partition.threshold_s or 0.0
        low_s, high_s = sorted((threshold_s, self._swept_threshold_s))
        has_moved = high_s > (1 + self._parameters.scale_drift) * low_s
        if self._scale.update() or (has_moved and not self._stale):
            self._swept_threshold_s = threshold_s
            self._stale = deque(self._book.runs)
        commands: list[Command] = []
        budget = self._parameters.sweep_tickets
        while self._stale and budget > 0:
            run = self._book.runs.get(self._stale.popleft())
            if run is not None:
                budget -= 1 + len(run.tickets)
                commands += self.refresh([run])
        return commands

    def _is_heavy(self, live: LiveTicket) -> bool:
        """y; a shared ticket is heavy if it is so for one of its runs."""
        return self._parameters.policy == "hera" and any(
            member.run.is_long and member.run.nodes[member.node_id].is_heavy
            for member in live.members.values()
        )

    def _key(self, live: LiveTicket) -> float:
        return self._policy(live, self._parameters, self._scale)

    def _reprioritise(self, live: LiveTicket) -> list[Command]:
        """Tell the engines, where they can be told. A batch keeps the priority that it has."""
        if not self._book.pool(live.ticket.resource).is_preemptible:
            return []
        priority = self.engine_priority(live)
        commands: list[Command] = []
        for running in live.dispatches.values():
            if len(running.parts) == 1 and running.priority != priority:
                running.priority = priority
                commands.append(Reprioritise(dispatch_id=running.id, priority=priority))
        return commands
