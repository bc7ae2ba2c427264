"""An engine in a process group of its own, watched over and started anew when it dies.

The gateway's end of `spot.engines.host`. Deltas are pushed to their sinks as they arrive; nothing
that a caller does here waits for the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio

from spot.engines.base import DeltaSink, EngineCard, EngineStats, EngineStatus
from spot.engines.codec import (
    Failed,
    HandleDelta,
    Ready,
    Refused,
    Step,
    Submit,
    ToGateway,
)
from spot.engines.host_process import HostConfig
from spot.engines.host_supervisor import HostSupervisor
from spot.engines.vllm_compat.progress import describe
from spot.errors import (
    EngineFailed,
    EngineMisconfigured,
    EngineUnavailable,
    GenerationFailed,
    InvalidRequest,
    ShuntyardError,
)
from spot.generation import Generation

__all__ = ["HostConfig", "HostedEngine"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Live:
    generation_id: str
    sink: DeltaSink


class HostedEngine:
    """One engine host and its restarts, as a `spot.engines.base.Engine`.

    label: which of several engines it is, for the log.
    on_line: takes each line that the host's processes write; by default it is logged.
    describe_line: what such a line says about the start, in words, or None.
    on_step: hears of each engine step how many tokens it had.
    """

    def __init__(
        self,
        config: HostConfig,
        *,
        label: str = "",
        on_line: Callable[[str], None] | None = None,
        describe_line: Callable[[str], str | None] = describe,
        on_step: Callable[[int], None] = lambda num_tokens: None,
    ) -> None:
        self._observe_step = on_step
        self._supervisor = HostSupervisor(
            config,
            name="engine",
            on_message=self._on_message,
            on_death=self._on_death,
            is_busy=lambda: bool(self._live),
            on_line=on_line,
            describe_line=describe_line,
            label=label,
        )
        self._card: EngineCard | None = None
        self._stats = EngineStats()
        self._live: dict[int, _Live] = {}
        self._handles: dict[str, int] = {}
        self._next_handle = 1
        self._idle = anyio.Event()

    @property
    def status(self) -> EngineStatus:
        return self._supervisor.status

    @property
    def card(self) -> EngineCard | None:
        return self._card

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def num_live(self) -> int:
        """Generations submitted that have neither ended nor been aborted."""
        return len(self._live)

    @property
    def outgoing_bytes(self) -> int:
        """What waits to be written to the host."""
        return self._supervisor.outgoing_bytes

    def submit(self, generation: Generation, sink: DeltaSink) -> None:
        """Start one generation.

        Raises EngineUnavailable, or InvalidRequest for numbers that fit no message.
        """
        if self.status.state != "ready":
            raise EngineUnavailable(f"the engine is {self.status.state}: {self.status.detail}")
        handle = self._next_handle
        try:
            self._supervisor.put(Submit(handle, generation))
        except (ValueError, OverflowError) as error:
            raise InvalidRequest(f"the request cannot be sent to an engine: {error}") from error
        self._next_handle += 1
        self._live[handle] = _Live(generation.id, sink)
        self._handles[generation.id] = handle

    def abort(self, generation_id: str) -> None:
        handle = self._handles.get(generation_id)
        if handle is not None:
            self._forget(handle)
            self._supervisor.put_abort(handle)

    def kill(self, reason: str) -> None:
        self._supervisor.kill(reason)
        self._fail_all(reason)

    async def wait_ready(self) -> EngineCard:
        await self._supervisor.wait_decided()
        if self._card is None:
            kind = EngineMisconfigured if self.status.is_misconfigured else EngineFailed
            raise kind(self.status.detail)
        return self._card

    async def drain(self) -> None:
        self._supervisor.drain()
        while self._live:
            self._idle = anyio.Event()
            await self._idle.wait()

    async def __aenter__(self) -> HostedEngine:
        await self._supervisor.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._supervisor.__aexit__(*exc_info)
        self._fail_all("the engine was stopped")

    def _on_death(self, reason: str, was_ready: bool) -> None:
        self._stats = EngineStats()
        self._fail_all(reason)

    def _on_message(self, message: ToGateway) -> None:
        match message:
            case Step():
                self._on_step(message)
            case Refused():
                refusal = InvalidRequest(message.message, param=message.param)
                self._end_badly(message.handle, refusal)
            case Failed():
                kind = GenerationFailed if message.everywhere else EngineFailed
                self._end_badly(message.handle, kind(message.message))
            case Ready(card):
                self._card = card

    def _on_step(self, step: Step) -> None:
        if step.stats is not None:
            self._stats = step.stats
        if step.num_tokens:
            self._observe_step(step.num_tokens)
        for entry in step.deltas:
            self._on_delta(entry)

    def _on_delta(self, entry: HandleDelta) -> None:
        live = self._live.get(entry.handle)
        if live is None:
            return
        if entry.delta.finish_reason is not None:
            self._forget(entry.handle)
        try:
            live.sink.on_delta(entry.delta)
        except Exception:  # one broken sink must not end the engine for all others
            logger.exception("a sink failed; its generation is aborted")
            self.abort(live.generation_id)

    def _end_badly(self, handle: int, error: ShuntyardError) -> None:
        live = self._live.get(handle)
        if live is not None:
            self._forget(handle)
            live.sink.on_error(error)

    def _forget(self, handle: int) -> None:
        live = self._live.pop(handle)
        if self._handles.get(live.generation_id) == handle:
            del self._handles[live.generation_id]
        if not self._live:
            self._idle.set()

    def _fail_all(self, message: str) -> None:
        """End every live generation. Sinks may submit and abort elsewhere while they hear of it."""
        for handle, live in list(self._live.items()):
            if handle in self._live:
                self._forget(handle)
                live.sink.on_error(EngineFailed(message))
