"""One life of an engine host: start it, talk to it, notice its end, leave nothing behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import ByteReceiveStream, Process, SocketListener

from spot.engines.codec import FrameReader, Ping, ToGateway, to_gateway_decoder
from spot.engines.outbox import Outbox
from spot.engines.process_group import (
    describe_exit,
    kill_session,
    session_members,
    shared_memory_of,
)

_READ_BYTES = 256 * 1024
_MAX_LINE_BYTES = 8192
_LAST_WORDS_S = 1.0
_ERROR_LINE = re.compile(r"\b(\w*(?:Error|Exception): \S.*)")
_VAGUE = ("See root cause above", "See stack trace", "Engine core initialization failed")


@dataclass(frozen=True, slots=True)
class HostConfig:
    """How to start an engine host, and when to give it up.

    engine_args: the engine's own arguments by name, as JSON values.
    env: added to this process's environment.
    start_timeout_s: from the start of the process until the engine is ready.
    heartbeat_interval_s: how often the host is asked for a sign of life.
    max_silence_s, stall_timeout_s: how long it may give none before it gets no new work, and before
        it is taken for dead.
    step_timeout_s: how long the engine may hold generations without a single step.
    stop_timeout_s: how long an orderly end may take before it is forced.
    max_start_attempts: starts in a row that may fail before the first readiness.
    healthy_after_s: an engine that served this long starts again with the shortest delay.
    """

    engine_args: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = (sys.executable, "-m", "spot.engines.host")
    start_timeout_s: float = 900.0
    heartbeat_interval_s: float = 2.5
    max_silence_s: float = 10.0
    stall_timeout_s: float = 30.0
    step_timeout_s: float = 300.0
    stop_timeout_s: float = 10.0
    min_backoff_s: float = 1.0
    max_backoff_s: float = 30.0
    healthy_after_s: float = 60.0
    max_start_attempts: int = 3


class HostDied(Exception):
    """A host's life ended. fatal, is_misconfigured: see Dead."""

    def __init__(
        self, message: str, *, fatal: bool = False, is_misconfigured: bool = False
    ) -> None:
        super().__init__(message)
        self.message = message
        self.fatal = fatal
        self.is_misconfigured = is_misconfigured


