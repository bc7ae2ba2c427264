"""Outputs of generations that have ended, for equal ones that come a while later.

Kept as bytes, so that they take the room that they are counted with, and each taker has its own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from spot.generation import TokenDelta

# Python's own cost of an entry, roughly.
_ENTRY_BYTES = 256


@dataclass(frozen=True, slots=True)
class _Kept:
    output: bytes
    kept_s: float


class KeptOutputs:
    """Whole outputs by key.

    ttl_s: for how long one is replayed. max_bytes: of all of them; those used longest ago go first.
    epoch: how often all were forgotten.
    """

    def __init__(self, *, ttl_s: float, max_bytes: int) -> None:
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self.num_bytes = 0
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: bytes, *, now_s: float) -> TokenDelta | None:
        """The output as one delta, which is the caller's own."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        if now_s - kept.kept_s > self._ttl_s:
            self._drop(key)
            return None
        self._kept.move_to_end(key)
        return msgspec.msgpack.decode(kept.output, type=TokenDelta)

    def keep(self, key: bytes, output: TokenDelta, *, epoch: int, now_s: float) -> None:
        """Keep a whole output, in place of an earlier one of the key.

        epoch: in which it was begun; one of an earlier epoch is not kept. What it took to make it
        is left out: a replay waits for no seat, and is not moved.
        """
        if epoch != self.epoch:
            return
        self._drop(key)
        output = msgspec.structs.replace(output, queue_s=None, num_migrations=0)
        kept = _Kept(msgspec.msgpack.encode(output), now_s)
        if _size(key, kept) > self._max_bytes:
            return
        self._kept[key] = kept
        self.num_bytes += _size(key, kept)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def clear(self) -> None:
        """Forget all, and keep nothing that is being made: from now on it may be made otherwise."""
        self._kept.clear()
        self.num_bytes = 0
        self.epoch += 1

    def _drop(self, key: bytes) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.num_bytes -= _size(key, kept)


def _size(key: bytes, kept: _Kept) -> int:
    return len(key) + len(kept.output) + _ENTRY_BYTES
