"""Workflow templates of tenants: documents by name, each change a new version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from workflows.stores.database import Connection, Database
from workflows.stores.errors import StoreFull

MAX_TEMPLATES = 1000
MAX_VERSIONS = 10_000

_COLUMNS = "name, version, document, extract(epoch FROM created_at)"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTemplate:
    """A workflow's document under a name. created_s: unix seconds, None for one that ships."""

    name: str
    version: int
    document: Mapping[str, Any]
    created_s: float | None


class TemplateStore:
    """The templates of all tenants. Each call is about one tenant's; it learns of no other's.

    identity_of: a tenant's name in the database, for tenants whose names do not last.
    All calls raise StoreUnavailable and StoreUnusable.
    """

    def __init__(
        self, database: Database, *, identity_of: Callable[[str], str] = lambda tenant: tenant
    ) -> None:
        self._database = database
        self._identity_of = identity_of

    @property
    def is_open(self) -> bool:
        """Whether asking would start no database."""
        return self._database.is_open

    async def put(self, tenant: str, name: str, document: Mapping[str, Any]) -> StoredTemplate:
        """Store a document as the newest version; one that is the newest already stays it.

        Raises StoreFull.
        """
        identity, text = self._identity_of(tenant), orjson.dumps(document).decode()

        async def work(connection: Connection) -> StoredTemplate:
            async with connection.transaction():
                # One writer of a tenant at a time, so that no number is given twice.
                await connection.execute(
                    "SELECT pg_advisory_xact_lock(hashtextextended('templates ' || %s, 0))",
                    [identity],
                )
                newest = await _newest(connection, identity, name)
                if newest is not None and newest[2] == text:
                    return _template(newest)
                await _check_room(connection, identity, name, newest)
                cursor = await connection.execute(
                    "INSERT INTO shuntyard.workflow_templates (tenant, name, version, document) "
                    f"VALUES (%s, %s, %s, %s) RETURNING {_COLUMNS}",
                    [identity, name, 1 if newest is None else newest[1] + 1, text],
                )
                return _template(await cursor.fetchone())

        return await self._database.run(work)

    async def find(self, tenant: str, name: str, version: int | None) -> StoredTemplate | None:
        """A version, or the newest; None where there is none, or it was deleted."""
        if "\0" in name:  # which Postgres does not take
            return None
        identity = self._identity_of(tenant)

        async def work(connection: Connection) -> StoredTemplate | None:
            if version is None:
                row = await _newest(connection, identity, name)
            else:
                cursor = await connection.execute(
                    f"SELECT {_COLUMNS} FROM shuntyard.workflow_templates "
                    "WHERE tenant = %s AND name = %s AND version = %s",
                    [identity, name, version],
                )
                row = await cursor.fetchone()
            return None if row is None or row[2] is None else _template(row)

        return await self._database.run(work)

    async def newest(self, tenant: str) -> list[StoredTemplate]:
        """The newest version of each template, by name."""

        async def work(connection: Connection) -> list[StoredTemplate]:
            cursor = await connection.execute(
                f"SELECT DISTINCT ON (name) {_COLUMNS} FROM shuntyard.workflow_templates "
                "WHERE tenant = %s ORDER BY name, version DESC",
                [self._identity_of(tenant)],
            )
            return [_template(row) for row in await cursor.fetchall() if row[2] is not None]

        return await self._database.run(work)

    async def delete(self, tenant: str, name: str) -> bool:
        """Delete all versions. Whether there were any."""
        if "\0" in name:
            return False

        async def work(connection: Connection) -> bool:
            cursor = await connection.execute(
                "UPDATE shuntyard.workflow_templates SET document = NULL "
                "WHERE tenant = %s AND name = %s AND document IS NOT NULL",
                [self._identity_of(tenant), name],
            )
            return cursor.rowcount > 0

        return await self._database.run(work)


async def _newest(connection: Connection, identity: str, name: str) -> Any:
    cursor = await connection.execute(
        f"SELECT {_COLUMNS} FROM shuntyard.workflow_templates "
        "WHERE tenant = %s AND name = %s ORDER BY version DESC LIMIT 1",
        [identity, name],
    )
    return await cursor.fetchone()


async def _check_room(connection: Connection, identity: str, name: str, newest: Any) -> None:
    """Raises StoreFull."""
    if newest is not None:
        if newest[1] >= MAX_VERSIONS:
            raise StoreFull(f"a template has {MAX_VERSIONS:,} versions at most")
        return
    cursor = await connection.execute(
        "SELECT count(DISTINCT name) FROM shuntyard.workflow_templates WHERE tenant = %s",
        [identity],
    )
    row = await cursor.fetchone()
    if row is not None and row[0] >= MAX_TEMPLATES:
        raise StoreFull(f"there may be {MAX_TEMPLATES:,} names of templates")


def _template(row: Any) -> StoredTemplate:
    name, version, document, created_s = row
    return StoredTemplate(
        name=name, version=version, document=orjson.loads(document), created_s=float(created_s)
    )
