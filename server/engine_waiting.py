"""Workflows' work waits for an engine that is still starting, where a request would be refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

import anyio

from spot.errors import EngineFailed


class Starting(Protocol):
    """What of an engine tells that it has started."""

    @property
    def card(self) -> object | None: ...

    async def wait_ready(self) -> Any: ...


async def wait_started(engine: Starting, patience_s: float) -> None:
    """Returns when it has, cannot, or takes too long: what comes next will say why it fails."""
    if engine.card is None:
        with anyio.move_on_after(patience_s), suppress(EngineFailed):
            await engine.wait_ready()
