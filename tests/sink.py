"""A sink that gathers what an engine generates."""

from __future__ import annotations

import anyio

from spot.errors import ShuntyardError
from spot.generation import TokenDelta


class Sink:
    """Gathers one generation's output."""

    def __init__(self) -> None:
        self.total: TokenDelta | None = None
        self.num_deltas = 0
        self.error: ShuntyardError | None = None
        self.started = anyio.Event()
        self._ended = anyio.Event()

    def on_delta(self, delta: TokenDelta) -> None:
        assert not self._ended.is_set()
        self.num_deltas += 1
        if self.total is None:
            self.total = delta
        else:
            self.total.merge(delta)
        self.started.set()
        if delta.finish_reason is not None:
            self._ended.set()

    def on_error(self, error: ShuntyardError) -> None:
        assert not self._ended.is_set()
        self.error = error
        self.started.set()
        self._ended.set()

    async def ended(self, within_s: float = 120.0) -> Sink:
        with anyio.fail_after(within_s):
            await self._ended.wait()
        return self

    async def output(self) -> TokenDelta:
        """The whole output of a generation that must succeed."""
        await self.ended()
        assert self.error is None, self.error
        assert self.total is not None
        return self.total
