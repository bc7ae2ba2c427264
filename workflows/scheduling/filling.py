"""Fills free slots: who goes, with whom, in how many parts."""

from __future__ import annotations

from itertools import accumulate

from workflows.scheduling.allocation import Situation, choose
from workflows.scheduling.batch import Unit, cut
from workflows.scheduling.book import Book
from workflows.scheduling.costs import CostModel
from workflows.scheduling.live_ticket import LiveTicket, Running
from workflows.scheduling.messages import Command, Dispatch, Size
from workflows.scheduling.parameters import SchedulerParameters
from workflows.scheduling.pool import Pool
from workflows.scheduling.ranking import Ranking

_MAX_GATHERED = 256


class Filling:
    """Phase 3 of the algorithm. `holds`: until when batches that are not full wait, by resource."""

    def __init__(
        self,
        book: Book,
        ranking: Ranking,
        costs: CostModel,
        parameters: SchedulerParameters,
    ) -> None:
        self._book = book
        self._ranking = ranking
        self._costs = costs
        self._parameters = parameters
        self._num_dispatches = 0
        self.holds: dict[str, float] = {}

    def fill(self, resource: str, *, relief: float) -> list[Command]:
        """Dispatch until the slots are full or nothing waits. relief: see `load.Tail`."""
        pool = self._book.pool(resource)
        self.holds.pop(resource, None)
        balance = pool.balance.update(
            load=pool.load,
            relief=relief,
            now_s=self._book.now_s,
            median_s=self._ranking.median_s,
        )
        commands: list[Command] = []
        while pool.num_free:
            was_contended = pool.is_contended
            tickets = self._gather(pool)
            if not tickets:
                break
            # Nothing waits while less than half of a full load is usual.
            wait_s = max(0.0, 2 * balance - 1) * pool.max_wait_s
            wake_s = min(live.ready_s for live in tickets) + wait_s
            is_full = sum(live.num_left for live in tickets) >= pool.max_batch
            if not is_full and self._book.now_s < wake_s:
                self.holds[resource] = wake_s
                for live in tickets:
                    pool.add(live)
                break
            dispatches = self._dispatch(resource, pool, tickets)
            for _ in dispatches:
                pool.started(is_heavy=tickets[0].is_heavy, was_contended=was_contended)
            commands += dispatches
        return commands

    def _gather(self, pool: Pool) -> list[LiveTicket]:
        """Take the first ticket out of the queue, and those that could go with it.

        They are of one profile, and at most a full batch for each free slot. Tenants take turns in
        being first; who goes along is charged, but does not wait for its turn.
        """
        window_s = self._parameters.fairness_window * self._ranking.median_s
        first = pool.next(window_s)
        if first is None:
            return []
        pool.remove(first)
        tickets = [first]
        others: list[LiveTicket] = []
        num_open = pool.max_batch * pool.num_free - first.num_left if pool.max_batch > 1 else 0
        while num_open > 0 and len(tickets) + len(others) < _MAX_GATHERED:
            live = pool.next(None)
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

    def _dispatch(self, resource: str, pool: Pool, tickets: list[LiveTicket]) -> list[Dispatch]:
        """Choose b, a and k, and start; what does not go is queued again."""
        is_heavy = tickets[0].is_heavy
        choice = choose(self._situation(pool, tickets), self._parameters)
        units = cut(tickets, choice, pool.max_batch)
        for live in tickets:
            if live.num_left:
                pool.add(live)
        dispatches: list[Dispatch] = []
        for unit in units:
            running = self._start(resource, pool, unit, is_heavy=is_heavy)
            dispatch = Dispatch(
                id=running.id,
                resource=resource,
                parts=tuple(part for _, part in unit),
                priority=running.priority,
                split=len(units),
            )
            dispatches.append(dispatch)
        return dispatches

    def _situation(self, pool: Pool, tickets: list[LiveTicket]) -> Situation:
        parameters, first = self._parameters, tickets[0]
        cost = self._costs.cost(first.ticket.profile)
        ends = list(accumulate(live.num_left for live in tickets))
        num_items = ends[-1]
        work_s = sum(cost.marginal_s(live.size_of(live.num_left)) for live in tickets)
        may_split = [live.ticket.max_split for live in tickets if live.ticket.max_split > 1]
        has_waited = (
            self._book.now_s - first.ready_s > parameters.heavy_wait * self._ranking.median_s
        )
        is_owed = first.is_heavy and has_waited and bool(may_split)
        share = int(parameters.min_heavy_share * pool.num_slots)
        return Situation(
            num_items=num_items,
            ends=ends,
            num_waiting=len(pool),
            num_free=pool.num_free,
            num_slots=pool.num_slots,
            max_batch=pool.max_batch,
            max_split=max([len(tickets), *may_split]),
            min_split=max(share, parameters.min_heavy_split) if is_owed else 1,
            overhead_s=cost.overhead_s,
            item_s=work_s / num_items,
            balance=pool.balance.value,
        )

    def _start(self, resource: str, pool: Pool, unit: Unit, *, is_heavy: bool) -> Running:
        """Take a slot, and charge the tenants what it should cost."""
        self._num_dispatches += 1
        size = Size(0.0, 0.0)
        for live, part in unit:
            size += live.size_of(part.num_items)
        running = Running(
            id=self._num_dispatches,
            resource=resource,
            parts=tuple(unit),
            size=size,
            priority=min(self._ranking.engine_priority(live) for live, _ in unit),
            is_heavy=is_heavy,
            predicted_s=self._costs.cost(unit[0][0].ticket.profile).of(size),
        )
        self._book.running[running.id] = running
        for live, part in unit:
            live.dispatches[running.id] = running
            pool.shares.charge(live.tenant, running.predicted_s * running.share(part))
        return running
