"""Errors of what operators use, as failures of their nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from workflows.errors import NodeFailed
from workflows.stores.errors import (
    CollectionMismatch,
    CollectionNotFound,
    InvalidFilter,
    StoreError,
    StoreUnavailable,
    StoreUnusable,
)

_CODES: dict[type[StoreError], str] = {
    CollectionMismatch: "collection_mismatch",
    CollectionNotFound: "collection_not_found",
    InvalidFilter: "invalid_filter",
    StoreUnavailable: "store_unavailable",
    StoreUnusable: "store_unusable",
}


@contextmanager
def store_failures() -> Iterator[None]:
    """Raises NodeFailed for what the stores raise.

    Why Postgres is not available may name files and addresses: that is for the log.
    """
    try:
        yield
    except StoreError as error:
        raise NodeFailed(
            public_message(error),
            code=_CODES.get(type(error), "store_error"),
            is_retryable=isinstance(error, StoreUnavailable),
        ) from None


def public_message(error: StoreError) -> str:
    """What the author of a workflow may know."""
    if isinstance(error, StoreUnusable):
        return "the server's store cannot be used; its log says why"
    if isinstance(error, StoreUnavailable):
        return "the server's store is not available at the moment"
    return error.message


def invalid_params(message: str) -> NodeFailed:
    """Parameters that are each well formed, and wrong together."""
    return NodeFailed(message, code="invalid_params", is_retryable=False)
