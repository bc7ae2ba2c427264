"""Collections: documents as chunks with vectors, each collection one tenant's.

An ingest happens whole or not at all, and one with nothing new changes nothing, the epoch neither.
A search sees the collection as it was at one epoch, which it returns.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pgvector import HalfVector, Vector
from psycopg import errors
from psycopg.sql import SQL, Identifier
from psycopg.sql import Literal as SqlLiteral
from psycopg.types.json import Jsonb

from workflows.stores.database import Connection, Database
from workflows.stores.errors import CollectionMismatch, CollectionNotFound
from workflows.stores.filters import filter_sql

Metric = Literal["cosine", "l2", "ip"]
T = TypeVar("T")

MAX_VECTOR_DIMENSION: Final = 2000  # that pgvector's HNSW takes as float32
MAX_DIMENSION: Final = 4000  # and as float16
_MIN_ROWS_TO_ANALYZE = 500
_OPERATOR: Final = {"cosine": SQL("<=>"), "l2": SQL("<->"), "ip": SQL("<#>")}


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSpace:
    """Which vectors can be compared: those of one model in one revision."""

    embedder: str
    revision: str
    dimension: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionInfo:
    """A collection and its size. Times are unix seconds."""

    name: str
    space: VectorSpace
    metric: Metric
    epoch: int
    num_documents: int
    num_chunks: int
    created_s: float
    updated_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NewDocument:
    """A document to store. content_hash: of all that its chunks are made of.

    vectors: one row for each chunk.
    """

    id: str
    content_hash: bytes
    metadata: Mapping[str, Any]
    chunks: Sequence[str]
    vectors: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested:
    """epoch: of the collection that holds the documents. changed_ids: of documents that were new or
    different."""

    epoch: int
    changed_ids: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundChunk:
    """score: the higher the nearer: the cosine, the inner product, or minus the distance (l2)."""

    id: str
    document_id: str
    chunk_index: int
    text: str
    metadata: dict[str, Any]
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The nearest chunks, and the epoch of the collection in which they are that."""

    epoch: int
    chunks: list[FoundChunk]


@dataclass(frozen=True, slots=True)
class _Row:
    """A collection as the database has it."""

    id: int
    space: VectorSpace
    metric: Metric
    epoch: int

    @property
    def table(self) -> Identifier:
        return Identifier("shuntyard", f"chunks_{self.id}")

    @property
    def vector_type(self) -> str:
        return "vector" if self.space.dimension <= MAX_VECTOR_DIMENSION else "halfvec"

    def vector(self, values: Any) -> Vector | HalfVector:
        return Vector(values) if self.vector_type == "vector" else HalfVector(values)


