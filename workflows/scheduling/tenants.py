"""Each tenant its share: none runs ahead of another that waits by more than a window.

Within the window the keys alone decide, so that the shortest run goes first whoever's it is. Beyond
it, the tenant that lags most is served. Slot time over weight is compared, for each resource apart;
a tenant that comes back from a pause starts level with the one that lags most, and brings no
credit. (Start-time fair queueing with a tolerance: Goyal, Vin, Cheng 1996.)

So while two tenants wait, their slot times over weights differ by at most the window and one
dispatch of each; and a tenant with work waiting is served at no less than its weight's share.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

_MAX_KNOWN = 4096


class TenantShares:
    """Slot time of each tenant of one resource, over its weight, in seconds.

    weights: 1 for those who are not named.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._used_s: dict[str, float] = {}
        self._most_s = 0.0

    def used_s(self, tenant: str) -> float:
        return self._used_s.get(tenant, 0.0)

    def arrive(self, tenant: str, backlogged: Collection[str]) -> None:
        """A tenant that had nothing queued has something. backlogged: the others that wait."""
        level_s = min((self.used_s(other) for other in backlogged), default=self._most_s)
        if len(self._used_s) >= _MAX_KNOWN:
            self._used_s = {name: self._used_s[name] for name in backlogged}
        self._used_s[tenant] = max(self.used_s(tenant), level_s)

    def charge(self, tenant: str, service_s: float) -> None:
        """service_s: predicted when it starts; the difference, of either sign, when it ends."""
        used_s = self.used_s(tenant) + service_s / self._weights.get(tenant, 1.0)
        self._used_s[tenant] = used_s
        self._most_s = max(self._most_s, used_s)

    def lagging(self, backlogged: Collection[str], first: str, window_s: float) -> str | None:
        """Who must be served instead of `first`, if any. O(tenants that wait)."""
        least = min(backlogged, key=self.used_s)
        is_behind = self.used_s(first) - self.used_s(least) > window_s
        return least if is_behind else None
