"""What the profiler has learnt, in a file, so that a server that starts anew knows it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
import orjson
from anyio.abc import TaskGroup

from workflows.profiler import Profiler

logger = logging.getLogger(__name__)


class ProfileFile:
    """An async context manager: reads the file when entered, writes it now and then and at the end.

    A file that cannot be read or written is told in the log; costs are learnt anew then. Nothing is
    written, and no folder made, before something was learnt.
    """

    def __init__(self, profiler: Profiler, path: Path, *, period_s: float = 60.0) -> None:
        self._profiler = profiler
        self._path = path
        self._period_s = period_s
        self._kept: dict[str, Any] = {}
        self._group: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        await anyio.to_thread.run_sync(self._read)
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._keep_on_writing)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._group is not None
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(exc_type, exc, traceback)
        with anyio.CancelScope(shield=True):
            await self._write()

    def _read(self) -> None:
        try:
            state = orjson.loads(self._path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, orjson.JSONDecodeError) as error:
            logger.warning("%s cannot be read, so costs are learnt anew: %s", self._path, error)
            return
        if isinstance(state, dict):
            self._profiler.load(state)
            self._kept = self._profiler.to_dict()

    async def _keep_on_writing(self) -> None:
        while True:
            await anyio.sleep(self._period_s)
            await self._write()

    async def _write(self) -> None:
        state = self._profiler.to_dict()
        if state["profiles"] and state != self._kept:
            await anyio.to_thread.run_sync(self._replace, orjson.dumps(state))
            self._kept = state

    def _replace(self, content: bytes) -> None:
        """All or nothing, also when the machine stops in between."""
        new = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with new.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._path, error)
