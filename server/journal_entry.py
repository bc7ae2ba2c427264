"""What the journal keeps in memory of its requests and files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from server.journal_format import Record


class Answering(Protocol):
    """Somebody who answers from an entry now."""

    async def end(self) -> None:
        """Stop, and return when that is done."""


@dataclass(slots=True, eq=False)
class Entry:
    """One request in the journal.

    digest: of the endpoint and body. last_s: when it was last written to, or left.
    spans: by segment, where its records lie. records: what was read at the start, if it had not
        ended then. answering: who answers from it, if somebody does.
    """

    number: int
    tenant: str
    request_id: str
    endpoint: str
    digest: bytes
    last_s: float
    is_ended: bool = False
    is_dropped: bool = False
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    records: list[Record] | None = None
    answering: Answering | None = None


@dataclass(slots=True, eq=False)
class Segment:
    """One file. entries: those with records in it, unless forgotten. dropped: those of which it
    says that they count no longer."""

    number: int
    path: Path
    num_bytes: int = 0
    entries: dict[int, Entry] = field(default_factory=dict)
    dropped: list[Entry] = field(default_factory=list)


class JournalUnusable(Exception):
    """The folder cannot be used; the message says why."""


def digest_of(endpoint: str, body: bytes) -> bytes:
    """What two requests have in common if, and only if, they ask the same."""
    return hashlib.sha256(b"%b\0%b" % (endpoint.encode(), body)).digest()
