"""Which pipeline gets the next generation: weighted round robin, and prefixes kept together.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence


class SmoothWeightedRoundRobin:
    """Picks names in proportion to their weights, spread as evenly as can be.

    Each turn every candidate earns its weight, the richest is picked and pays the sum. Over any
    run of turns with the same candidates a name's share differs from its due by less than one turn.
    Source: nginx, `ngx_http_upstream_round_robin`; ShuntServe section 4.3 routes by throughput so.
    """

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def pick(self, weights: Mapping[str, float]) -> str:
        """The next name. weights: positive, of the candidates of this turn. Raises ValueError."""
        return self._turn(weights, None)

    def charge(self, name: str, weights: Mapping[str, float]) -> None:
        """Count a turn that went to `name` for another reason."""
        self._turn(weights, name)

    def forget(self, name: str) -> None:
        self._credit.pop(name, None)

    def _turn(self, weights: Mapping[str, float], name: str | None) -> str:
        if not weights or min(weights.values()) <= 0:
            raise ValueError("weights must be positive, and there must be one")
        total = sum(weights.values())
        # Bounded both ways, so that a name that was passed over for long, or preferred for long,
        # does not flood or starve afterwards.
        bound = 2 * total
        for candidate, weight in weights.items():
            credit = self._credit.get(candidate, 0.0) + weight
            self._credit[candidate] = min(bound, max(-bound, credit))
        chosen = name or max(weights, key=lambda candidate: self._credit[candidate])
        self._credit[chosen] -= total
        return chosen


class PrefixMap:
    """Remembers which pipeline computed which prompt prefix last, block by block.

    block_size: tokens per block. max_blocks: of one prompt that are looked at. capacity: blocks
        remembered, the least recently used go first.
    """

    def __init__(
        self, *, block_size: int = 32, max_blocks: int = 256, capacity: int = 65_536
    ) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._capacity = capacity
        self._homes: OrderedDict[int, str] = OrderedDict()

    def keys(self, token_ids: Sequence[int], salt: Hashable = None) -> list[int]:
        """A key for each whole block, of that block and all before it. salt: what keeps caches
        apart."""
        keys: list[int] = []
        key = hash(salt)
        size = self._block_size
        end = min(len(token_ids) // size, self._max_blocks) * size
        for start in range(0, end, size):
            key = hash((key, tuple(token_ids[start : start + size])))
            keys.append(key)
        return keys

    def find(self, keys: Sequence[int]) -> str | None:
        """The home of the longest known prefix."""
        for key in reversed(keys):
            home = self._homes.get(key)
            if home is not None:
                return home
        return None

    def remember(self, keys: Sequence[int], name: str) -> None:
        for key in keys:
            self._homes[key] = name
            self._homes.move_to_end(key)
        while len(self._homes) > self._capacity:
            self._homes.popitem(last=False)

    def forget(self, name: str) -> None:
        """Nothing of this pipeline is cached any more."""
        for key in [key for key, home in self._homes.items() if home == name]:
            del self._homes[key]


class Router:
    """Weighted round robin, bent by prefix affinity as long as the load stays balanced.

    min_prefix_blocks: shorter prefixes are computed faster than they are worth looking for.
    max_imbalance: a home is passed over when its load is more than so many times the mean of the
        candidates, plus an eighth.
    """

    def __init__(self, *, min_prefix_blocks: int = 2, max_imbalance: float = 1.25) -> None:
        self._turns = SmoothWeightedRoundRobin()
        self._prefixes = PrefixMap()
        self._min_prefix_blocks = min_prefix_blocks
        self._max_imbalance = max_imbalance

    def pick(
        self,
        token_ids: Sequence[int],
        *,
        weights: Mapping[str, float],
        loads: Mapping[str, float],
        salt: Hashable = None,
    ) -> str:
        """The pipeline for a generation with this prompt.

        weights: of the pipelines that may take it. loads: their seats in use, as a share.
        """
        if len(weights) == 1:
            return next(iter(weights))
        keys = self._prefixes.keys(token_ids, salt)
        home = self._prefixes.find(keys) if len(keys) >= self._min_prefix_blocks else None
        if home is not None and home in weights and self._is_balanced(home, loads):
            self._turns.charge(home, weights)
            chosen = home
        else:
            chosen = self._turns.pick(weights)
        self._prefixes.remember(keys, chosen)
        return chosen

    def forget(self, name: str) -> None:
        """A pipeline is gone, or was started anew with empty caches."""
        self._turns.forget(name)
        self._prefixes.forget(name)

    def _is_balanced(self, name: str, loads: Mapping[str, float]) -> bool:
        mean = sum(loads.values()) / len(loads)
        return loads[name] <= self._max_imbalance * mean + 0.125
