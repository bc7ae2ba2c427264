"""Prompts read by the engine before they are whole, so that it finds them in its prefix cache."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from typing import Final

import msgspec

from server.collector import Collector
from server.gateway import Gateway
from spot.generation import Generation, SamplingParams

# Behind everything that anybody waits for.
_PRIORITY: Final = 1_000_000
_MIN_BLOCKS: Final = 2
_DEFAULT_BLOCK: Final = 16
# Where a text is cut, its last tokens may not be those of the whole.
_NUM_UNSURE: Final = 2
_NUM_KEPT: Final = 1024


class PrefillAhead:
    """Generations of one token, which nobody sees, while seats are free.

    A beginning that was read a while ago is taken for cached still.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._read: OrderedDict[bytes, None] = OrderedDict()

    @property
    def is_idle(self) -> bool:
        """Whether the engine would read now, and hold up nobody."""
        engine = self._gateway.model.engine
        if not self._gateway.prefills_ahead or engine.card is None:
            return False
        return engine.stats.waiting == 0 and engine.stats.running < engine.card.max_num_seqs

    async def read(self, token_ids: list[int], salt: str | None) -> None:
        """Returns when the engine has read them, as far as they fill blocks of its cache. What it
        has read before costs it nothing. Raises EngineUnavailable and EngineFailed."""
        card = self._gateway.model.engine.card
        block = (card.block_size if card else 0) or _DEFAULT_BLOCK
        num_whole = max(0, len(token_ids) - _NUM_UNSURE) // block * block
        token_ids = token_ids[:num_whole]
        key = hashlib.sha256(msgspec.msgpack.encode((token_ids, salt))).digest()
        if num_whole < _MIN_BLOCKS * block or key in self._read:
            return
        self._read[key] = None
        if len(self._read) > _NUM_KEPT:
            self._read.popitem(last=False)
        try:
            num_cached = await self._prefill(token_ids, salt)
        except BaseException:
            self._read.pop(key, None)
            raise
        self._gateway.metrics.prefilled_ahead.inc(max(0, num_whole - num_cached))

    async def _prefill(self, token_ids: list[int], salt: str | None) -> int:
        """How many of the tokens were in the engine's cache already."""
        generation = Generation(
            f"ahead-{secrets.token_hex(8)}",
            token_ids,
            SamplingParams(max_tokens=1, temperature=0),
            priority=_PRIORITY,
            cache_salt=salt,
        )
        num_cached = 0
        with Collector(self._gateway.model.engine, [generation]) as collector:
            while not collector.is_done:
                for _, delta in await collector.receive():
                    num_cached += delta.num_cached_tokens or 0
        return num_cached
