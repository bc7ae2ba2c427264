"""Algorithm 1 of HeraSys, mended: events in, commands out. It never waits and reads no clock.

    RunArrived ──► Ŝ, φ of all nodes
    TicketReady ─► queue of its resource ──► Dispatch ──► DispatchEnded ──► (next in the queue)
                     │ TicketJoined/Left        │ DispatchProgressed ─► Reprioritise
                     └─► Expire                 └─► Abort

The three phases of an event: update A and Ŝ of the runs that it touches; rank their tickets anew
(`workflows.scheduling.ranking`); fill the free slots of the resources that it touches
(`workflows.scheduling.filling`).

An event costs O(w log n) for a run of w tickets among n, plus O(B log n) for each dispatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from workflows.scheduling import messages as m
from workflows.scheduling.active_run import ActiveRun
from workflows.scheduling.alarms import Alarms
from workflows.scheduling.book import Book, runs_of
from workflows.scheduling.costs import CostModel
from workflows.scheduling.filling import Filling
from workflows.scheduling.live_ticket import LiveTicket, Member, Running
from workflows.scheduling.load import Tail
from workflows.scheduling.parameters import SchedulerParameters
from workflows.scheduling.pool import PoolStatistics
from workflows.scheduling.ranking import Ranking, Standing


class Scheduler:
    """The decisions. weights: of tenants, 1 for those not named. Methods are not re-entrant."""

    def __init__(
        self,
        costs: CostModel,
        parameters: SchedulerParameters | None = None,
        *,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.parameters = parameters or SchedulerParameters()
        self._costs = costs
        self._book = Book(self.parameters, weights or {})
        self._ranking = Ranking(self._book, self.parameters)
        self._filling = Filling(self._book, self._ranking, costs, self.parameters)
        self._tail = Tail(self.parameters)
        self._alarms = Alarms()
        self._num_tickets = 0
        self._touched: set[str] = set()
        self._commands: list[m.Command] = []

    @property
    def next_wake_s(self) -> float | None:
        """When a Tick is wanted, if nothing happens before."""
        wakes = list(self._filling.holds.values())
        if (alarm_s := self._alarms.next_s) is not None:
            wakes.append(alarm_s)
        return min(wakes, default=None)

    def statistics(self) -> dict[str, PoolStatistics]:
        """Of each resource."""
        return {name: pool.statistics() for name, pool in self._book.pools.items()}

    def standing(self, ticket_id: str) -> Standing | None:
        """Where a ticket stands, for those who ask why it waits; None once it has ended."""
        live = self._book.tickets.get(ticket_id)
        return None if live is None else self._ranking.standing(live)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known of any run, ticket or dispatch."""
        return not (self._book.runs or self._book.tickets or self._book.running)

    def remaining_service_s(self, run_id: str) -> float:
        """Ŝ of an active run. Raises UnknownRun."""
        return self._ranking.remaining_s(self._book.run(run_id))

    def check_invariants(self) -> None:
        """Raises AssertionError if the state cannot be. For tests and simulation."""
        self._book.check_invariants()

    def handle(self, event: m.Event, *, now_s: float) -> list[m.Command]:
        """What follows from an event. now_s never goes back.

        Raises UnknownRun; then nothing has changed. Events about tickets and dispatches that are
        over are ignored, since they may cross our commands.
        """
        return self.handle_all([event], now_s=now_s)

    def handle_all(self, events: Iterable[m.Event], *, now_s: float) -> list[m.Command]:
        """What follows from several events of one moment: slots are given when all are known.

        Raises UnknownRun; then the events before that one have changed the state.
        """
        self._commands, self._touched = [], set()
        self._book.now_s = now_s
        for event in events:
            self._take_in(event, now_s)
        for live in self._alarms.take_due(now_s):
            self._look_at(live, now_s)
        for resource in sorted(self._touched):
            self._commands += self._filling.fill(resource, relief=self._tail.relief)
        self._commands += self._ranking.sweep()
        return self._commands

    def _take_in(self, event: m.Event, now_s: float) -> None:
        match event:
            case m.TicketReady(ticket=ticket):
                self._ready(ticket, now_s)
            case m.DispatchEnded():
                self._dispatch_ended(event)
            case m.DispatchProgressed():
                self._progressed(event)
            case m.RunArrived():
                self._run_arrived(event, now_s)
            case m.NodesAdded(run_id=run_id, nodes=nodes):
                run = self._book.run(run_id)
                run.add(nodes, self._predict, self.parameters)
                self._commands += self._ranking.grew(run, nodes)
            case m.NodesRemoved(run_id=run_id, node_ids=node_ids):
                run = self._book.run(run_id)
                run.remove(node_ids)
                self._refresh([run])
            case m.NodeEnded(run_id=run_id, node_id=node_id):
                run = self._book.run(run_id)
                run.end(node_id, was_measured=False)
                self._refresh([run])
            case m.RunEnded():
                self._run_ended(event, now_s)
            case m.TicketJoined():
                self._joined(event)
            case m.TicketLeft():
                self._left(event)
            case m.CapacityChanged():
                self._capacity(event)
            case m.Tick():
                self._touched.update(self._filling.holds)

    # Runs ----------------------------------------------------------------------------------

    def _run_arrived(self, event: m.RunArrived, now_s: float) -> None:
        assert event.run_id not in self._book.runs
        run = ActiveRun(event.run_id, event.tenant, now_s, event.deadline_s)
        run.add(event.nodes, self._predict, self.parameters)
        self._book.runs[run.id] = run
        self._ranking.arrived(run)
        self._commands += self._ranking.grew(run, event.nodes)

    def _run_ended(self, event: m.RunEnded, now_s: float) -> None:
        run = self._book.run(event.run_id)
        for live in list(run.tickets.values()):
            for member_run_id, node_id in list(live.members):
                if member_run_id == run.id:
                    self._remove_member(live, run.id, node_id)
        self._ranking.ended(run)
        if event.is_completed:
            self._tail.add(now_s - run.arrived_s)
        del self._book.runs[run.id]

    def _refresh(self, runs: Iterable[ActiveRun]) -> None:
        self._commands += self._ranking.refresh(runs)

    def _predict(self, profile: str, size: m.Size) -> float:
        return self._costs.cost(profile).of(size)

    # Tickets -------------------------------------------------------------------------------

    def _ready(self, ticket: m.Ticket, now_s: float) -> None:
        assert ticket.id not in self._book.tickets
        run = self._book.run(ticket.run_id)
        self._num_tickets += 1
        run.expect(ticket.node_id, self._predict(ticket.profile, ticket.size))
        live = LiveTicket(ticket, self._num_tickets, now_s, run)
        self._book.tickets[ticket.id] = live
        self._add_member(live, run, ticket.node_id)
        self._book.pool(ticket.resource).arrive(live)
        self._touched.add(ticket.resource)
        self._refresh([run])

    def _joined(self, event: m.TicketJoined) -> None:
        run, live = self._book.run(event.run_id), self._book.tickets.get(event.ticket_id)
        if live is not None:
            self._add_member(live, run, event.node_id)

    def _add_member(self, live: LiveTicket, run: ActiveRun, node_id: str) -> None:
        live.members[run.id, node_id] = Member(run, node_id, joined_at=live.done)
        run.tickets[live.ticket.id] = live
        self._set_alarms(live)
        self._commands += self._ranking.rank(live)

    def _left(self, event: m.TicketLeft) -> None:
        live = self._book.tickets.get(event.ticket_id)
        if live is not None and (event.run_id, event.node_id) in live.members:
            self._remove_member(live, event.run_id, event.node_id)
            self._refresh([self._book.run(event.run_id)])

    def _remove_member(self, live: LiveTicket, run_id: str, node_id: str) -> None:
        """The last to leave ends the ticket; a leader hands over."""
        if len(live.members) == 1:
            self._end_ticket(live)
            return
        member = live.members.pop((run_id, node_id))
        member.run.take_back(node_id)
        if all(run is not member.run for run in runs_of(live)):
            del member.run.tickets[live.ticket.id]
        if live.leader is member.run:
            self._hand_over(live)
        self._set_alarms(live)
        self._commands += self._ranking.rank(live)

    def _hand_over(self, live: LiveTicket) -> None:
        """Whoever joined next leads, and its tenant pays from here on."""
        pool = self._book.pool(live.ticket.resource)
        was_queued = live.is_queued
        if was_queued:
            pool.remove(live)
        live.leader = next(runs_of(live))
        if was_queued:
            pool.arrive(live)

    def _end_ticket(self, live: LiveTicket) -> None:
        """Forget a ticket; stop what only it still does."""
        if live.has_ended:
            return
        live.has_ended = True
        if live.is_queued:
            self._book.pool(live.ticket.resource).remove(live)
        del self._book.tickets[live.ticket.id]
        for member in live.members.values():
            member.run.tickets.pop(live.ticket.id, None)
            member.run.take_back(member.node_id)
        for running in live.dispatches.values():
            if not running.is_aborted and all(one.has_ended for one, _ in running.parts):
                running.is_aborted = True
                self._commands.append(m.Abort(dispatch_id=running.id))

    def _set_alarms(self, live: LiveTicket) -> None:
        """Urgent by the earliest deadline of those who want it, expired by the latest.

        It does not expire if one of them has no deadline.
        """
        deadlines = [run.deadline_s for run in runs_of(live)]
        known = [deadline_s for deadline_s in deadlines if deadline_s is not None]
        live.expires_s = max(known) if known and len(known) == len(deadlines) else None
        if live.expires_s is not None:
            self._alarms.add(live.expires_s, live)
        urgent_s = self._ranking.urgent_s(live)
        if urgent_s is not None:
            self._alarms.add(urgent_s, live)

    def _look_at(self, live: LiveTicket, now_s: float) -> None:
        """A queued ticket's alarm: nobody can use it any more, or it has become urgent."""
        if live.expires_s is not None and live.expires_s <= now_s and not live.num_taken:
            runs = tuple(runs_of(live))
            self._end_ticket(live)
            self._commands.append(m.Expire(ticket=live.ticket))
            self._refresh(runs)
            return
        was_urgent = live.is_urgent
        self._commands += self._ranking.rank(live)
        urgent_s = self._ranking.urgent_s(live)
        if not live.is_urgent and not was_urgent and urgent_s is not None:
            self._alarms.add(urgent_s, live)

    # Work ----------------------------------------------------------------------------------

    def _capacity(self, event: m.CapacityChanged) -> None:
        pool = self._book.pool(event.resource)
        pool.num_slots, pool.max_batch = event.num_slots, event.max_batch
        pool.max_wait_s, pool.is_preemptible = event.max_wait_s, event.is_preemptible
        self._touched.add(event.resource)

    def _progressed(self, event: m.DispatchProgressed) -> None:
        running = self._book.running.get(event.dispatch_id)
        if running is None or running.is_aborted:
            return
        self._account(running, done=event.done, service_s=event.service_s)
        self._refresh(run for live, _ in running.parts for run in runs_of(live))

    def _dispatch_ended(self, event: m.DispatchEnded) -> None:
        running = self._book.running.pop(event.dispatch_id, None)
        if running is None:
            return
        runs = [run for live, _ in running.parts for run in runs_of(live)]
        pool = self._book.pool(running.resource)
        pool.ended(is_heavy=running.is_heavy)
        self._touched.add(running.resource)
        is_completed = event.outcome == "completed"
        if is_completed:
            profile = running.parts[0][0].ticket.profile
            self._costs.observe(profile, event.size or running.size, event.service_s)
        for live, part in running.parts:
            excess_s = event.service_s - running.predicted_s
            pool.shares.charge(live.tenant, running.share(part) * excess_s)
            del live.dispatches[running.id]
        if is_completed:
            self._account(running, done=max(1.0, running.done), service_s=event.service_s)
        for live, part in running.parts:
            self._part_ended(live, part, is_completed=is_completed)
        self._refresh(runs)

    def _part_ended(self, live: LiveTicket, part: m.Part, *, is_completed: bool) -> None:
        """A split fails as one: its other parts are stopped."""
        if live.has_ended:
            return
        if not is_completed:
            self._end_ticket(live)
            return
        live.num_done += part.num_items
        if live.num_done == live.ticket.num_items:
            for member in live.members.values():
                member.run.end(member.node_id, was_measured=True)
            self._end_ticket(live)

    def _account(self, running: Running, *, done: float, service_s: float) -> None:
        """Charge what was measured since the last report to the runs that want it.

        done: share of the dispatch. The leader is charged in full; a follower with what was done
        after it had joined. The rest of a try that failed says nothing about T̄, and is left out.
        """
        newly_s, newly = service_s - running.charged_s, max(0.0, done - running.done)
        running.charged_s, running.done = service_s, done
        keep = self.parameters.unfinished_share
        for live, part in running.parts:
            if live.has_ended:
                continue
            before = live.done
            live.done += newly * part.num_items / live.ticket.num_items
            for member in live.members.values():
                charged_s = newly_s * running.share(part)
                if member.run is not live.leader and live.done > before:
                    since = max(before, member.joined_at)
                    charged_s *= (live.done - since) / (live.done - before)
                member.run.progress(member.node_id, live.done, charged_s, keep)
