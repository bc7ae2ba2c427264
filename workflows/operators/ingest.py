"""`ingest`: documents, cut into chunks and embedded, into a collection."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import numpy as np
import orjson
from pydantic import BeforeValidator, Field, JsonValue, StringConstraints

from workflows.chunking import (
    DEFAULT_SIZE_TOKENS,
    Chunking,
    Unit,
    num_special_tokens,
    split_texts,
)
from workflows.errors import NodeFailed
from workflows.operators.base import JsonType, NodeContext, NodeResult
from workflows.operators.failures import invalid_params, store_failures
from workflows.pooled_items import PooledItems
from workflows.pooling import EmbeddingModel
from workflows.scheduling.messages import Size
from workflows.spec import Document
from workflows.stores.collections import CollectionStore, Metric, NewDocument, VectorSpace

MAX_DOCUMENTS = 10_000
# In the hash of a document's content: another number here stores every document anew.
_HASH_VERSION = 1
_CHARACTERS_PER_TOKEN = 4

CollectionName = Annotated[str, StringConstraints(pattern=r"^\w[\w.:-]{0,127}$")]
DocumentId = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class ChunkParams(Document):
    """size: at most, of a chunk; by default 256 tokens, or what the model takes if that is less.

    overlap: of a chunk with the one before it, by default an eighth of size.
    unit: tokens of the embedding model, or characters.
    """

    size: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    overlap: Annotated[int, Field(ge=0)] | None = None
    unit: Unit = "tokens"


class IngestDocument(Document):
    """id: by default made of the text. metadata: what searches can filter by."""

    text: str
    id: DocumentId | None = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict)


def _document(value: Any) -> Any:
    return {"text": value} if isinstance(value, str) else value


TextOrDocument = Annotated[
    IngestDocument, BeforeValidator(_document, json_schema_input_type=str | IngestDocument)
]


class IngestParams(Document):
    """collection: made if there is none. documents: a text alone is a document too.

    metric: how a new collection compares vectors, by default cosine.
    """

    collection: CollectionName
    documents: Annotated[list[TextOrDocument], Field(max_length=MAX_DOCUMENTS, fail_fast=True)]
    chunk: ChunkParams = Field(default_factory=ChunkParams)
    metric: Metric | None = None
    model: str | None = None


class IngestOperator:
    """Stores all documents or none. What is stored already, with the same content, is not embedded
    again; a document with a known id and other content replaces that one."""

    name = "ingest"
    params = IngestParams
    resources = ("embed", "search")
    reads_own: Final = True
    outputs: Mapping[str, JsonType] = {
        "collection": "string",
        "epoch": "integer",
        "num_documents": "integer",
        "num_chunks": "integer",
        "changed": "integer",
        "document_ids": "array",
    }

    def __init__(self, items: PooledItems, store: CollectionStore) -> None:
        self._items = items
        self._store = store

    async def run(self, params: IngestParams, context: NodeContext) -> NodeResult:
        model = await self._items.models.embedding(params.model)
        chunking = chunking_for(params.chunk, model)
        documents = _by_id(params.documents)
        hashes = {one: _content_hash(document, chunking) for one, document in documents.items()}
        space = VectorSpace(embedder=model.name, revision=model.revision, dimension=model.dimension)
        tenant, name = context.tenant, params.collection
        with store_failures():
            # Before anything is embedded for it.
            await self._store.check_space(tenant, name, space, params.metric)
            known = await self._store.hashes(tenant, name, list(documents))
        new = [one for one in documents if known.get(one) != hashes[one]]
        texts = [documents[one].text for one in new]
        chunks = await split_texts(texts, chunking, model.tokenizer_file)
        answer = await self._items.embed(context, model, [text for some in chunks for text in some])
        vectors = iter(answer.values)
        stored = [
            NewDocument(
                id=one,
                content_hash=hashes[one],
                metadata=documents[one].metadata,
                chunks=some,
                vectors=_rows(vectors, len(some), model.dimension),
            )
            for one, some in zip(new, chunks, strict=True)
        ]
        size = Size(outputs=sum(map(len, chunks)))
        with store_failures():
            async with context.job.slot("search", profile="ingest", size=size):
                result = await self._store.ingest(tenant, name, space, stored, metric=params.metric)
        return NodeResult(
            output={
                "collection": name,
                "epoch": result.epoch,
                "num_documents": len(documents),
                "num_chunks": sum(map(len, chunks)),
                "changed": len(result.changed_ids),
                "document_ids": list(documents),
            },
            usage=answer.usage,
        )


def chunking_for(wanted: ChunkParams, model: EmbeddingModel) -> Chunking:
    """The chunking that is meant, for a model. Raises NodeFailed."""
    if wanted.unit == "characters":
        size = wanted.size or DEFAULT_SIZE_TOKENS * _CHARACTERS_PER_TOKEN
    else:
        if model.tokenizer_file is None:
            raise invalid_params(
                f"params.chunk.unit: the model {model.name!r} has no tokenizer.json to count "
                "tokens with; use characters"
            )
        limit = model.max_tokens - num_special_tokens(model.tokenizer_file)
        size = wanted.size or min(DEFAULT_SIZE_TOKENS, limit)
        if size > limit:
            raise invalid_params(
                f"params.chunk.size: the model {model.name!r} takes at most {limit} tokens of text"
            )
    overlap = size // 8 if wanted.overlap is None else wanted.overlap
    if overlap >= size:
        raise invalid_params(f"params.chunk.overlap: must be below the size, which is {size}")
    return Chunking(unit=wanted.unit, size=size, overlap=overlap)


def _by_id(documents: list[IngestDocument]) -> dict[str, IngestDocument]:
    """Raises NodeFailed for two contents under one id."""
    found: dict[str, IngestDocument] = {}
    for place, document in enumerate(documents):
        if "\0" in document.text or "\0" in (document.id or "") or _has_nul(document.metadata):
            raise invalid_params(
                f"params.documents.{place}: holds the character NUL, which Postgres cannot store"
            )
        document_id = document.id or f"sha256-{_digest(document.text).hex()[:32]}"
        if found.setdefault(document_id, document) != document:
            raise invalid_params(
                f"params.documents.{place}.id: {document_id!r} is the id of another one as well"
            )
    return found


def _has_nul(value: JsonValue) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any("\0" in key or _has_nul(item) for key, item in value.items())
    return isinstance(value, list) and any(map(_has_nul, value))


def _content_hash(document: IngestDocument, chunking: Chunking) -> bytes:
    """Of all that the stored chunks depend on, beside the collection's embedding model."""
    content = [
        _HASH_VERSION,
        document.text,
        document.metadata,
        [chunking.unit, chunking.size, chunking.overlap],
    ]
    try:
        return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).digest()
    except TypeError as error:
        raise NodeFailed(
            f"a document cannot be stored: {error}", code="invalid_params", is_retryable=False
        ) from None


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _rows(vectors: Iterator[Any], count: int, dimension: int) -> Any:
    if count == 0:
        return np.zeros((0, dimension), np.float32)
    return np.stack([next(vectors) for _ in range(count)])
