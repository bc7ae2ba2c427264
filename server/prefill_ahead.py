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
        """Returns when the engine has read them. Raises EngineUnavailable and EngineFailed."""
        engine = self._gateway.model.engine
        block = engine.card.block_size if engine.card else 0
        # Whole blocks are cached, and the last token is for the engine to go on from.
        num_whole = (len(token_ids) - 1) // (block or _DEFAULT_BLOCK) * (block or _DEFAULT_BLOCK)
        key = hashlib.sha256(msgspec.msgpack.encode((token_ids[:num_whole], salt))).digest()
        if num_whole < _MIN_BLOCKS * (block or _DEFAULT_BLOCK) or key in self._read:
            return
        self._read[key] = None
        if len(self._read) > _NUM_KEPT:
            self._read.popitem(last=False)
        generation = Generation(
            f"ahead-{secrets.token_hex(8)}",
            token_ids,
            SamplingParams(max_tokens=1, temperature=0),
            priority=_PRIORITY,
            cache_salt=salt,
        )
        with Collector(engine, [generation]) as collector:
            while not collector.is_done:
                await collector.receive()
        self._gateway.metrics.prefilled_ahead.inc(num_whole)
