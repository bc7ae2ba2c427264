"""Errors of the server, as failures of a workflow's nodes."""

from __future__ import annotations

from server.errors import ShuttingDown, describe
from spot.errors import ShuntyardError
from workflows.errors import NodeFailed


def node_failed(error: ShuntyardError) -> NodeFailed:
    """Worth another try are those that say so over HTTP: the server's own, and 429."""
    reply = describe(error)
    return NodeFailed(
        error.message,
        code=reply.code or "invalid_request",
        is_retryable=(reply.status >= 500 or reply.status == 429)
        and not isinstance(error, ShuttingDown),
    )
