"""Workflows' work waits for an engine that is still starting, where a request would be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio

_TICK_S: Final = 0.1


async def wait_until(is_started: Callable[[], bool], patience_s: float) -> None:
    """Returns when that is so, or after `patience_s` all the same: what comes next will say why."""
    with anyio.move_on_after(patience_s):
        while not is_started():
            await anyio.sleep(_TICK_S)
