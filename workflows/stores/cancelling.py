"""Database work that is cancelled once, and then left to clean up after itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


async def cancelled_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the caller is cancelled, so is `work`, and its end is waited for.

    psycopg answers to a cancellation with a request to the server, a rollback and the return of the
    connection, all of which wait. anyio cancels each such wait anew, and connections would leak;
    in a task of its own the work is cancelled as asyncio does it, once.
    """
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # seen: it is of no interest any more
        raise
    return task.result()
