"""Queued tickets in the order of their keys: heaps from which nothing is ever removed inside.

An entry is stale when its ticket has been taken or has another key by now; stale entries are
dropped when they come to the top, and all at once when they are more than half of a heap. So every
operation is O(log n), amortised.
"""

from __future__ import annotations

from collections.abc import Set
from heapq import heapify, heappop, heappush

from workflows.scheduling.live_ticket import LiveTicket

_Entry = tuple[float, int, int, LiveTicket]


class _Heap:
    """Tickets of one queue, with stale entries."""

    __slots__ = ("entries", "num_live")

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.num_live = 0

    def push(self, live: LiveTicket) -> None:
        heappush(self.entries, (live.key, live.order, live.version, live))
        if len(self.entries) > 64 + 2 * self.num_live:
            self.entries = [entry for entry in self.entries if _is_fresh(entry)]
            heapify(self.entries)

    def first(self) -> LiveTicket | None:
        while self.entries:
            entry = self.entries[0]
            if _is_fresh(entry):
                return entry[3]
            heappop(self.entries)
        return None


def _is_fresh(entry: _Entry) -> bool:
    return entry[3].version == entry[2]


class ReadyQueue:
    """The queued tickets of one resource and one class (heavy or not)."""

    def __init__(self) -> None:
        self._all = _Heap()
        self._by_tenant: dict[str, _Heap] = {}

    def __len__(self) -> int:
        return self._all.num_live

    @property
    def tenants(self) -> Set[str]:
        """Those with a queued ticket here."""
        return self._by_tenant.keys()

    def add(self, live: LiveTicket) -> None:
        """Queue a ticket by its key, which must not change while it is here."""
        heap = self._by_tenant.setdefault(live.tenant, _Heap())
        live.version += 1
        for one in (self._all, heap):
            one.num_live += 1
            one.push(live)

    def remove(self, live: LiveTicket) -> None:
        """Take a ticket out, wherever it stands."""
        live.version += 1
        heap = self._by_tenant[live.tenant]
        self._all.num_live -= 1
        heap.num_live -= 1
        if not heap.num_live:
            del self._by_tenant[live.tenant]

    def first(self, tenant: str | None = None) -> LiveTicket | None:
        """The ticket with the least key, of one tenant or of all."""
        if tenant is None:
            return self._all.first()
        heap = self._by_tenant.get(tenant)
        return None if heap is None else heap.first()
