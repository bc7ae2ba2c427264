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
from anyio.abc import TaskGroup

from spot.engines.base import DeltaSink, EngineCard, EngineState, EngineStats, EngineStatus
from spot.engines.codec import (
    Dead,
    Failed,
    HandleDelta,
    Pong,
    Progress,
    Ready,
    Refused,
    Step,
    Stop,
    Submit,
    ToGateway,
)
from spot.engines.host_process import HostConfig, HostDied, HostProcess
from spot.engines.vllm_compat.progress import describe
from spot.errors import EngineFailed, EngineUnavailable, InvalidRequest, ShuntyardError
from spot.generation import Generation

__all__ = ["HostConfig", "HostedEngine"]

logger = logging.getLogger(__name__)


def _log_line(line: str) -> None:
    logger.info("%s", line)


@dataclass(slots=True)
class _Live:
    generation_id: str
    sink: DeltaSink


class HostedEngine:
    """One engine host and its restarts, as a `spot.engines.base.Engine`.

    on_line: takes each line that the host's processes write.
    describe_line: what such a line says about the start, in words, or None.
    """

    def __init__(
        self,
        config: HostConfig,
        *,
        on_line: Callable[[str], None] = _log_line,
        describe_line: Callable[[str], str | None] = describe,
    ) -> None:
        self._config = config
        self._on_line = on_line
        self._describe_line = describe_line
        self._status = EngineStatus("starting")
        self._card: EngineCard | None = None
        self._stats = EngineStats()
        self._live: dict[int, _Live] = {}
        self._handles: dict[str, int] = {}
        self._next_handle = 1
        self._host: HostProcess | None = None
        self._ready_at_s: float | None = None
        self._stepped_at_s = 0.0
        self._draining = False
        self._stopping = False

    @property
    def status(self) -> EngineStatus:
        return self._status

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
        return self._host.outbox.num_bytes if self._host is not None else 0

    def submit(self, generation: Generation, sink: DeltaSink) -> None:
        """Start one generation.

        Raises EngineUnavailable, or InvalidRequest for numbers that fit no message.
        """
        host = self._host
        if self._status.state != "ready" or host is None:
            raise EngineUnavailable(f"the engine is {self._status.state}: {self._status.detail}")
        handle = self._next_handle
        try:
            host.outbox.put(Submit(handle, generation))
        except (ValueError, OverflowError) as error:
            raise InvalidRequest(f"the request cannot be sent to an engine: {error}") from error
        if not self._live:
            self._stepped_at_s = anyio.current_time()
        self._next_handle += 1
        self._live[handle] = _Live(generation.id, sink)
        self._handles[generation.id] = handle

    def abort(self, generation_id: str) -> None:
        handle = self._handles.get(generation_id)
        if handle is None:
            return
        self._forget(handle)
        if self._host is not None:
            self._host.outbox.put_abort(handle)

    async def wait_ready(self) -> EngineCard:
        await self._decided.wait()
        if self._card is None:
            raise EngineFailed(self._status.detail)
        return self._card

    async def drain(self) -> None:
        self._draining = True
        if self._status.state == "ready":
            self._set_state("draining", "taking no new work")
        while self._live:
            self._idle = anyio.Event()
            await self._idle.wait()

    async def __aenter__(self) -> HostedEngine:
        self._decided = anyio.Event()
        self._idle = anyio.Event()
        self._tasks: TaskGroup = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._supervise)
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        is_up = self._status.state in ("ready", "draining")
        self._stopping = True
        self._set_state("stopped", "stopped")
        with anyio.CancelScope(shield=True):
            if is_up and self._host is not None:
                self._host.outbox.put(Stop())
                with anyio.move_on_after(self._config.stop_timeout_s):
                    await self._host.gone.wait()
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)
        self._fail_all("the engine was stopped")
        self._decided.set()

    async def _supervise(self) -> None:
        """Run one host after another, until stopped or until another start is no use."""
        backoff_s = self._config.min_backoff_s
        num_failed_starts = 0
        while True:
            death = await self._run_host()
            if self._stopping:
                return
            was_ready, was_healthy = self._ready_at_s is not None, self._was_healthy()
            num_failed_starts = 0 if was_ready else num_failed_starts + 1
            self._take_for_dead(death.message)
            if self._draining or self._is_hopeless(death, num_failed_starts):
                self._decided.set()
                return
            if was_healthy:
                backoff_s = self._config.min_backoff_s
            logger.warning("engine died: %s; next start in %.1f s", death.message, backoff_s)
            await anyio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._config.max_backoff_s)
            self._status.num_restarts += 1

    async def _run_host(self) -> HostDied:
        self._set_state("starting", "starting the engine host")
        self._ready_at_s = None
        self._host = HostProcess(
            self._config, on_message=self._on_message, on_line=self._on_host_line
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_steps, self._host)
            death = await self._host.run()
            tasks.cancel_scope.cancel()
        return death

    async def _watch_steps(self, host: HostProcess) -> None:
        """End a host whose engine holds generations but takes no step."""
        timeout_s = self._config.step_timeout_s
        while True:
            await anyio.sleep(timeout_s / 4)
            idle_s = anyio.current_time() - self._stepped_at_s
            if self._live and idle_s > timeout_s:
                host.kill(f"the engine made no step for {idle_s:.0f} s")

    def _is_hopeless(self, death: HostDied, num_failed_starts: int) -> bool:
        if self._card is not None:
            return False
        return death.fatal or num_failed_starts >= self._config.max_start_attempts

    def _was_healthy(self) -> bool:
        if self._ready_at_s is None:
            return False
        return anyio.current_time() - self._ready_at_s >= self._config.healthy_after_s

    def _take_for_dead(self, message: str) -> None:
        self._set_state("dead", message)
        self._status.pids = []
        self._stats = EngineStats()
        self._fail_all(message)

    def _set_state(self, state: EngineState, detail: str) -> None:
        self._status.state, self._status.detail = state, detail

    def _on_host_line(self, line: str) -> None:
        self._on_line(line)
        if self._status.state == "starting" and (stage := self._describe_line(line)):
            self._status.detail = stage

    def _on_message(self, message: ToGateway) -> None:
        match message:
            case Step():
                self._on_step(message)
            case Refused():
                refusal = InvalidRequest(message.message, param=message.param)
                self._end_badly(message.handle, refusal)
            case Failed():
                self._end_badly(message.handle, EngineFailed(message.message))
            case Progress():
                if self._status.state == "starting":
                    self._status.detail = message.detail
            case Ready():
                self._on_ready(message)
            case Dead():
                raise HostDied(message.message, fatal=message.fatal)
            case Pong():
                pass

    def _on_ready(self, ready: Ready) -> None:
        assert self._host is not None
        self._host.mark_ready()
        self._card = ready.card
        self._ready_at_s = anyio.current_time()
        self._status.pids = sorted({*ready.pids, *self._host.pids})
        if self._status.state == "starting":
            self._set_state("draining" if self._draining else "ready", "")
        self._decided.set()

    def _on_step(self, step: Step) -> None:
        self._stepped_at_s = anyio.current_time()
        if step.stats is not None:
            self._stats = step.stats
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
        self._stepped_at_s = anyio.current_time()
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
