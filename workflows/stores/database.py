"""The database: opened when it is first needed, and again after it died.

The one place that knows of addresses, pools and lost connections. What is stored stands elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import anyio.to_thread
import psycopg
from anyio.abc import TaskGroup
from pgvector.psycopg import register_vector_async
from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool, PoolTimeout, TooManyRequests

from workflows.stores.cancelling import cancelled_once
from workflows.stores.embedded import EmbeddedPostgres
from workflows.stores.errors import StoreError, StoreUnavailable
from workflows.stores.migrate import bundled_migrations, migrate

logger = logging.getLogger(__name__)

Connection = AsyncConnection[Any]
Work = Callable[[Connection], Awaitable[Any]]
T = TypeVar("T")

_CONNECT_TIMEOUT_S = 10


@dataclass(slots=True)
class _Opening:
    """One attempt to open the database. pool: if it went well, else there is a failure."""

    ended: anyio.Event = field(default_factory=anyio.Event)
    pool: AsyncConnectionPool[Connection] | None = None
    failure: StoreError = field(default_factory=lambda: _shutting_down())


class Database:
    """Postgres with pgvector. An async context manager; entering starts nothing.

    url: its address; without one, an embedded Postgres on `folder`.
    max_connections: held at once. acquire_timeout_s: until a call gives up to get one.
    statement_timeout_s: of each statement.
    """

    def __init__(
        self,
        *,
        url: str | None = None,
        folder: Path | None = None,
        max_connections: int = 10,
        acquire_timeout_s: float = 30.0,
        statement_timeout_s: float = 300.0,
    ) -> None:
        assert (url is None) != (folder is None), "give one of url and folder"
        self._url = url
        self._embedded = None if folder is None else EmbeddedPostgres(folder)
        self._shown = f"the embedded Postgres in {folder}" if url is None else "the database"
        self._max_connections = max_connections
        self._acquire_timeout_s = acquire_timeout_s
        self._statement_timeout_s = statement_timeout_s
        self._pool: AsyncConnectionPool[Connection] | None = None
        self._opening: _Opening | None = None
        self._is_closed = False
        self._group: TaskGroup | None = None

    @property
    def is_open(self) -> bool:
        return self._pool is not None

    @property
    def embedded(self) -> EmbeddedPostgres | None:
        return self._embedded

    async def __aenter__(self) -> Self:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._group is not None
        self._is_closed = True
        self._group.cancel_scope.cancel()
        try:
            await self._group.__aexit__(exc_type, exc, traceback)
        finally:
            with anyio.CancelScope(shield=True):
                await self._close_pool()
                if self._embedded is not None:
                    await anyio.to_thread.run_sync(self._embedded.stop)

    async def run(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """The result of `work` on a connection of its own, which commits as `work` says.

        Raises StoreUnavailable if there is no connection or it was lost on the way: what was to be
        committed then may have been. Raises StoreUnusable.
        """
        pool = await self._opened()
        try:
            return await cancelled_once(self._run(pool, work))
        except (PoolTimeout, TooManyRequests) as error:
            failure = StoreUnavailable(f"no connection to be had: {error}")
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            failure = StoreUnavailable(_words(error))
        logger.warning("%s failed: %s", self._shown, failure.message)
        raise failure

    async def _run(
        self, pool: AsyncConnectionPool[Connection], work: Callable[[Connection], Awaitable[T]]
    ) -> T:
        async with pool.connection() as connection:
            return await work(connection)

    async def _opened(self) -> AsyncConnectionPool[Connection]:
        """The pool, on a Postgres that lives as far as can be told without asking it.

        It is opened in a task of its own: who waits for it may leave, others wait on.
        """
        if self._is_closed:
            raise _shutting_down()
        if self._pool is not None and self._is_alive:
            return self._pool
        if self._opening is None:
            assert self._group is not None, "used outside of its context"
            self._opening = _Opening()
            self._group.start_soon(self._reopen, self._opening)
        opening = self._opening
        await opening.ended.wait()
        if opening.pool is None:
            raise type(opening.failure)(opening.failure.message)
        return opening.pool

    async def _reopen(self, opening: _Opening) -> None:
        try:
            if self._pool is not None:
                logger.warning("%s has died; starting it anew", self._shown)
                await self._close_pool()
            self._pool = opening.pool = await self._open()
        except StoreError as error:
            logger.error("%s cannot be used: %s", self._shown, error.message)
            opening.failure = error
        finally:
            self._opening = None
            opening.ended.set()

    @property
    def _is_alive(self) -> bool:
        return self._embedded is None or self._embedded.is_running

    async def _open(self) -> AsyncConnectionPool[Connection]:
        start_s = anyio.current_time()
        url = self._url
        if self._embedded is not None:
            logger.info("starting %s", self._shown)
            url = await anyio.to_thread.run_sync(self._embedded.start)
        assert url is not None
        await cancelled_once(self._prepare(url))
        pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            url,
            kwargs=self._connection_options,
            min_size=1,
            max_size=self._max_connections,
            open=False,
            timeout=self._acquire_timeout_s,
            configure=_configure,
            check=AsyncConnectionPool.check_connection,
            name="workflows",
        )
        await cancelled_once(pool.open())
        logger.info("%s is open after %.1f s", self._shown, anyio.current_time() - start_s)
        return pool

    @property
    def _connection_options(self) -> dict[str, Any]:
        timeout_ms = int(self._statement_timeout_s * 1000)
        return {
            "autocommit": True,
            "connect_timeout": _CONNECT_TIMEOUT_S,
            "application_name": "shuntyard",
            "options": f"-c statement_timeout={timeout_ms}",
        }

    async def _prepare(self, url: str) -> None:
        """Bring the database to its shape."""
        try:
            connection = await AsyncConnection.connect(url, **self._connection_options)
        except psycopg.Error as error:
            raise StoreUnavailable(f"cannot connect to the database: {_words(error)}") from None
        async with connection:
            try:
                num_steps = await migrate(connection, bundled_migrations())
            except psycopg.Error as error:
                raise StoreUnavailable(f"cannot prepare the database: {_words(error)}") from None
        if num_steps:
            logger.info("the database's shape: %d steps applied", num_steps)

    async def _close_pool(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await cancelled_once(pool.close(timeout=5.0))


def _shutting_down() -> StoreUnavailable:
    return StoreUnavailable("the server is shutting down")


async def _configure(connection: Connection) -> None:
    await register_vector_async(connection)
    # With filters, go on until enough is found, the nearest first.
    await connection.execute("SET hnsw.iterative_scan = strict_order")
    await connection.execute("SET hnsw.ef_search = 100")


def _words(error: psycopg.Error) -> str:
    return " ".join(str(error).split())[:500]