class HostProcess:
    """One host process and the connection to it.

    on_message: takes each message; may raise HostDied. on_line: takes each line of its output.
    on_dying: hears why the host is lost as soon as that is known, before it is cleared away.
    on_silence: hears with each heartbeat for how long the ready host has said nothing.
    """

    def __init__(
        self,
        config: HostConfig,
        *,
        on_message: Callable[[ToGateway], None],
        on_line: Callable[[str], None],
        on_silence: Callable[[float], None] = lambda silent_s: None,
        on_dying: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.outbox = Outbox()
        self.gone = anyio.Event()
        self._config = config
        self._on_message = on_message
        self._on_line = on_line
        self._on_silence = on_silence
        self._on_dying = on_dying
        self._is_dying = False
        self._ready = anyio.Event()
        self._closed = anyio.Event()
        self._was_heard = False
        self._last_lines: deque[str] = deque(maxlen=400)
        self._unfinished_line = b""
        self._session_id: int | None = None
        self._known_pids: list[int] = []
        self._shared_memory: set[str] = set()
        self._condemned = anyio.Event()
        self._verdict = ""

    async def run(self) -> HostDied:
        """Start the host and serve it to its end. Returns why it ended; nothing of it is left."""
        try:
            async with _listener() as (listener, path), self._spawn(path) as process:
                try:
                    await self._serve(process, listener)
                except* HostDied as group:
                    self._tell_dying(_first(group).message)
                    raise
        except* HostDied as group:
            death = _first(group)
        except* OSError as group:
            death = HostDied(f"the engine host cannot be run: {_first(group)}")
        finally:
            self.gone.set()
        return self._with_cause(death)

    def _tell_dying(self, reason: str) -> None:
        if not self._is_dying:
            self._is_dying = True
            self._on_dying(reason)

    def mark_ready(self) -> None:
        """The engine is up: from now on silence is a fault."""
        self._ready.set()
        self._known_pids = self.pids
        self._shared_memory = shared_memory_of(self._known_pids)

    def kill(self, reason: str) -> None:
        """End this host; `run` returns with the reason."""
        self._verdict = reason
        self._condemned.set()

    def last_lines(self, count: int) -> list[str]:
        """What the host's processes wrote last, without empty lines."""
        return [line for line in self._last_lines if line.strip()][-count:]

    @property
    def pids(self) -> list[int]:
        """Every living process of this host."""
        return [] if self._session_id is None else session_members(self._session_id)

    async def _serve(self, process: Process, listener: SocketListener) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hand_over_arguments, process)
            tasks.start_soon(self._read_log, process)
            tasks.start_soon(self._watch_exit, process)
            tasks.start_soon(self._watch_start)
            tasks.start_soon(self._watch_verdict)
            async with await listener.accept() as stream:
                tasks.start_soon(self._write, stream)
                tasks.start_soon(self._watch_heartbeat)
                await self._read(stream)
                await self._watch_exit(process)

    async def _hand_over_arguments(self, process: Process) -> None:
        assert process.stdin is not None
        # A process that does not take them has exited, and its exit says more.
        with contextlib.suppress(OSError, RuntimeError, anyio.BrokenResourceError):
            await process.stdin.send(json.dumps(dict(self._config.engine_args)).encode())
            await process.stdin.aclose()

    async def _read(self, stream: ByteReceiveStream) -> None:
        """Pass messages on until the connection ends."""
        frames = FrameReader()
        try:
            while True:
                chunk = await stream.receive(_READ_BYTES)
                self._was_heard = True
                for payload in frames.feed(chunk):
                    self._on_message(to_gateway_decoder.decode(payload))
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            self._closed.set()
            self._tell_dying("the engine host closed its connection")
        except ValueError as error:  # msgspec's DecodeError is one
            raise HostDied(f"the engine host sent an impossible message: {error}") from error

    async def _write(self, stream: Any) -> None:
        try:
            await self.outbox.write_to(stream)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return  # the reader sees the end as well, behind what the host still had to say

    async def _watch_exit(self, process: Process) -> None:
        """Raise once the process has exited and its last words are read."""
        with anyio.move_on_after(_LAST_WORDS_S if self._closed.is_set() else math.inf):
            await process.wait()
        with anyio.move_on_after(_LAST_WORDS_S):
            await self._closed.wait()
        code = process.returncode
        end = "closed its connection" if code is None else describe_exit(code)
        raise HostDied(f"the engine host {end}")

    async def _watch_start(self) -> None:
        with anyio.move_on_after(self._config.start_timeout_s):
            await self._ready.wait()
            return
        raise HostDied(f"the engine was not ready within {self._config.start_timeout_s:.0f} s")

    async def _watch_verdict(self) -> None:
        await self._condemned.wait()
        raise HostDied(self._verdict)

    async def _watch_heartbeat(self) -> None:
        """Ask for a sign of life now and then; raise when there was none for too long.

        Silence is counted in whole intervals: when this process was the one that stood still, the
        clock would blame the host.
        """
        await self._ready.wait()
        silent_s = 0.0
        for number in itertools.count(1):
            self._was_heard = False
            self.outbox.put(Ping(number))
            await anyio.sleep(self._config.heartbeat_interval_s)
            silent_s = 0.0 if self._was_heard else silent_s + self._config.heartbeat_interval_s
            self._on_silence(silent_s)
            if silent_s >= self._config.stall_timeout_s:
                raise HostDied(f"the engine host was silent for {silent_s:.0f} s")

    async def _read_log(self, process: Process) -> None:
        assert process.stdout is not None
        async for chunk in process.stdout:
            *lines, rest = (self._unfinished_line + chunk).split(b"\n")
            self._unfinished_line = rest[-_MAX_LINE_BYTES:]
            for line in lines:
                self._take_line(line.decode(errors="replace").rstrip("\r"))
        if self._unfinished_line:
            self._take_line(self._unfinished_line.decode(errors="replace"))
            self._unfinished_line = b""

    def _take_line(self, line: str) -> None:
        self._last_lines.append(line)
        self._on_line(line)

    def _with_cause(self, death: HostDied) -> HostDied:
        """A failed start, with the last error that the log tells of."""
        is_clear = death.fatal and not any(vague in death.message for vague in _VAGUE)
        if self._ready.is_set() or is_clear:
            return death
        cause = last_error(self._last_lines)
        if cause is None or cause in death.message:
            return death
        return HostDied(f"{death.message} ({cause})", fatal=death.fatal)

    @contextlib.asynccontextmanager
    async def _spawn(self, path: str) -> AsyncIterator[Process]:
        """The host process, in a session of its own; leaving ends that whole session."""
        # Shielded: a cancelled spawn would leave a process behind that nobody knows.
        with anyio.CancelScope(shield=True):
            process = await anyio.open_process(
                [*self._config.command, "--socket", path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(self._config.env),
                start_new_session=True,
            )
        self._session_id = process.pid
        try:
            yield process
        finally:
            with anyio.CancelScope(shield=True):
                await kill_session(
                    process.pid,
                    known_pids=self._known_pids,
                    known_shared_memory=self._shared_memory,
                )
                with anyio.move_on_after(_LAST_WORDS_S):
                    await process.wait()
                    await self._read_log(process)
                if process.returncode is not None:  # else it waits for a device, for ever perhaps
                    await process.aclose()


@contextlib.asynccontextmanager
async def _listener() -> AsyncIterator[tuple[SocketListener, str]]:
    """A socket that only this user can reach, and its path."""
    folder = tempfile.mkdtemp(prefix="shuntyard-")  # mode 0700
    try:
        path = str(Path(folder) / "engine")
        async with await anyio.create_unix_listener(path) as listener:
            yield listener, path
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def last_error(lines: Sequence[str]) -> str | None:
    """The last error message in a log that says what was wrong, or None."""
    for line in reversed(lines):
        found = _ERROR_LINE.search(line)
        if found and not any(vague in line for vague in _VAGUE):
            return found[1][:500]
    return None


def _first(group: BaseExceptionGroup[Any]) -> Any:
    """The first exception of a group that is not a group itself."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
