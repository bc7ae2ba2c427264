"""Which servers a request has come through, so that none gets it a second time.

Each Shuntyard has an id of its own for each run (its *instance*). A request to an upstream names
those that it has come through, in the order in which they had it.
"""

from __future__ import annotations

from collections.abc import Sequence

from spot.errors import InvalidRequest

HEADER = "X-Shuntyard-Via"
CODE = "upstream_circle"
MAX_SERVERS = 8


def via_headers(via: Sequence[str], own_instance: str) -> dict[str, str]:
    """What a request that this server passes on says; nothing from one that has no id."""
    return {HEADER: ", ".join([*via, own_instance])} if own_instance else {}


def read_via(value: str, own_instance: str) -> list[str]:
    """Where a request has been. Raises InvalidRequest if that was here, or too many places."""
    via = [name.strip() for name in value.split(",")]
    if own_instance in via:
        raise InvalidRequest(
            "The request has been at this server before: servers are each other's upstream. "
            "Remove one of them from --upstream.",
            code=CODE,
        )
    if len(via) > MAX_SERVERS:
        raise InvalidRequest(
            f"The request has come through {len(via)} servers, at most {MAX_SERVERS} are allowed: "
            "is one of them the upstream of its own upstream?",
            code=CODE,
        )
    return via
