"""The journal of generations: what was asked and made, on disk before a client sees it.

It outlives the process, however that ends (`kill -9`); nothing is synced, so it may lose its end
when the machine itself goes down. One folder belongs to one server at a time.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from server.journal_format import (
    MAGIC,
    Asked,
    Dropped,
    Ended,
    Made,
    Record,
    WentOn,
    encode,
    frame,
    frames,
)

logger = logging.getLogger(__name__)

_TIDY_EVERY_S = 10.0
_RETRY_AFTER_S = 10.0
_MAX_SEGMENT_BYTES = 16 * 1024 * 1024
_SEGMENTS = 16
_PATTERN = "segment-*.journal"


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
class _Segment:
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


class Journal:
    """All entries, by tenant and request id. Not for several threads, but for `read`.

    ttl_s: an entry that was neither written to nor answered from for so long is forgotten.
    max_bytes: beyond this, room is made by forgetting: first what has ended, then what nobody
        answers from, oldest first. Where there is none of these, new requests are not taken.
    now_s: wall-clock seconds.
    identities: names of tenants that stay theirs when the server is started with other settings.
    """

    def __init__(
        self,
        folder: Path,
        *,
        now_s: Callable[[], float],
        ttl_s: float = 3600.0,
        max_bytes: int = 1024**3,
        identities: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._identities = identities or {}
        self._now_s = now_s
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._segment_bytes = min(_MAX_SEGMENT_BYTES, max_bytes // _SEGMENTS)
        self._entries: dict[tuple[str, str], Entry] = {}
        self._by_number: dict[int, Entry] = {}
        self._segments: dict[int, _Segment] = {}
        self._current: _Segment | None = None
        self._file: int | None = None
        self._lock: int | None = None
        self._buffer: list[bytes] = []
        self._touched: set[Entry] = set()
        self._next_segment = 1
        self._next_entry = 1
        self._tidied_s = 0.0
        self._failed_s: float | None = None
        self.num_write_failures = 0
        self.is_full = False
        self.num_bytes = 0
        self.num_resumed = 0

    # Beginning and end ---------------------------------------------------------------------

    def open(self) -> None:
        """Take the folder and read what is there. Raises JournalUnusable."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in sorted(self._folder.glob(_PATTERN)):
                self._load(path)
        except BlockingIOError:
            self.close()
            raise JournalUnusable(f"another server uses {self._folder}") from None
        except (OSError, ValueError) as error:
            self.close()
            raise JournalUnusable(f"{self._folder}: {error}") from None
        self.tidy()

    def close(self) -> None:
        self.flush()
        self._end_segment()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _load(self, path: Path) -> None:
        number = int(path.stem.removeprefix("segment-"))
        self._next_segment = max(self._next_segment, number + 1)
        data = memoryview(path.read_bytes())
        if bytes(data[: len(MAGIC)]) != MAGIC:
            if len(data) >= len(MAGIC):
                logger.warning("%s is no journal of this version; it is left alone", path)
            return
        modified_s = path.stat().st_mtime
        segment = self._segments[number] = _Segment(number, path, len(data))
        self.num_bytes += len(data)
        whole = len(MAGIC)
        for start, stop, records in frames(data, whole, len(data)):
            for record in records:
                self._replay(record, segment, start, stop, modified_s)
            whole = stop
        if whole < len(data):
            logger.warning("%s ends in %d torn bytes", path, len(data) - whole)

    def _replay(
        self, record: Record, segment: _Segment, start: int, stop: int, modified_s: float
    ) -> None:
        self._next_entry = max(self._next_entry, record.entry + 1)
        if isinstance(record, Asked):
            entry = Entry(
                record.entry,
                record.tenant,
                record.request_id,
                record.endpoint,
                digest_of(record.endpoint, record.body),
                record.at_s,
                records=[],
            )
            self._add(entry)
        known = self._by_number.get(record.entry)
        if known is None:
            return
        self._note(known, segment, start, stop)
        if known.records is not None:
            known.records.append(record)
        if isinstance(record, Dropped):
            segment.dropped.append(known)
            self.forget(known)
        elif isinstance(record, Ended):
            known.is_ended, known.last_s, known.records = True, record.at_s, None
        elif isinstance(record, Made | WentOn):
            known.last_s = modified_s

    # Entries -------------------------------------------------------------------------------

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    def find(self, tenant: str, request_id: str) -> Entry | None:
        entry = self._entries.get((self._identities.get(tenant, tenant), request_id))
        if entry is not None and entry.answering is None and self._is_stale(entry):
            self.forget(entry)
            return None
        return entry

    def add(self, tenant: str, request_id: str, endpoint: str, digest: bytes) -> Entry | None:
        """A new entry, of which nothing is written yet; None if there is no room."""
        now_s = self._now_s()
        if now_s - self._tidied_s >= _TIDY_EVERY_S:
            self.tidy()
        if self._is_failing() or not self._has_room():
            return None
        owner = self._identities.get(tenant, tenant)
        entry = Entry(self._next_entry, owner, request_id, endpoint, digest, now_s)
        self._next_entry += 1
        self._add(entry)
        return entry

    def _add(self, entry: Entry) -> None:
        key = (entry.tenant, entry.request_id)
        if (earlier := self._entries.get(key)) is not None:
            self.forget(earlier)
        self._entries[key] = self._by_number[entry.number] = entry

    def touch(self, entry: Entry) -> None:
        """The entry was used now."""
        entry.last_s = self._now_s()

    def end(self, entry: Entry) -> None:
        """All choices have finished."""
        if not entry.is_ended:
            entry.is_ended = True
            self.touch(entry)
            self.append(entry, Ended(entry.number, entry.last_s))

    def drop(self, entry: Entry) -> None:
        """Forget an entry, also for those who read the journal later."""
        if entry.is_dropped:
            return
        if entry.spans or entry in self._touched:
            self.append(entry, Dropped(entry.number))
        self.forget(entry)

    def forget(self, entry: Entry) -> None:
        """Forget an entry, and the segments in which no other lies."""
        entry.is_dropped = True
        entry.records = None
        key = (entry.tenant, entry.request_id)
        if self._entries.get(key) is entry:
            del self._entries[key]
        self._by_number.pop(entry.number, None)
        for number in entry.spans:
            segment = self._segments.get(number)
            if segment is not None:
                segment.entries.pop(entry.number, None)

    # Writing -------------------------------------------------------------------------------

    def append(self, entry: Entry, record: Record) -> None:
        """Write a record at the end of this turn of the event loop, or at `flush`."""
        if not entry.is_dropped:
            self._append(entry, record)

    def _append(self, entry: Entry, record: Record) -> None:
        if not self._buffer:
            self._flush_soon()
        self._buffer.append(encode(record))
        self._touched.add(entry)
        entry.records = None

    def _flush_soon(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # at the start and at the end
            return
        loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what was appended, at once. A failure ends nothing but the journal's promise."""
        if not self._buffer:
            return
        data = frame(self._buffer)
        touched = list(self._touched)
        self._buffer.clear()
        self._touched.clear()
        if self._is_failing():
            for entry in touched:
                self.forget(entry)
            return
        try:
            segment = self._open_segment()
            start = segment.num_bytes
            self._write(segment, data)
        except OSError as error:
            if self._failed_s is None:
                logger.error("the journal cannot be written: %s", error)
            self._failed_s = self._now_s()
            self.num_write_failures += 1
            self._end_segment()  # its end may be torn
            for entry in touched:
                self.forget(entry)
            return
        self._failed_s = None
        for entry in touched:
            if entry.is_dropped:
                segment.dropped.append(entry)
            else:
                self._note(entry, segment, start, segment.num_bytes)
        if segment.num_bytes >= self._segment_bytes:
            self._end_segment()
            self.tidy()

    def _is_failing(self) -> bool:
        """Whether the disk refused a write, and it is too early to try again."""
        return self._failed_s is not None and self._now_s() - self._failed_s < _RETRY_AFTER_S

    def _write(self, segment: _Segment, data: bytes) -> None:
        assert self._file is not None
        view = memoryview(data)
        while view:
            num_written = os.write(self._file, view)
            segment.num_bytes += num_written
            self.num_bytes += num_written
            view = view[num_written:]

    def _open_segment(self) -> _Segment:
        if self._current is None:
            number = self._next_segment
            path = self._folder / f"segment-{number:010d}.journal"
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND
            self._file = os.open(path, flags, 0o600)
            self._next_segment += 1
            self._current = self._segments[number] = _Segment(number, path)
            self._write(self._current, MAGIC)
        return self._current

    def _end_segment(self) -> None:
        self._current = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _note(self, entry: Entry, segment: _Segment, start: int, stop: int) -> None:
        first, _ = entry.spans.get(segment.number, (start, stop))
        entry.spans[segment.number] = (first, stop)
        segment.entries[entry.number] = entry

    # Room ----------------------------------------------------------------------------------

    def tidy(self) -> None:
        """Forget what is past its time, and delete the segments of which nothing is left."""
        self._tidied_s = self._now_s()
        for entry in list(self._entries.values()):
            if entry.answering is None and self._is_stale(entry):
                self.forget(entry)
        self._delete_empty()
        self._has_room()

    def _is_stale(self, entry: Entry) -> bool:
        return self._now_s() - entry.last_s > self._ttl_s

    def _has_room(self) -> bool:
        """Whether new entries fit, after making room where that helps."""
        # One segment is kept free for the answers that run.
        limit = self._max_bytes - self._segment_bytes
        while self.num_bytes > limit and (victim := self._victim()) is not None:
            for entry in list(victim.entries.values()):
                self.drop(entry)
            self._delete_empty()
        was_full, self.is_full = self.is_full, self.num_bytes > limit
        if self.is_full and self.num_bytes > self._max_bytes + self._segment_bytes:
            self._drop_longest()
        if self.is_full and not was_full:
            logger.warning(
                "the journal is full with running answers (%d bytes): new ones are not journaled",
                self.num_bytes,
            )
        return not self.is_full

    def _victim(self) -> _Segment | None:
        """The oldest closed segment of which all has ended, or of which nothing is answered."""
        closed = [s for s in self._segments.values() if s is not self._current]
        idle = [s for s in closed if all(e.answering is None for e in s.entries.values())]
        ended = (s for s in idle if all(e.is_ended for e in s.entries.values()))
        return next(ended, idle[0] if idle else None)

    def _drop_longest(self) -> None:
        """Running answers alone are too much: the journal lets go of its oldest."""
        oldest = next(iter(self._segments.values()))
        logger.warning("the journal lets go of %d running answers", len(oldest.entries))
        for entry in list(oldest.entries.values()):
            self.drop(entry)
        self._delete_empty()

    def _delete_empty(self) -> None:
        for number, segment in list(self._segments.items()):
            if segment is not self._current and not segment.entries:
                segment.path.unlink(missing_ok=True)
                self.num_bytes -= segment.num_bytes
                del self._segments[number]
                for entry in segment.dropped:
                    if any(other in self._segments for other in entry.spans):
                        self._append(entry, Dropped(entry.number))

    # Reading -------------------------------------------------------------------------------

    def read(self, entry: Entry) -> list[Record]:
        """All records of an entry, in order. Blocks; may run in a thread of its own once what was
        appended is flushed."""
        if entry.records is not None:
            return entry.records
        found: list[Record] = []
        for number, (start, stop) in sorted(entry.spans.items()):
            segment = self._segments.get(number)
            if segment is None:
                continue
            with segment.path.open("rb") as file:
                file.seek(start)
                data = memoryview(file.read(stop - start))
            for _, _, records in frames(data, 0, len(data)):
                found += [record for record in records if record.entry == entry.number]
        return found
