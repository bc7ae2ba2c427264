"""One resource: its slots, who waits for them, and who is next."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from workflows.scheduling.live_ticket import LiveTicket
from workflows.scheduling.load import Balance
from workflows.scheduling.parameters import SchedulerParameters
from workflows.scheduling.ready_queue import ReadyQueue
from workflows.scheduling.reservation import Reservation
from workflows.scheduling.tenants import TenantShares


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    num_slots: int
    num_running: int
    num_queued: int
    num_queued_heavy: int
    num_queued_items: int
    balance: float


class Pool:
    """Slots and queues of a resource. Before its capacity is known it has no slots."""

    def __init__(self, parameters: SchedulerParameters, weights: Mapping[str, float]) -> None:
        self.num_slots = 0
        self.max_batch = 1
        self.max_wait_s = 0.0
        self.is_preemptible = False
        self.num_running = 0
        self.num_running_heavy = 0
        self.num_items = 0
        self.balance = Balance(parameters)
        self.shares = TenantShares(weights)
        self._normal, self._heavy = ReadyQueue(), ReadyQueue()
        self._reservation = Reservation(
            parameters.reserved_share if parameters.policy == "hera" else 0.0
        )

    def __len__(self) -> int:
        """Queued tickets."""
        return len(self._normal) + len(self._heavy)

    @property
    def num_free(self) -> int:
        return max(0, self.num_slots - self.num_running)

    @property
    def load(self) -> float:
        """Dispatches that run or are waiting to be formed, for each slot."""
        waiting = max(len(self) / self.max_batch, self.num_items / self.max_batch)
        return (self.num_running + waiting) / max(1, self.num_slots)

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            num_slots=self.num_slots,
            num_running=self.num_running,
            num_queued=len(self),
            num_queued_heavy=len(self._heavy),
            num_queued_items=self.num_items,
            balance=self.balance.value,
        )

    def arrive(self, live: LiveTicket) -> None:
        """Queue a ticket that was not here before."""
        backlogged = self._backlogged()
        if live.tenant not in backlogged:
            self.shares.arrive(live.tenant, backlogged)
        self.add(live)

    def add(self, live: LiveTicket) -> None:
        """Queue a ticket in its class, also again."""
        self._queue_of(live).add(live)
        self.num_items += live.num_left
        live.is_queued = True

    def remove(self, live: LiveTicket) -> None:
        self._queue_of(live).remove(live)
        self.num_items -= live.num_left
        live.is_queued = False

    def next(self, window_s: float | None) -> LiveTicket | None:
        """Who is first for a free slot.

        The heavy queue, while its reservation is due; else the lower key of both. A tenant that
        lags by more than `window_s` of slot time comes before either; None: by the keys alone.
        """
        normal, heavy = self._normal.first(), self._heavy.first()
        if heavy is None or normal is None:
            first = heavy or normal
        elif self._reservation.is_due(
            num_slots=self.num_slots, num_running_heavy=self.num_running_heavy
        ):
            first = heavy
        else:
            first = min(heavy, normal, key=_rank)
        if first is None or window_s is None:
            return first
        return self._fairest(first, window_s)

    @property
    def is_contended(self) -> bool:
        """Whether both heavy and other work waits."""
        return bool(len(self._normal) and len(self._heavy))

    def started(self, *, is_heavy: bool, was_contended: bool) -> None:
        """A dispatch takes a slot. was_contended: when it was chosen."""
        if was_contended:
            self._reservation.count(is_heavy=is_heavy)
        self.num_running += 1
        self.num_running_heavy += is_heavy

    def ended(self, *, is_heavy: bool) -> None:
        self.num_running -= 1
        self.num_running_heavy -= is_heavy

    def _fairest(self, first: LiveTicket, window_s: float) -> LiveTicket:
        backlogged = self._backlogged()
        if len(backlogged) == 1:
            return first
        lagging = self.shares.lagging(backlogged, first.tenant, window_s)
        if lagging is None or lagging == first.tenant:
            return first
        own = (self._normal.first(lagging), self._heavy.first(lagging))
        return min((live for live in own if live is not None), key=_rank)

    def _backlogged(self) -> Set[str]:
        if not len(self._heavy):
            return self._normal.tenants
        return self._normal.tenants | self._heavy.tenants

    def _queue_of(self, live: LiveTicket) -> ReadyQueue:
        return self._heavy if live.is_heavy else self._normal


def _rank(live: LiveTicket) -> tuple[float, int]:
    return live.key, live.order
