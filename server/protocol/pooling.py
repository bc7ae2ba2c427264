"""Bodies of the endpoints for embeddings, reranking and scores."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag

from server.protocol.base import RequestBody
from server.protocol.sampling import INT64_MAX, TokenId, input_kind

MAX_INPUTS = 2048
MAX_DOCUMENTS = 10_000

NonEmpty = Annotated[str, StringConstraints(min_length=1)]
InputIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)]


class PoolingBody(RequestBody):
    """What all of them share. truncate_prompt_tokens: -1 cuts to the model's context."""

    model: str | None = None
    """A served name; without one the model of this kind."""
    user: str | None = None
    """Accepted without effect."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=INT64_MAX)
    """Cut each input to so many tokens; -1 to what the context allows."""


EmbeddingInput = Annotated[
    Annotated[NonEmpty, Tag("text")]
    | Annotated[InputIds, Tag("ids")]
    | Annotated[
        list[NonEmpty], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("texts")
    ]
    | Annotated[
        list[InputIds], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("id_lists")
    ],
    Discriminator(input_kind),
]


class EmbeddingRequest(PoolingBody):
    """`POST /v1/embeddings`."""

    input: EmbeddingInput
    """Text, token ids, or a list of either: one embedding for each."""
    encoding_format: Literal["float", "base64"] | None = None
    """float: a list of numbers; base64: 32-bit floats, little-endian."""
    dimensions: int | None = Field(default=None, ge=1, le=INT64_MAX)
    """Cut vectors to so many dimensions, for models that allow it."""

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """One entry for each embedding."""
        value = self.input
        if isinstance(value, str):
            return [value]
        if isinstance(value[0], int):
            return [value]
        return value


class TextDocument(BaseModel):
    """A document as an object; of its fields only the text counts."""

    model_config = ConfigDict(strict=True, extra="ignore")

    text: str


class RerankRequest(PoolingBody):
    """`POST /v1/rerank`, as Jina, Cohere and vLLM have it. top_n: 0 or null for all."""

    query: str
    """What the documents are ranked by."""
    documents: (
        str
        | Annotated[
            list[str | TextDocument],
            Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True),
        ]
    )
    """Texts, or objects with a `text`."""
    top_n: int | None = Field(default=None, ge=0, le=INT64_MAX)
    """Answer with so many of the best; 0 or null for all."""
    return_documents: bool | None = None
    """false leaves the documents out of the answer."""

    @property
    def texts(self) -> list[str]:
        documents = [self.documents] if isinstance(self.documents, str) else self.documents
        return [item if isinstance(item, str) else item.text for item in documents]


class ScoreRequest(PoolingBody):
    """`POST /v1/score`: one pair, one text with many, or as many with as many.

    The two sides go by vLLM's three pairs of names.
    """

    text_1: str | Texts | None = None
    """The first side: one text or several."""
    text_2: str | Texts | None = None
    """The second side."""
    queries: str | Texts | None = None
    """Another name of the first side."""
    documents: str | Texts | None = None
    """Another name of the second side."""
    data_1: str | Texts | None = None
    """Another name of the first side."""
    data_2: str | Texts | None = None
    """Another name of the second side."""
