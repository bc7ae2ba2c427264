"""What can go wrong with the stores.

StoreError (a WorkflowError)
├── StoreUnavailable      Postgres cannot be started or reached now; worth trying again
├── StoreUnusable         this Postgres or folder cannot serve as it is; someone has to change it
├── CollectionNotFound    no collection of this name, or of another tenant
├── CollectionMismatch    made for other vectors: dimension, metric, model or its revision
├── InvalidFilter         a filter that means nothing
└── StoreFull             a tenant has as much of something as it may have
"""

from __future__ import annotations

from workflows.errors import WorkflowError


class StoreError(WorkflowError):
    """Root of the stores' errors."""


class StoreUnavailable(StoreError):
    """Postgres cannot be started or reached now. Worth trying again."""


class StoreUnusable(StoreError):
    """This Postgres or this folder cannot serve as it is. The message says what to change."""


class CollectionNotFound(StoreError):
    """There is no such collection for this tenant."""


class CollectionMismatch(StoreError):
    """The collection was made for other vectors."""


class InvalidFilter(StoreError):
    """The filter is not one. The message names the field."""


class StoreFull(StoreError):
    """The tenant has as many as it may have."""
