"""What engines without a model share: they live on the caller's event loop.

They are ready as soon as they are entered, die when told, may be revived, and end with their scope.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskGroup

from spot.engines.base import EngineCard, EngineState, EngineStatus
from spot.errors import EngineUnavailable


class LoopEngine(ABC):
    """The lifecycle part of `spot.engines.base.Engine`.

    A subclass sets `_idle` when its last generation ends, fails its work in `_fail_all`, and works
    in `_run`, which is cancelled at the end.
    """

    def __init__(self, card: EngineCard) -> None:
        self._card = card
        self._state: EngineState = "stopped"
        self._detail = ""
        self._wakeup = anyio.Event()
        self._idle = anyio.Event()
        self._group: TaskGroup | None = None

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(state=self._state, detail=self._detail)

    @property
    def card(self) -> EngineCard:
        return self._card

    def kill(self, reason: str) -> None:
        self.die(reason)

    def die(self, message: str = "the engine died") -> None:
        """Fail everything, and take no more work."""
        self._state, self._detail = "dead", message
        self._fail_all(message)

    def revive(self) -> None:
        """Take work again after `die`."""
        self._state, self._detail = "ready", ""

    async def wait_ready(self) -> EngineCard:
        return self._card

    async def drain(self) -> None:
        self._state = "draining"
        while self._has_work():
            self._idle = anyio.Event()
            await self._idle.wait()

    async def __aenter__(self) -> Self:
        self._state = "ready"
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._run)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.die("the server is shutting down")
        self._state = "stopped"
        if self._group is not None:
            self._group.cancel_scope.cancel()
            await self._group.__aexit__(exc_type, exc, traceback)

    def _check_ready(self) -> None:
        if self._state != "ready":
            raise EngineUnavailable(f"the engine is {self._state}")

    @abstractmethod
    def _has_work(self) -> bool: ...

    @abstractmethod
    def _fail_all(self, message: str) -> None:
        """Forget all generations, then end each with an EngineFailed."""

    @abstractmethod
    async def _run(self) -> None: ...
