"""Brings a database to the shape that this version needs.

Each step runs in the one transaction of all, under an advisory lock: several servers may start at
once, and one that is killed leaves the database as it was.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from psycopg import AsyncConnection, errors
from psycopg.sql import SQL

from workflows.stores.errors import StoreUnusable

# Any number; the same in every version.
_LOCK: Final = 0x5348554E54  # "SHUNT"
_MIN_PGVECTOR: Final = (0, 8)  # iterative index scans, for filters

_BASE: Final = """
CREATE SCHEMA IF NOT EXISTS shuntyard;
CREATE TABLE IF NOT EXISTS shuntyard.migrations (
    version integer PRIMARY KEY,
    name text NOT NULL,
    checksum text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);
"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step. version: from 1, without gaps."""

    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


def bundled_migrations() -> list[Migration]:
    """All that come with this version, in order."""
    folder = resources.files("workflows.stores.migrations")
    names = sorted(one.name for one in folder.iterdir() if one.name.endswith(".sql"))
    found = [
        Migration(
            int(name[:4]), name.removesuffix(".sql"), folder.joinpath(name).read_text("utf-8")
        )
        for name in names
    ]
    assert [one.version for one in found] == list(range(1, len(found) + 1))
    return found


async def migrate(connection: AsyncConnection[Any], migrations: list[Migration]) -> int:
    """Apply what is missing. Returns how many steps that were.

    Raises StoreUnusable if pgvector is missing or too old, if the database was shaped by a newer
    version, or if a step that was applied is not the one that is known here.
    """
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        await _ensure_vector(connection)
        try:
            await connection.execute(_BASE)
        except errors.InsufficientPrivilege:
            raise StoreUnusable(
                "the database's user may not create the schema 'shuntyard'; have it created, with "
                "this user as its owner"
            ) from None
        cursor = await connection.execute("SELECT version, checksum FROM shuntyard.migrations")
        applied: dict[int, str] = dict(await cursor.fetchall())
        _check_applied(applied, migrations)
        missing = [one for one in migrations if one.version not in applied]
        for step in missing:
            await connection.execute(SQL(step.sql))
            await connection.execute(
                "INSERT INTO shuntyard.migrations (version, name, checksum) VALUES (%s, %s, %s)",
                [step.version, step.name, step.checksum],
            )
        return len(missing)


def _check_applied(applied: dict[int, str], migrations: list[Migration]) -> None:
    known = {one.version: one for one in migrations}
    newest = max(applied, default=0)
    if newest > len(known):
        raise StoreUnusable(
            f"the database was shaped by a newer version of Shuntyard (step {newest}; this one "
            f"knows {len(known)}): start that version, or use another database"
        )
    for version, checksum in sorted(applied.items()):
        if known[version].checksum != checksum:
            raise StoreUnusable(
                f"step {known[version].name} of the database's shape is not the one that this "
                "version knows; use another database"
            )


async def _ensure_vector(connection: AsyncConnection[Any]) -> None:
    """Raises StoreUnusable unless pgvector is there, and new enough."""
    try:
        # Not looked for first: where it is there, nothing is done and no right is needed.
        async with connection.transaction():
            await connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    except (errors.UndefinedFile, errors.FeatureNotSupported):
        raise StoreUnusable(
            "this Postgres has no pgvector: install it (package postgresql-NN-pgvector, image "
            "pgvector/pgvector), or leave --database-url out to use the embedded one"
        ) from None
    except errors.InsufficientPrivilege:
        raise StoreUnusable(
            "the database's user may not create the extension pgvector; have a superuser run "
            "CREATE EXTENSION vector in this database"
        ) from None
    cursor = await connection.execute(
        "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
    )
    row = await cursor.fetchone()
    version = "0" if row is None else str(row[0])
    if tuple(int(part) for part in version.split(".")[:2]) < _MIN_PGVECTOR:
        wanted = ".".join(map(str, _MIN_PGVECTOR))
        raise StoreUnusable(
            f"pgvector {version} is too old, {wanted} is needed: update it, then run "
            "ALTER EXTENSION vector UPDATE"
        )
