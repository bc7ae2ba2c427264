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
    """Raises NodeFailed for what the stores raise."""
    try:
        yield
    except StoreError as error:
        raise NodeFailed(
            error.message,
            code=_CODES.get(type(error), "store_error"),
            is_retryable=isinstance(error, StoreUnavailable),
        ) from None


def invalid_params(message: str) -> NodeFailed:
    """Parameters that are each well formed, and wrong together."""
    return NodeFailed(message, code="invalid_params", is_retryable=False)