class CollectionStore:
    """The collections of all tenants. Each call is about one tenant's; it learns of no other's.

    identity_of: a tenant's name in the database, for tenants whose names do not last.
    All calls raise StoreUnavailable and StoreUnusable.
    """

    def __init__(
        self, database: Database, *, identity_of: Callable[[str], str] = lambda tenant: tenant
    ) -> None:
        self._database = database
        self._identity_of = identity_of
        self._num_writes: dict[str, int] = {}

    @property
    def is_ours_alone(self) -> bool:
        """Whether nobody else writes to the database."""
        return self._database.embedded is not None

    def num_writes(self, name: str) -> int:
        """How often this server may have changed a collection of the name, since it started.

        Grows before a write is answered. All tenants' collections of a name count together: it says
        too much rather than too little, and nobody is shown it.
        """
        return self._num_writes.get(name, 0)

    async def _write(self, name: str, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Run `work`, which may change a collection; one that failed may have, too."""
        has_changed = True
        try:
            return await self._database.run(work)
        except CollectionNotFound:
            has_changed = False  # and names that mean nothing take no room here
            raise
        finally:
            if has_changed:
                self._num_writes[name] = self.num_writes(name) + 1

    async def collections(self, tenant: str) -> list[CollectionInfo]:
        """All of the tenant's, by name."""

        async def work(connection: Connection) -> list[CollectionInfo]:
            cursor = await connection.execute(
                f"{_INFO} WHERE tenant = %s AND NOT is_deleted ORDER BY name",
                [self._identity_of(tenant)],
            )
            return [_info(row) for row in await cursor.fetchall()]

        return await self._database.run(work)

    async def collection(self, tenant: str, name: str) -> CollectionInfo:
        """Raises CollectionNotFound."""

        async def work(connection: Connection) -> CollectionInfo:
            _check_name(name)
            cursor = await connection.execute(
                f"{_INFO} WHERE tenant = %s AND name = %s AND NOT is_deleted",
                [self._identity_of(tenant), name],
            )
            row = await cursor.fetchone()
            if row is None:
                raise _not_found(name)
            return _info(row)

        return await self._database.run(work)

    async def delete(self, tenant: str, name: str) -> None:
        """Delete a collection with all that is in it. Raises CollectionNotFound."""

        async def work(connection: Connection) -> None:
            async with connection.transaction():
                row = await self._row(connection, tenant, name, lock=True)
                await connection.execute(SQL("DROP TABLE {}").format(row.table))
                await connection.execute(
                    "DELETE FROM shuntyard.documents WHERE collection_id = %s", [row.id]
                )
                await connection.execute(
                    "UPDATE shuntyard.collections SET is_deleted = true, updated_at = now(), "
                    "epoch = epoch + 1 WHERE id = %s",
                    [row.id],
                )

        await self._write(name, work)

    async def delete_documents(self, tenant: str, name: str, ids: Sequence[str]) -> Ingested:
        """Delete those of the documents that are there. Raises CollectionNotFound."""

        async def work(connection: Connection) -> Ingested:
            async with connection.transaction():
                row = await self._row(connection, tenant, name, lock=True)
                await connection.execute(
                    SQL("DELETE FROM {} WHERE document_id = ANY(%s)").format(row.table), [list(ids)]
                )
                cursor = await connection.execute(
                    "DELETE FROM shuntyard.documents WHERE collection_id = %s AND id = ANY(%s) "
                    "RETURNING id",
                    [row.id, list(ids)],
                )
                gone = [str(one) for (one,) in await cursor.fetchall()]
                epoch = await _next_epoch(connection, row) if gone else row.epoch
                return Ingested(epoch=epoch, changed_ids=gone)

        return await self._write(name, work)

    async def hashes(self, tenant: str, name: str, ids: Sequence[str]) -> dict[str, bytes]:
        """The content hashes of those documents that are stored; none without a collection."""

        async def work(connection: Connection) -> dict[str, bytes]:
            cursor = await connection.execute(
                "SELECT d.id, d.content_hash FROM shuntyard.documents d "
                "JOIN shuntyard.collections c ON c.id = d.collection_id "
                "WHERE c.tenant = %s AND c.name = %s AND NOT c.is_deleted AND d.id = ANY(%s)",
                [self._identity_of(tenant), name, list(ids)],
            )
            return {str(one): bytes(content_hash) for one, content_hash in await cursor.fetchall()}

        return await self._database.run(work)

    async def check_space(
        self, tenant: str, name: str, space: VectorSpace, metric: Metric | None
    ) -> None:
        """Raises CollectionMismatch if the collection is there and made for other vectors."""

        async def work(connection: Connection) -> None:
            try:
                row = await self._row(connection, tenant, name)
            except CollectionNotFound:
                return
            _check_space(name, row, space, metric)

        await self._database.run(work)

    async def ingest(
        self,
        tenant: str,
        name: str,
        space: VectorSpace,
        documents: Sequence[NewDocument],
        *,
        metric: Metric | None = None,
    ) -> Ingested:
        """Store what is new or different; make the collection if there is none.

        metric: of a new collection, by default cosine; for an existing one it must be that one's.
        Raises CollectionMismatch if the collection was made for other vectors.
        """
        if not 1 <= space.dimension <= MAX_DIMENSION:
            raise CollectionMismatch(
                f"vectors have {space.dimension} dimensions; at most {MAX_DIMENSION} can be stored"
            )

        async def work(connection: Connection) -> Ingested:
            async with connection.transaction():
                row, is_new = await self._ensure(connection, tenant, name, space, metric)
                _check_space(name, row, space, metric)
                changed = await _changed(connection, row, documents)
                if changed:
                    await _replace(connection, row, changed)
                if is_new:
                    # Once the rows are there: far cheaper than row by row.
                    await _make_indexes(connection, row)
                epoch = await _next_epoch(connection, row) if changed else row.epoch
                return Ingested(epoch=epoch, changed_ids=[one.id for one in changed])

        return await self._write(name, work)

    async def search(
        self,
        tenant: str,
        name: str,
        vector: NDArray[np.float32],
        *,
        space: VectorSpace | None,
        top_k: int,
        filters: Mapping[str, Any],
    ) -> Found:
        """The nearest chunks, the nearest first, equally near ones by document and place.

        space: of the vector; None if it is not known. filters: see `workflows.stores.filters`.
        Raises CollectionNotFound, CollectionMismatch, InvalidFilter.
        """
        condition, parameters = filter_sql(filters)

        async def work(connection: Connection) -> Found:
            row = await self._row(connection, tenant, name)
            if space is not None:
                _check_space(name, row, space, None)
            if len(vector) != row.space.dimension:
                raise CollectionMismatch(
                    f"the collection {name!r} holds vectors of {row.space.dimension} dimensions, "
                    f"and this one has {len(vector)}"
                )
            query = _SEARCH.format(
                operator=_OPERATOR[row.metric],
                table=row.table,
                condition=condition,
                top_k=SqlLiteral(top_k),
                id=SqlLiteral(row.id),
            )
            try:
                cursor = await connection.execute(query, [row.vector(vector), *parameters])
            except errors.UndefinedTable:  # deleted in between
                raise _not_found(name) from None
            rows = await cursor.fetchall()
            if not rows:
                raise _not_found(name)
            return Found(epoch=int(rows[0][0]), chunks=_found_chunks(rows, row.metric))

        return await self._database.run(work)

    async def _row(
        self, connection: Connection, tenant: str, name: str, *, lock: bool = False
    ) -> _Row:
        """Raises CollectionNotFound. lock: until the end of the transaction."""
        _check_name(name)
        cursor = await connection.execute(
            "SELECT id, embedder, embedder_revision, dimension, metric, epoch "
            "FROM shuntyard.collections WHERE tenant = %s AND name = %s AND NOT is_deleted"
            + (" FOR UPDATE" if lock else ""),
            [self._identity_of(tenant), name],
        )
        found = await cursor.fetchone()
        if found is None:
            raise _not_found(name)
        collection_id, embedder, revision, dimension, metric, epoch = found
        space = VectorSpace(embedder=embedder, revision=revision, dimension=dimension)
        return _Row(collection_id, space, metric, epoch)

    async def _ensure(
        self,
        connection: Connection,
        tenant: str,
        name: str,
        space: VectorSpace,
        metric: Metric | None,
    ) -> tuple[_Row, bool]:
        """The collection, locked, and whether it was made just now."""
        cursor = await connection.execute(
            "INSERT INTO shuntyard.collections AS c "
            "(tenant, name, dimension, metric, embedder, embedder_revision) "
            "VALUES (%s, %s, %s, %s, %s, %s) "
            "ON CONFLICT (tenant, name) DO UPDATE SET is_deleted = false, created_at = now(), "
            "dimension = excluded.dimension, metric = excluded.metric, "
            "embedder = excluded.embedder, embedder_revision = excluded.embedder_revision "
            "WHERE c.is_deleted RETURNING id",
            [
                *(self._identity_of(tenant), name, space.dimension, metric or "cosine"),
                *(space.embedder, space.revision),
            ],
        )
        is_new = await cursor.fetchone() is not None
        row = await self._row(connection, tenant, name, lock=True)
        if is_new:
            await connection.execute(
                _CREATE_TABLE.format(
                    table=row.table,
                    vector=SQL(f"{row.vector_type}({row.space.dimension:d})"),
                )
            )
        return row, is_new


_INFO = (
    "SELECT name, embedder, embedder_revision, dimension, metric, epoch, "
    "(SELECT count(*) FROM shuntyard.documents d WHERE d.collection_id = c.id), "
    "(SELECT coalesce(sum(num_chunks), 0) FROM shuntyard.documents d WHERE d.collection_id = c.id),"
    " extract(epoch FROM created_at)::float8, extract(epoch FROM updated_at)::float8 "
    "FROM shuntyard.collections c"
)

_CREATE_TABLE = SQL(
    "CREATE TABLE {table} (id bigint GENERATED ALWAYS AS IDENTITY, document_id text NOT NULL, "
    "chunk_index integer NOT NULL, text text NOT NULL, metadata jsonb NOT NULL, "
    "embedding {vector} NOT NULL, PRIMARY KEY (document_id, chunk_index))"
)

# One statement, so that the epoch and the rows are of one moment.
_SEARCH = SQL(
    "SELECT c.epoch, f.document_id, f.chunk_index, f.text, f.metadata, f.distance "
    "FROM shuntyard.collections c LEFT JOIN LATERAL ("
    "SELECT document_id, chunk_index, text, metadata, embedding {operator} %s AS distance "
    "FROM {table} WHERE {condition} ORDER BY distance LIMIT {top_k}) f ON true "
    "WHERE c.id = {id} AND NOT c.is_deleted"
)


async def _make_indexes(connection: Connection, row: _Row) -> None:
    operators = SQL(f"{row.vector_type}_{row.metric}_ops")
    for query in ("USING hnsw (embedding {operators})", "USING gin (metadata jsonb_path_ops)"):
        await connection.execute(
            SQL("CREATE INDEX ON {table} " + query).format(table=row.table, operators=operators)
        )


async def _changed(
    connection: Connection, row: _Row, documents: Sequence[NewDocument]
) -> list[NewDocument]:
    """Those that are not stored with this very content."""
    cursor = await connection.execute(
        "SELECT id, content_hash FROM shuntyard.documents "
        "WHERE collection_id = %s AND id = ANY(%s)",
        [row.id, [one.id for one in documents]],
    )
    stored = {one: bytes(content_hash) for one, content_hash in await cursor.fetchall()}
    return [one for one in documents if stored.get(one.id) != one.content_hash]


async def _replace(connection: Connection, row: _Row, documents: Sequence[NewDocument]) -> None:
    """Put these documents in place of what is stored under their ids."""
    await connection.execute(
        SQL("DELETE FROM {} WHERE document_id = ANY(%s)").format(row.table),
        [[one.id for one in documents]],
    )
    async with connection.cursor() as cursor:
        await cursor.executemany(
            "INSERT INTO shuntyard.documents (collection_id, id, content_hash, num_chunks) "
            "VALUES (%s, %s, %s, %s) ON CONFLICT (collection_id, id) DO UPDATE SET "
            "content_hash = excluded.content_hash, num_chunks = excluded.num_chunks, "
            "updated_at = now()",
            [(row.id, one.id, one.content_hash, len(one.chunks)) for one in documents],
        )
        copy_sql = SQL(
            "COPY {} (document_id, chunk_index, text, metadata, embedding) "
            "FROM STDIN (FORMAT BINARY)"
        ).format(row.table)
        async with cursor.copy(copy_sql) as copy:
            copy.set_types(["text", "int4", "text", "jsonb", row.vector_type])
            for document in documents:
                metadata = Jsonb(dict(document.metadata))
                for index, text in enumerate(document.chunks):
                    vector = row.vector(document.vectors[index])
                    await copy.write_row((document.id, index, text, metadata, vector))
    if sum(len(one.chunks) for one in documents) >= _MIN_ROWS_TO_ANALYZE:
        await connection.execute(SQL("ANALYZE {}").format(row.table))


async def _next_epoch(connection: Connection, row: _Row) -> int:
    cursor = await connection.execute(
        "UPDATE shuntyard.collections SET epoch = epoch + 1, updated_at = now() WHERE id = %s "
        "RETURNING epoch",
        [row.id],
    )
    found = await cursor.fetchone()
    assert found is not None
    return int(found[0])


def _check_space(name: str, row: _Row, space: VectorSpace, metric: Metric | None) -> None:
    kept = row.space
    if kept.embedder != space.embedder or kept.revision != space.revision:
        raise CollectionMismatch(
            f"the collection {name!r} was made with the embedding model {kept.embedder!r} in "
            f"revision {kept.revision[:16]}, and these vectors come from {space.embedder!r} in "
            f"revision {space.revision[:16]}: their vectors cannot be compared. Use that model, or "
            "ingest into another collection"
        )
    if kept.dimension != space.dimension:
        raise CollectionMismatch(
            f"the collection {name!r} holds vectors of {kept.dimension} dimensions, and these have "
            f"{space.dimension}"
        )
    if metric is not None and metric != row.metric:
        raise CollectionMismatch(
            f"the collection {name!r} compares vectors by {row.metric}, not by {metric}"
        )


def _found_chunks(rows: Sequence[Any], metric: Metric) -> list[FoundChunk]:
    chunks = [
        FoundChunk(
            id=f"{document_id}#{index}",
            document_id=document_id,
            chunk_index=index,
            text=text,
            metadata=metadata,
            score=1.0 - distance if metric == "cosine" else -distance,
        )
        for _, document_id, index, text, metadata, distance in rows
        # Without rows there is one of nulls; the cosine with a vector of zeros is no number.
        if distance is not None and not math.isnan(distance)
    ]
    return sorted(chunks, key=lambda one: (-one.score, one.document_id, one.chunk_index))


def _info(row: Any) -> CollectionInfo:
    name, embedder, revision, dimension, metric, epoch, num_documents, num_chunks, *times = row
    return CollectionInfo(
        name=name,
        space=VectorSpace(embedder=embedder, revision=revision, dimension=dimension),
        metric=metric,
        epoch=epoch,
        num_documents=num_documents,
        num_chunks=num_chunks,
        created_s=times[0],
        updated_s=times[1],
    )


def _check_name(name: str) -> None:
    """Raises CollectionNotFound for a name that the database could not even be asked for."""
    if "\0" in name:
        raise _not_found(name)


def _not_found(name: str) -> CollectionNotFound:
    return CollectionNotFound(f"there is no collection {name[:128]!r}")
