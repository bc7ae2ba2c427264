"""KV cache space in blocks: who holds how many, and which contents are still there to be reused.

Blocks are counted; only those known to the prefix cache have numbers. A full block is known by the
hash of all tokens up to its end; it is shared by those who hold it, and when nobody does it stays
until its space is needed, the longest unused first. Two blocks filled with the same contents at the
same time stay two.
Source: vLLM 0.32, `v1/core/block_pool.py` and `kv_cache_manager.py`. Unlike there, no block is set
aside as the null block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class BlockTable:
    """What one sequence holds.

    known: its first blocks, as far as they were registered, by number.
    num_blocks: all of its blocks; those past `known` are being filled.
    """

    known: list[int] = field(default_factory=list)
    num_blocks: int = 0


class KvBlocks:
    """The blocks of one engine. Every table belongs to one `KvBlocks`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("num_blocks and block_size must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_own = 0
        self._num_registered = 0
        self._num_holders: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, int] = {}
        self._twins_of: dict[int, dict[int, None]] = {}

    @property
    def num_used(self) -> int:
        """Blocks that some sequence holds; what is only kept for reuse does not count."""
        return self._num_own + len(self._num_holders)

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used

    def find(self, hashes: Iterable[int]) -> list[int]:
        """The blocks with these contents, from the first on, as far as they are there."""
        found: list[int] = []
        for block_hash in hashes:
            if (twins := self._twins_of.get(block_hash)) is None:
                break
            found.append(next(iter(twins)))
        return found

    def can_hold(self, num_tokens: int, found: Iterable[int] = ()) -> bool:
        """Whether a sequence of so many tokens fits now, if it begins with the `found` blocks."""
        num_in_use = sum(block in self._num_holders for block in found)
        return self._blocks_for(num_tokens) - num_in_use <= self.num_free

    def share(self, table: BlockTable, found: Iterable[int]) -> None:
        """Let an empty table begin with blocks that are there."""
        assert not table.num_blocks
        for block in found:
            self._unused.pop(block, None)
            self._num_holders[block] = self._num_holders.get(block, 0) + 1
            table.known.append(block)
        table.num_blocks = len(table.known)

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Give the table space for so many tokens in all; False, and nothing, if there is none."""
        num_new = self._blocks_for(num_tokens) - table.num_blocks
        if num_new <= 0:
            return True
        if num_new > self.num_free:
            return False
        self._num_own += num_new
        table.num_blocks += num_new
        while self.num_used + len(self._unused) > self.num_blocks:
            self._forget(self._unused.popitem(last=False)[0])
        return True

    def register(self, table: BlockTable, hashes: Iterable[int]) -> None:
        """Make the next blocks of the table known by their hashes."""
        for block_hash in hashes:
            assert len(table.known) < table.num_blocks
            block = self._num_registered = self._num_registered + 1
            self._num_own -= 1
            self._num_holders[block] = 1
            self._hash_of[block] = block_hash
            self._twins_of.setdefault(block_hash, {})[block] = None
            table.known.append(block)

    def unregister(self, table: BlockTable, num_kept: int) -> None:
        """Take back the registration of all but the first blocks. Nobody shares the others."""
        while len(table.known) > num_kept:
            block = table.known.pop()
            assert self._num_holders.pop(block) == 1
            self._num_own += 1
            self._forget(block)

    def free(self, table: BlockTable) -> None:
        """Take back everything. A sequence's last blocks are the first to be forgotten."""
        self._num_own -= table.num_blocks - len(table.known)
        for block in reversed(table.known):
            if self._num_holders[block] > 1:
                self._num_holders[block] -= 1
            else:
                del self._num_holders[block]
                self._unused[block] = None
        table.known.clear()
        table.num_blocks = 0

    def check_invariants(self, tables: Iterable[BlockTable]) -> None:
        """Everything held is held by these tables, and all of it fits."""
        num_own = 0
        holders: dict[int, int] = {}
        for table in tables:
            num_own += table.num_blocks - len(table.known)
            for block in table.known:
                holders[block] = holders.get(block, 0) + 1
        assert (num_own, holders) == (self._num_own, self._num_holders)
        assert self.num_used + len(self._unused) <= self.num_blocks
        assert not self._unused.keys() & self._num_holders.keys()
        assert self._hash_of.keys() == self._unused.keys() | self._num_holders.keys()
        assert self._hash_of.keys() == {
            block for twins in self._twins_of.values() for block in twins
        }

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block)
        twins = self._twins_of[block_hash]
        del twins[block]
        if not twins:
            del self._twins_of[block_hash]

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
