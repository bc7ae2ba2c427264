"""Where the deltas of one request's generations wait for the task that answers it.

Deltas that arrive while the client is slow are merged, so a request never holds more than its own
output, however long nobody reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable
from typing import Protocol

from spot.engines.base import DeltaSink
from spot.errors import ShuntyardError
from spot.generation import Generation, TokenDelta
from spot.shared_generations import Sharing


class Generations(Protocol):
    """Where generations run: an engine, or what shares it."""

    def submit(self, generation: Generation, sink: DeltaSink) -> Sharing | None:
        """As `Engine.submit`; if it has the output of another one, whether that still runs."""

    def abort(self, generation_id: str) -> None:
        """As `Engine.abort`."""


class DeltaLog(Protocol):
    """Is told of each delta before it is merged, and of what was merged."""

    def made(self, index: int, delta: TokenDelta) -> None:
        """A delta came from the engine."""

    def taken(self, index: int) -> None:
        """All deltas of a generation since the last time were received as one."""


class _Sink:
    __slots__ = ("_collector", "_index")

    def __init__(self, collector: Collector, index: int) -> None:
        self._collector = collector
        self._index = index

    def on_delta(self, delta: TokenDelta) -> None:
        self._collector.put(self._index, delta)

    def on_error(self, error: ShuntyardError) -> None:
        self._collector.fail(error)


class Collector:
    """The generations of one request, run together. A context manager: leaving aborts the rest.

    stream_interval: tokens to gather before they are handed on; the first and the last never wait.
    finished: generations of which nothing is left to be run.
    num_shared: how many have the output of an equal one. num_from_cache: of these, of one that had
    ended.
    """

    def __init__(
        self,
        engine: Generations,
        generations: list[Generation],
        *,
        stream_interval: int = 1,
        finished: Container[int] = (),
        log: DeltaLog | None = None,
    ) -> None:
        self._engine = engine
        self._generations = generations
        self._stream_interval = stream_interval
        self._finished = finished
        self._log = log
        self.num_shared = 0
        self.num_from_cache = 0
        self._received: set[int] = set()
        self._pending: dict[int, TokenDelta] = {}
        self._error: ShuntyardError | None = None
        self._awaited: asyncio.Future[None] | None = None
        self._poked = False
        self._open: set[int] = set()

    def __enter__(self) -> Collector:
        try:
            for index, generation in enumerate(self._generations):
                if index in self._finished:
                    continue
                self._open.add(index)
                sharing = self._engine.submit(generation, _Sink(self, index))
                self.num_shared += sharing is not None
                self.num_from_cache += sharing == "cache"
        except BaseException:
            self.abort(list(self._open))
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.abort(list(self._open))

    @property
    def is_done(self) -> bool:
        return not self._open and not self._pending

    def abort(self, indexes: Iterable[int]) -> None:
        """Stop these generations; what they still produce is dropped."""
        for index in indexes:
            if index in self._open:
                self._open.discard(index)
                self._engine.abort(self._generations[index].id)
            self._pending.pop(index, None)

    def put(self, index: int, delta: TokenDelta) -> None:
        if index not in self._open:
            return
        if self._log is not None:
            self._log.made(index, delta)
        if delta.finish_reason is not None:
            self._open.discard(index)
        waiting = self._pending.get(index)
        if waiting is None:
            self._pending[index] = delta
        else:
            waiting.merge(delta)
        if self._is_ready(index):
            self._wake()

    def _is_ready(self, index: int) -> bool:
        if self._stream_interval == 1 or index not in self._received:
            return True
        delta = self._pending[index]
        return delta.finish_reason is not None or len(delta.token_ids) >= self._stream_interval

    def fail(self, error: ShuntyardError) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def poke(self) -> None:
        """Make `receive` return empty-handed, so that its caller can do something else."""
        self._poked = True
        self._wake()

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    async def receive(self) -> list[tuple[int, TokenDelta]]:
        """Everything that has arrived, merged per generation; waits until there is something.

        Empty after `poke`. Raises the engine's error once all that came before it was received.
        """
        while True:
            ready = [index for index in self._pending if self._error or self._is_ready(index)]
            if ready or self._poked:
                break
            if self._error is not None:
                raise self._error
            # A bare future: an anyio event per token is a tenth of what a token costs.
            self._awaited = asyncio.get_running_loop().create_future()
            await self._awaited
            self._awaited = None
        self._poked = False
        self._received.update(ready)
        if self._log is not None:
            for index in ready:
                self._log.taken(index)
        return [(index, self._pending.pop(index)) for index in ready]
