"""The content signature of a node: equal ones would compute the same.

It is taken when a node is ready, of its operator and of what the operator says its work depends on:
rendered parameters, and versions of everything that it reads.

HeraSys signs a node by its ancestors as well (equation 2), so that equal work is known before it is
executed. That is unsafe behind a sampled or live node, whose value differs under the same
signature, and misses equal inputs that came another way. Where it is safe, behind pure nodes
(`Identity.is_pure`), the signature of the content finds the same: while a run that has used their
results is active, equal ancestors have theirs at once (`workflows.held_results`), and the node
itself is ready, with equal content, before anything is executed.

Source: HeraSys section 4.2. Ours is canonical, length-prefixed, versioned and keyed.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import orjson

VERSION = b"1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """content: all that a node's result depends on, as JSON.

    sampled: why equal work would not give an equal result; empty if it would. is_pure: whether it
    would whenever it is done, as long as the server runs: nothing that the content does not name
    has a part in it. wants_deltas: whether the node streams its output.
    """

    content: Any
    sampled: str = ""
    is_pure: bool = False
    wants_deltas: bool = False


@runtime_checkable
class Shareable(Protocol):
    """An operator whose work may serve several equal nodes."""

    def identity(self, params: Any) -> Identity | None:
        """What the result of these parameters depends on; None where it is never shared: work that
        changes something is done for each node."""
        ...


def signature(operator: str, identity: Identity, *, scope: str, salt: str, secret: bytes) -> str:
    """Equal for equal work in the same scope. secret: the server's, so that nobody can guess one.

    scope: names those who may share (a run, a tenant). salt: the author's, to keep nodes apart.
    """
    digest = hmac.new(secret, digestmod=hashlib.sha256)
    content = orjson.dumps(identity.content, option=orjson.OPT_SORT_KEYS)
    for part in (VERSION, scope.encode(), salt.encode(), operator.encode(), content):
        # With lengths, so that no two lists of parts read alike.
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
