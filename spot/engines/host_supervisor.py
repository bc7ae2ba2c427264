"""An engine host that is kept running: watched, ended when it hangs, replaced when it dies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import anyio
from anyio.abc import TaskGroup

from spot.engines.base import EngineState, EngineStatus
from spot.engines.codec import Dead, Pong, PoolingReady, Progress, Ready, Stop, ToGateway, ToHost
from spot.engines.host_process import HostConfig, HostDied, HostProcess

logger = logging.getLogger(__name__)

_NUM_LAST_LINES = 10


def _log_line(line: str) -> None:
    logger.info("%s", line)


class Restarts:
    """What follows a host's death: another start after some time, or none.

    Delays double while hosts die young. Starts that fail are given up only as long as none has
    succeeded: after that the fault is not in the settings.
    """

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._delay_s = config.min_backoff_s
        self._num_failed_starts = 0
        self._has_served = False

    def delay_after_s(self, *, served_s: float | None, is_fatal: bool) -> float | None:
        """How long to wait before the next start; None if another start is no use.

        served_s: from the host's readiness to its death; None if it never was ready.
        is_fatal: the host said itself that another start would end the same.
        """
        if served_s is None:
            self._num_failed_starts += 1
        else:
            self._has_served = True
            if served_s >= self._config.healthy_after_s:
                self._delay_s = self._config.min_backoff_s
        is_enough = is_fatal or self._num_failed_starts >= self._config.max_start_attempts
        if is_enough and not self._has_served:
            return None
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, self._config.max_backoff_s)
        return delay_s


class HostSupervisor:
    """One host after another, until this context is left or another start is no use.

    name: of what the host runs, for the log and the status. label: which of several it is, for the
        log.
    on_message: takes each message about work, and each readiness once `status` shows it.
    on_death: hears why a host died and whether it had been ready, before the next one is started.
    is_busy: whether the host owes work; if so, it must say something now and then.
    on_line: takes each line that the host's processes write.
    describe_line: what such a line says about the start, in words, or None.
    """

    def __init__(
        self,
        config: HostConfig,
        *,
        name: str,
        on_message: Callable[[ToGateway], None],
        on_death: Callable[[str, bool], None],
        is_busy: Callable[[], bool],
        on_line: Callable[[str], None] | None = None,
        describe_line: Callable[[str], str | None] = lambda line: None,
        label: str = "",
    ) -> None:
        self.status = EngineStatus("starting")
        self._config = config
        self._name = name
        self._logged_name = f"{label}: {name}" if label else name
        self._on_message = on_message
        self._on_death = on_death
        self._is_busy = is_busy
        self._on_line = on_line or _log_line
        self._describe_line = describe_line
        self._decided = anyio.Event()
        self._host: HostProcess | None = None
        self._ready_at_s: float | None = None
        self._died_at_s: float | None = None
        self._has_told_death = False
        self._acted_at_s = 0.0
        self._draining = False
        self._stopping = False

    @property
    def outgoing_bytes(self) -> int:
        """What waits to be written to the host."""
        return self._host.outbox.num_bytes if self._host is not None else 0

    def put(self, message: ToHost) -> None:
        """Send work to the host, which must be ready; account for it afterwards.

        Raises ValueError or OverflowError if the message cannot be encoded.
        """
        assert self._host is not None
        self._host.outbox.put(message)
        if not self._is_busy():
            self._acted_at_s = anyio.current_time()

    def put_abort(self, handle: int) -> None:
        """Take work back, if a host has it."""
        if self._host is not None:
            self._host.outbox.put_abort(handle)

    def kill(self, reason: str) -> None:
        """End the host with all its processes; another one follows as after any death."""
        if self._host is not None and self.status.state in ("ready", "draining"):
            self._set_state("dead", reason)
            self._host.kill(reason)

    async def wait_decided(self) -> None:
        """Wait until the host was ready once, or will never be: `status` says why."""
        await self._decided.wait()

    def drain(self) -> None:
        """Say that no new work is taken. A host that dies from now on is not replaced."""
        self._draining = True
        if self.status.state == "ready":
            self._set_ready()

    async def __aenter__(self) -> HostSupervisor:
        self._tasks: TaskGroup = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._supervise)
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        is_up = self.status.state in ("ready", "draining")
        self._stopping = True
        self._set_state("stopped", "stopped")
        with anyio.CancelScope(shield=True):
            if is_up and self._host is not None:
                self._host.outbox.put(Stop())
                with anyio.move_on_after(self._config.stop_timeout_s):
                    await self._host.gone.wait()
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)
        self._decided.set()

    async def _supervise(self) -> None:
        restarts = Restarts(self._config)
        while True:
            death = await self._run_host()
            if self._stopping:
                return
            served_s = self._served_s()
            if self._died_at_s is None:
                self._died_at_s = anyio.current_time()
            self._set_state("dead", death.message)
            self.status.is_misconfigured = death.is_misconfigured
            self.status.pids = []
            if not self._has_told_death:
                self._on_death(death.message, served_s is not None)
            delay_s = restarts.delay_after_s(served_s=served_s, is_fatal=death.fatal)
            if delay_s is None:  # whoever waits for the first readiness says why there is none
                self._decided.set()
                return
            self._log_death(death, None if self._draining else delay_s)
            if self._draining:
                self._decided.set()
                return
            await anyio.sleep(delay_s)
            self.status.num_restarts += 1

    def _log_death(self, death: HostDied, delay_s: float | None) -> None:
        assert self._host is not None
        sequel = "not started again" if delay_s is None else f"next start in {delay_s:.1f} s"
        lines = self._host.last_lines(_NUM_LAST_LINES)
        wrote = "; it wrote last:\n" + "\n".join(lines) if lines else ""
        logger.warning("%s host died: %s; %s%s", self._logged_name, death.message, sequel, wrote)

    async def _run_host(self) -> HostDied:
        self._set_state("starting", f"starting the {self._name} host")
        self._ready_at_s = None
        self._has_told_death = False
        self._host = HostProcess(
            self._config,
            on_message=self._take_message,
            on_line=self._take_line,
            on_silence=self._note_silence,
            on_dying=self._note_dying,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_steps, self._host)
            death = await self._host.run()
            tasks.cancel_scope.cancel()
        return death

    def _note_dying(self, reason: str) -> None:
        """What a ready host worked on should not wait until its processes are gone."""
        if self._ready_at_s is not None and not self._stopping:
            self._died_at_s = anyio.current_time()
            self._has_told_death = True
            self._set_state("dead", reason)
            self._on_death(reason, True)

    def _note_silence(self, silent_s: float) -> None:
        """Give no new work to a host that may be frozen, until it speaks again."""
        if silent_s >= self._config.max_silence_s and self.status.state in ("ready", "draining"):
            self._set_state("stalled", f"the {self._name} host gives no sign of life")
            logger.warning("%s host: no sign of life for %.0f s", self._logged_name, silent_s)
        elif silent_s == 0 and self.status.state == "stalled":
            self._set_ready()
            logger.warning("%s host: it speaks again", self._logged_name)

    async def _watch_steps(self, host: HostProcess) -> None:
        """End a host that owes work and answers pings, but gets nothing done."""
        timeout_s = self._config.step_timeout_s
        while True:
            await anyio.sleep(timeout_s / 4)
            idle_s = anyio.current_time() - self._acted_at_s
            if self._ready_at_s is not None and self._is_busy() and idle_s > timeout_s:
                host.kill(f"the engine made no step for {idle_s:.0f} s")

    def _take_message(self, message: ToGateway) -> None:
        if isinstance(message, Pong):
            return
        self._acted_at_s = anyio.current_time()
        match message:
            case Progress(detail):
                self._describe_start(detail)
            case Dead():
                raise HostDied(
                    message.message,
                    fatal=message.fatal,
                    is_misconfigured=message.is_misconfigured,
                )
            case Ready() | PoolingReady():
                self._take_for_ready(message.pids)
                self._on_message(message)
            case _:
                self._on_message(message)

    def _take_for_ready(self, pids: list[int]) -> None:
        assert self._host is not None
        self._host.mark_ready()
        self._ready_at_s = anyio.current_time()
        self.status.pids = sorted({*pids, *self._host.pids})
        if self.status.state == "starting":
            self._set_ready()
        self._decided.set()
        if self._died_at_s is not None:
            down_s = self._ready_at_s - self._died_at_s
            self._died_at_s = None
            logger.warning("%s is ready again, %.1f s after it died", self._logged_name, down_s)

    def _set_ready(self) -> None:
        if self._draining:
            self._set_state("draining", "taking no new work")
        else:
            self._set_state("ready", "")

    def _take_line(self, line: str) -> None:
        self._on_line(line)
        self._describe_start(self._describe_line(line))

    def _describe_start(self, stage: str | None) -> None:
        if stage and self.status.state == "starting":
            self.status.detail = stage

    def _served_s(self) -> float | None:
        """How long the host has been ready; None if it is not."""
        return None if self._ready_at_s is None else anyio.current_time() - self._ready_at_s

    def _set_state(self, state: EngineState, detail: str) -> None:
        self.status.state, self.status.detail = state, detail
