"""Algorithm 1 of HeraSys, mended: events in, commands out. It never waits and reads no clock.

    RunArrived ──► Ŝ, φ of all nodes
    TicketReady ─► queue of its resource ──► Dispatch ──► DispatchEnded ──► (next in the queue)
                     │ TicketJoined/Left        │ DispatchProgressed ─► Reprioritise
                     └─► Expire                 └─► Abort

The three phases of an event: update A and Ŝ of the runs that it touches, and whether they are long;
rank their tickets anew; fill the free slots of the resources that it touches. All others keep their
keys, which are made so that they do not change by waiting (`workflows.scheduling.priority`). When
the yardsticks themselves have drifted, everything is ranked anew, a few tickets with each event.

An event costs O(w log n) for a run of w tickets among n, plus O(B log n) for each dispatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush

from workflows.scheduling import messages as m
from workflows.scheduling.active_run import ActiveRun
from workflows.scheduling.allocation import Situation, choose
from workflows.scheduling.batch import Unit, cut
from workflows.scheduling.costs import CostModel
from workflows.scheduling.live_ticket import LiveTicket, Member, Running
from workflows.scheduling.load import Tail
from workflows.scheduling.parameters import SchedulerParameters
from workflows.scheduling.partition import Partition
from workflows.scheduling.pool import Pool, PoolStatistics
from workflows.scheduling.priority import KEYS, engine_priority
from workflows.scheduling.scale import Scale

_MAX_GATHERED = 256


class UnknownRun(KeyError):
    """An event names a run that has not arrived, or is over."""


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
        self._weights = weights or {}
        self._key = KEYS[self.parameters.policy]
        self._runs: dict[str, ActiveRun] = {}
        self._tickets: dict[str, LiveTicket] = {}
        self._running: dict[int, Running] = {}
        self._pools: dict[str, Pool] = {}
        self._scale = Scale(window=self.parameters.window, drift=self.parameters.scale_drift)
        self._partition = Partition(self.parameters)
        self._tail = Tail(self.parameters)
        self._sweep: deque[str] = deque()
        self._swept_threshold_s = 0.0
        self._expiries: list[tuple[float, int, LiveTicket]] = []
        self._holds: dict[str, float] = {}
        self._num_tickets = 0
        self._num_dispatches = 0
        self._touched: set[str] = set()
        self._commands: list[m.Command] = []

    # Reading -------------------------------------------------------------------------------

    @property
    def next_wake_s(self) -> float | None:
        """When a Tick is wanted, if nothing happens before; may be early, never late."""
        wakes = list(self._holds.values())
        while self._expiries and not _can_expire(self._expiries[0]):
            heappop(self._expiries)
        if self._expiries:
            wakes.append(self._expiries[0][0])
        return min(wakes, default=None)

    def statistics(self) -> dict[str, PoolStatistics]:
        """Of each resource."""
        return {name: pool.statistics() for name, pool in self._pools.items()}

    def remaining_service_s(self, run_id: str) -> float:
        """Ŝ of an active run. Raises UnknownRun."""
        return self._run(run_id).remaining_service_s(self.parameters, self._scale.service_s)

    # Events --------------------------------------------------------------------------------

    def handle(self, event: m.Event, *, now_s: float) -> list[m.Command]:
        """What follows from an event. now_s never goes back.

        Raises UnknownRun; then nothing has changed. Events about tickets and dispatches that are
        over are ignored, since they may cross our commands.
        """
        self._commands, self._touched = [], set()
        match event:
            case m.TicketReady(ticket=ticket):
                self._ready(ticket, now_s)
            case m.DispatchEnded():
                self._dispatch_ended(event)
            case m.DispatchProgressed():
                self._progressed(event)
            case m.RunArrived():
                self._arrived(event, now_s)
            case m.NodesAdded(run_id=run_id, nodes=nodes):
                run = self._run(run_id)
                run.add(nodes, self._predict, self.parameters)
                self._rate(run, nodes)
            case m.NodeEnded(run_id=run_id, node_id=node_id):
                run = self._run(run_id)
                run.end(node_id, was_measured=False)
                self._refresh(run)
            case m.RunEnded():
                self._run_ended(event, now_s)
            case m.TicketJoined():
                self._joined(event)
            case m.TicketLeft():
                self._left(event)
            case m.CapacityChanged():
                self._capacity(event)
            case m.Tick():
                self._touched.update(self._holds)
        self._expire(now_s)
        for resource in sorted(self._touched):
            self._serve(resource, now_s)
        self._sweep_some()
        return self._commands

    def _arrived(self, event: m.RunArrived, now_s: float) -> None:
        assert event.run_id not in self._runs
        run = ActiveRun(event.run_id, event.tenant, now_s, event.deadline_s)
        self._runs[run.id] = run
        self._partition.add(run, 0.0)
        run.add(event.nodes, self._predict, self.parameters)
        self._scale.add_service(run.total_s)
        if not self._scale.epoch:
            self._scale.update()
        self._rate(run, event.nodes)

    def _rate(self, run: ActiveRun, nodes: tuple[m.PlannedNode, ...]) -> None:
        for node in nodes:
            weight = self.parameters.successor_work
            self._scale.add_contribution(run.contribution(node.id, self._scale.service_s, weight))
        self._refresh(run)

    def _ready(self, ticket: m.Ticket, now_s: float) -> None:
        assert ticket.id not in self._tickets
        run = self._run(ticket.run_id)
        self._num_tickets += 1
        live = LiveTicket(ticket, self._num_tickets, now_s, run)
        self._tickets[ticket.id] = live
        self._add_member(live, run, ticket.node_id)
        self._pool(ticket.resource).arrive(live)
        self._touched.add(ticket.resource)

    def _joined(self, event: m.TicketJoined) -> None:
        run, live = self._run(event.run_id), self._tickets.get(event.ticket_id)
        if live is not None:
            self._add_member(live, run, event.node_id)

    def _add_member(self, live: LiveTicket, run: ActiveRun, node_id: str) -> None:
        live.members[run.id, node_id] = Member(run, node_id, joined_at=live.done)
        run.tickets[live.ticket.id] = live
        self._set_expiry(live)
        self._rank(live)

    def _left(self, event: m.TicketLeft) -> None:
        live = self._tickets.get(event.ticket_id)
        if live is not None and (event.run_id, event.node_id) in live.members:
            self._remove_member(live, event.run_id, event.node_id)
            self._refresh_all([self._run(event.run_id)])

    def _remove_member(self, live: LiveTicket, run_id: str, node_id: str) -> None:
        """The last to leave ends the ticket; a leader hands over."""
        if len(live.members) == 1:
            self._end_ticket(live)
            return
        member = live.members.pop((run_id, node_id))
        if all(other is not member.run for other in _runs_of(live)):
            member.run.tickets.pop(live.ticket.id, None)
        if live.leader is member.run:
            self._hand_over(live)
        self._set_expiry(live)
        self._rank(live)

    def _hand_over(self, live: LiveTicket) -> None:
        pool = self._pool(live.ticket.resource)
        was_queued = live.is_queued
        if was_queued:
            pool.remove(live)
        live.leader = next(_runs_of(live))
        if was_queued:
            pool.arrive(live)

    def _run_ended(self, event: m.RunEnded, now_s: float) -> None:
        run = self._run(event.run_id)
        for live in list(run.tickets.values()):
            for member_run_id, node_id in list(live.members):
                if member_run_id == run.id:
                    self._remove_member(live, run.id, node_id)
        self._partition.remove(run)
        if event.is_completed:
            self._tail.add(now_s - run.arrived_s)
        del self._runs[run.id]

    def _capacity(self, event: m.CapacityChanged) -> None:
        pool = self._pool(event.resource)
        pool.num_slots, pool.max_batch = event.num_slots, event.max_batch
        pool.max_wait_s, pool.is_preemptible = event.max_wait_s, event.is_preemptible
        self._touched.add(event.resource)

    def _progressed(self, event: m.DispatchProgressed) -> None:
        running = self._running.get(event.dispatch_id)
        if running is None or running.is_aborted:
            return
        for live, part in running.parts:
            self._account(running, live, part, event.done, event.service_s)
        running.charged_s, running.done = event.service_s, event.done
        self._refresh_all(run for live, _ in running.parts for run in _runs_of(live))

    def _dispatch_ended(self, event: m.DispatchEnded) -> None:
        running = self._running.pop(event.dispatch_id, None)
        if running is None:
            return
        pool = self._pool(running.resource)
        pool.ended(is_heavy=running.is_heavy)
        self._touched.add(running.resource)
        runs = {run.id: run for live, _ in running.parts for run in _runs_of(live)}
        if event.outcome == "completed":
            size = event.size or running.size
            self._costs.observe(running.parts[0][0].ticket.profile, size, event.service_s)
        num_items = sum(part.num_items for _, part in running.parts)
        for live, part in running.parts:
            share = part.num_items / num_items
            pool.shares.charge(live.tenant, share * (event.service_s - running.predicted_s))
            live.dispatches.pop(running.id, None)
            if not live.has_ended:
                done = max(1.0, running.done)
                self._account(running, live, part, done, event.service_s)
                self._part_ended(live, part, is_completed=event.outcome == "completed")
        self._refresh_all(runs.values())

    def _part_ended(self, live: LiveTicket, part: m.Part, *, is_completed: bool) -> None:
        """A split fails as one: its other parts are stopped."""
        if not is_completed:
            self._end_ticket(live)
            return
        live.num_done += part.num_items
        if live.num_done == live.ticket.num_items:
            for member in live.members.values():
                member.run.end(member.node_id, was_measured=True)
            self._end_ticket(live)

    def _account(
        self, running: Running, live: LiveTicket, part: m.Part, done: float, service_s: float
    ) -> None:
        """Charge what was measured since the last report to the runs that wanted it.

        The leader is charged in full; a follower with what was done after it had joined.
        """
        num_items = sum(one.num_items for _, one in running.parts)
        newly_s = (service_s - running.charged_s) * part.num_items / num_items
        before = live.done
        live.done += max(0.0, done - running.done) * part.num_items / live.ticket.num_items
        step = live.done - before
        keep = self.parameters.unfinished_share
        for index, member in enumerate(live.members.values()):
            since = max(before, member.joined_at)
            share = 1.0 if index == 0 or not step else (live.done - since) / step
            member.run.progress(member.node_id, live.done, newly_s * share, keep)

    # Ranking -------------------------------------------------------------------------------

    def _refresh_all(self, runs: Iterable[ActiveRun]) -> None:
        for run in {run.id: run for run in runs}.values():
            if run.id in self._runs:
                self._refresh(run)

    def _refresh(self, run: ActiveRun) -> None:
        """A run's Ŝ may be another: label it anew, and rank its tickets."""
        remaining_s = run.remaining_service_s(self.parameters, self._scale.service_s)
        self._partition.change(run, remaining_s)
        self._partition.label(run)
        for live in run.tickets.values():
            self._rank(live)

    def _rank(self, live: LiveTicket) -> None:
        """Give a ticket the key and the class that it should have now."""
        is_heavy = self.parameters.policy == "hera" and any(
            member.run.is_long and member.run.nodes[member.node_id].is_heavy
            for member in live.members.values()
        )
        pool = self._pool(live.ticket.resource)
        if live.is_queued:
            if is_heavy == live.is_heavy and self._key_of(live) == live.key:
                return
            pool.remove(live)
            live.is_heavy = is_heavy
            live.key = self._key_of(live)
            pool.add(live)
        else:
            live.is_heavy = is_heavy
            live.key = self._key_of(live)
        if live.dispatches and pool.is_preemptible:
            self._reprioritise(live)

    def _key_of(self, live: LiveTicket) -> float:
        return self._key(live, self.parameters, self._scale)

    def _reprioritise(self, live: LiveTicket) -> None:
        priority = engine_priority(live.key, self.parameters, self._scale)
        for running in live.dispatches.values():
            if len(running.parts) == 1 and running.priority != priority:
                running.priority = priority
                self._commands.append(m.Reprioritise(dispatch_id=running.id, priority=priority))

    def _sweep_some(self) -> None:
        """Go on with ranking everything anew, where the yardsticks have moved."""
        threshold_s = self._partition.threshold_s or 0.0
        drift = 1 + self.parameters.scale_drift
        low_s, high_s = sorted((threshold_s, self._swept_threshold_s))
        if self._scale.update() or (not self._sweep and high_s > drift * low_s):
            self._swept_threshold_s = threshold_s
            self._sweep = deque(self._runs)
        budget = self.parameters.sweep_tickets
        while self._sweep and budget > 0:
            run = self._runs.get(self._sweep.popleft())
            if run is not None:
                budget -= 1 + len(run.tickets)
                self._refresh(run)

    # Filling slots -------------------------------------------------------------------------

    def _serve(self, resource: str, now_s: float) -> None:
        """Dispatch until the slots are full or nothing waits."""
        pool = self._pools[resource]
        self._holds.pop(resource, None)
        balance = pool.balance.update(load=pool.load, relief=self._tail.relief)
        window_s = self.parameters.fairness_window * self._scale.service_s
        while pool.num_free:
            first = pool.next(window_s)
            if first is None:
                return
            tickets = self._gather(pool, first, window_s)
            wake_s = min(live.ready_s for live in tickets) + balance * pool.max_wait_s
            num_items = sum(live.num_left for live in tickets)
            if num_items < pool.max_batch and now_s < wake_s:
                self._holds[resource] = wake_s
                for live in tickets:
                    pool.add(live)
                return
            self._dispatch(resource, pool, tickets, now_s)

    def _gather(self, pool: Pool, first: LiveTicket, window_s: float) -> list[LiveTicket]:
        """Take what could go with `first` out of the queue, at most a batch for each free slot."""
        pool.remove(first)
        tickets = [first]
        others: list[LiveTicket] = []
        num_open = pool.max_batch * pool.num_free - first.num_left if pool.max_batch > 1 else 0
        while num_open > 0 and len(tickets) + len(others) < _MAX_GATHERED:
            live = pool.next(window_s)
            if live is None:
                break
            pool.remove(live)
            if live.ticket.profile == first.ticket.profile:
                tickets.append(live)
                num_open -= live.num_left
            else:
                others.append(live)
        for live in others:
            pool.add(live)
        return tickets

    def _dispatch(self, resource: str, pool: Pool, tickets: list[LiveTicket], now_s: float) -> None:
        """Choose b, a and k, and start; what does not go is queued again."""
        is_heavy = tickets[0].is_heavy
        choice = choose(self._situation(pool, tickets, now_s), self.parameters)
        units = cut(tickets, choice, pool.max_batch)
        for live in tickets:
            if live.num_left:
                pool.add(live)
        for unit in units:
            self._start(resource, pool, unit, is_heavy=is_heavy, split=len(units))

    def _situation(self, pool: Pool, tickets: list[LiveTicket], now_s: float) -> Situation:
        first = tickets[0]
        cost = self._costs.cost(first.ticket.profile)
        num_items = sum(live.num_left for live in tickets)
        work_s = sum(cost.marginal_s(live.size_of(live.num_left)) for live in tickets)
        may_split = [live.ticket.max_split for live in tickets if live.ticket.max_split > 1]
        has_waited = now_s - first.ready_s > self.parameters.heavy_wait * self._scale.service_s
        is_owed = first.is_heavy and has_waited and bool(may_split)
        share = max(1, int(self.parameters.min_heavy_share * pool.num_slots))
        return Situation(
            num_items=num_items,
            num_tickets=len(tickets),
            num_waiting=len(pool),
            num_free=pool.num_free,
            num_slots=max(1, pool.num_slots),
            max_batch=pool.max_batch,
            max_split=max([len(tickets), *may_split]),
            min_split=max(share, self.parameters.min_heavy_split) if is_owed else 1,
            overhead_s=cost.overhead_s,
            item_s=work_s / num_items,
            balance=pool.balance.value,
        )

    def _start(self, resource: str, pool: Pool, unit: Unit, *, is_heavy: bool, split: int) -> None:
        self._num_dispatches += 1
        size = m.Size(0.0, 0.0)
        for live, part in unit:
            size += live.size_of(part.num_items)
        running = Running(
            id=self._num_dispatches,
            resource=resource,
            parts=tuple(unit),
            size=size,
            priority=engine_priority(
                min(live.key for live, _ in unit), self.parameters, self._scale
            ),
            is_heavy=is_heavy,
            predicted_s=self._costs.cost(unit[0][0].ticket.profile).of(size),
        )
        self._running[running.id] = running
        pool.started(is_heavy=is_heavy)
        num_items = sum(part.num_items for _, part in unit)
        for live, part in unit:
            live.dispatches[running.id] = running
            pool.shares.charge(live.tenant, running.predicted_s * part.num_items / num_items)
        self._commands.append(
            m.Dispatch(
                id=running.id,
                resource=resource,
                parts=tuple(part for _, part in unit),
                priority=running.priority,
                split=split,
            )
        )

    # Ends ----------------------------------------------------------------------------------

    def _end_ticket(self, live: LiveTicket) -> None:
        """Forget a ticket; stop what only it still does."""
        if live.has_ended:
            return
        live.has_ended = True
        if live.is_queued:
            self._pool(live.ticket.resource).remove(live)
            self._touched.add(live.ticket.resource)
        del self._tickets[live.ticket.id]
        for run in _runs_of(live):
            run.tickets.pop(live.ticket.id, None)
        for member in live.members.values():
            member.run.take_back(member.node_id)
        for running in live.dispatches.values():
            if not running.is_aborted and all(one.has_ended for one, _ in running.parts):
                running.is_aborted = True
                self._commands.append(m.Abort(dispatch_id=running.id))

    def _set_expiry(self, live: LiveTicket) -> None:
        """The latest deadline of those who want it; none if one of them has none."""
        deadlines = [run.deadline_s for run in _runs_of(live)]
        latest_s: float | None = None
        for deadline_s in deadlines:
            if deadline_s is None:
                latest_s = None
                break
            latest_s = deadline_s if latest_s is None else max(latest_s, deadline_s)
        if latest_s is not None and latest_s != live.expires_s:
            heappush(self._expiries, (latest_s, live.order, live))
        live.expires_s = latest_s

    def _expire(self, now_s: float) -> None:
        """Give up queued tickets that come too late for everybody."""
        while self._expiries and self._expiries[0][0] <= now_s:
            entry = heappop(self._expiries)
            live = entry[2]
            if _can_expire(entry):
                runs = tuple(_runs_of(live))
                self._end_ticket(live)
                self._commands.append(m.Expire(ticket=live.ticket))
                self._refresh_all(runs)

    def _predict(self, profile: str, size: m.Size) -> float:
        return self._costs.cost(profile).of(size)

    def _run(self, run_id: str) -> ActiveRun:
        try:
            return self._runs[run_id]
        except KeyError:
            raise UnknownRun(run_id) from None

    def _pool(self, resource: str) -> Pool:
        pool = self._pools.get(resource)
        if pool is None:
            pool = self._pools[resource] = Pool(self.parameters, self._weights)
        return pool


def _runs_of(live: LiveTicket) -> Iterator[ActiveRun]:
    return (member.run for member in live.members.values())


def _can_expire(entry: tuple[float, int, LiveTicket]) -> bool:
    """Whether an entry of the expiry heap still counts: nothing of the ticket has begun."""
    expires_s, _, live = entry
    return live.is_queued and not live.num_taken and live.expires_s == expires_s
