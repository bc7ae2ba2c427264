"""KV cache space in blocks: who holds how many, and which contents are still there to be reused.

Blocks are counted, not numbered. With prefix caching a full block is known by the hash of all
tokens up to its end; it is shared by those who hold it, and when nobody does it stays until its
space is needed, the longest unused first.
Source: vLLM's `v1/core/block_pool.py` and `kv_cache_manager.py`. As there, two blocks filled with
the same contents at the same time stay two; unlike there only one of them is kept for reuse, and no
block is set aside as the null block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class BlockTable:
    """What one sequence holds.

    hashes: of its full blocks, as far as they were registered; None for a block of its own that
        has a twin.
    num_blocks: all of its blocks; those past `hashes` are being filled.
    """

    hashes: list[int | None] = field(default_factory=list)
    num_blocks: int = 0


class KvBlocks:
    """The blocks of one engine. Every table belongs to one `KvBlocks`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("num_blocks and block_size must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_own = 0
        self._num_holders: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def num_used(self) -> int:
        """Blocks that some sequence holds; what is only kept for reuse does not count."""
        return self._num_own + len(self._num_holders)

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used

    def num_known(self, hashes: Iterable[int]) -> int:
        """How many blocks from the first on are there with these contents."""
        num_known = 0
        for block_hash in hashes:
            if block_hash not in self._num_holders and block_hash not in self._unused:
                break
            num_known += 1
        return num_known

    def can_hold(self, num_tokens: int, known: Iterable[int] = ()) -> bool:
        """Whether a sequence of so many tokens fits now, if its first blocks are the `known`."""
        num_in_use = sum(block_hash in self._num_holders for block_hash in known)
        return self._blocks_for(num_tokens) - num_in_use <= self.num_free

    def share(self, table: BlockTable, known: Iterable[int]) -> None:
        """Let an empty table begin with blocks that are there."""
        assert not table.num_blocks
        for block_hash in known:
            self._unused.pop(block_hash, None)
            self._num_holders[block_hash] = self._num_holders.get(block_hash, 0) + 1
            table.hashes.append(block_hash)
        table.num_blocks = len(table.hashes)

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
            self._unused.popitem(last=False)
        return True

    def register(self, table: BlockTable, hashes: Iterable[int]) -> None:
        """Make the next blocks of the table, now full, known by their hashes."""
        for block_hash in hashes:
            assert len(table.hashes) < table.num_blocks
            if block_hash in self._num_holders or block_hash in self._unused:
                table.hashes.append(None)
                continue
            self._num_own -= 1
            self._num_holders[block_hash] = 1
            table.hashes.append(block_hash)

    def unregister(self, table: BlockTable, num_kept: int) -> None:
        """Take back the registration of all but the first blocks. Nobody shares the others."""
        while len(table.hashes) > num_kept:
            block_hash = table.hashes.pop()
            if block_hash is not None:
                assert self._num_holders.pop(block_hash) == 1
                self._num_own += 1

    def free(self, table: BlockTable) -> None:
        """Take back everything. A sequence's last blocks are the first to be forgotten."""
        self._num_own -= table.num_blocks - len(table.hashes)
        for block_hash in reversed(table.hashes):
            if block_hash is None:
                self._num_own -= 1
            elif self._num_holders[block_hash] > 1:
                self._num_holders[block_hash] -= 1
            else:
                del self._num_holders[block_hash]
                self._unused[block_hash] = None
        table.hashes.clear()
        table.num_blocks = 0

    def check_invariants(self, tables: Iterable[BlockTable]) -> None:
        """Everything held is held by these tables, and all of it fits."""
        num_own = 0
        holders: dict[int, int] = {}
        for table in tables:
            num_own += table.num_blocks - len(table.hashes) + table.hashes.count(None)
            for block_hash in table.hashes:
                if block_hash is not None:
                    holders[block_hash] = holders.get(block_hash, 0) + 1
        assert (num_own, holders) == (self._num_own, self._num_holders)
        assert self.num_used + len(self._unused) <= self.num_blocks
        assert not self._unused.keys() & self._num_holders.keys()

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
