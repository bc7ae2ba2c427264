"""Errors of workflows and their stores, as the edge knows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from server.errors import (
    BadWorkflow,
    CollectionMissing,
    RunKeyReused,
    RunMissing,
    RunNotHere,
    StoreDown,
    StoreLimit,
    TemplateMissing,
)
from spot.errors import Overloaded
from workflows.errors import (
    InvalidWorkflow,
    JournalUnavailable,
    KeyReused,
    RunElsewhere,
    RunNotFound,
    TemplateNotFound,
    TooManyRuns,
)
from workflows.operators.failures import public_message
from workflows.stores.errors import CollectionNotFound, StoreError, StoreFull


@contextmanager
def as_http() -> Iterator[None]:
    """Raises the edge's error for one of workflows'."""
    try:
        yield
    except InvalidWorkflow as error:
        details = [
            {"path": one.path, "code": one.code, "message": one.message} for one in error.problems
        ]
        raise BadWorkflow(error.message, details=details) from None
    except RunNotFound as error:
        raise RunMissing(error.message) from None
    except TooManyRuns as error:
        raise Overloaded(error.message) from None
    except KeyReused as error:
        raise RunKeyReused(error.message) from None
    except RunElsewhere as error:
        raise RunNotHere(error.message) from None
    except JournalUnavailable as error:
        raise StoreDown(error.message) from None
    except TemplateNotFound as error:
        raise TemplateMissing(error.message) from None
    except CollectionNotFound as error:
        raise CollectionMissing(error.message) from None
    except StoreFull as error:
        raise StoreLimit(error.message) from None
    except StoreError as error:
        raise StoreDown(public_message(error)) from None
