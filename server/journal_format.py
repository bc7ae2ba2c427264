"""What the journal of generations writes: records, in frames that show when they are torn.

A segment is a file: `MAGIC`, then frames. A frame is what was written at once: its length and a
checksum (4 bytes each, little-endian), then a msgpack array of records. Reading ends at the first
frame that is not whole, so a torn end costs the records in it and nothing before.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import msgspec

from spot.generation import SamplingParams, TokenDelta

MAGIC = b"SHYJRN01"
_HEADER = struct.Struct("<II")
_ARRAY = struct.Struct(">BI")


class JobRecord(msgspec.Struct, array_like=True):
    """What a request became, so that it becomes just that again.

    model: what was served then. id, created: of the answer.
    prompts: token ids per prompt. samplings: per choice; choice `i` belongs to prompt `i // n`.
    """

    model: str
    id: str
    created: int
    prompts: list[list[int]]
    samplings: list[SamplingParams]


class Asked(msgspec.Struct, array_like=True, tag=0):
    """A request. endpoint: a name for the path. body: its JSON, with sorted keys."""

    entry: int
    at_s: float
    tenant: str
    request_id: str
    endpoint: str
    body: bytes
    job: JobRecord


class Made(msgspec.Struct, array_like=True, tag=1):
    """What an engine added to a choice. num_before: output tokens of the choice before this."""

    entry: int
    choice: int
    num_before: int
    delta: TokenDelta


class Joined(msgspec.Struct, array_like=True, tag=2):
    """`count` deltas of a choice, from the `start`-th on, became text as one."""

    entry: int
    choice: int
    start: int
    count: int


class Named(msgspec.Struct, array_like=True, tag=3):
    """The id that a tool call of a choice was given."""

    entry: int
    choice: int
    call: int
    id: str


class WentOn(msgspec.Struct, array_like=True, tag=4):
    """Somebody came back: what follows continues what a reader has of the entry up to here."""

    entry: int
    at_s: float


class Ended(msgspec.Struct, array_like=True, tag=5):
    """All choices have finished."""

    entry: int
    at_s: float


class Dropped(msgspec.Struct, array_like=True, tag=6):
    """The entry counts no longer."""

    entry: int


Record = Asked | Made | Joined | Named | WentOn | Ended | Dropped

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Record])
encode = _encoder.encode


def frame(records: list[bytes]) -> bytes:
    """One frame of encoded records."""
    payload = _ARRAY.pack(0xDD, len(records)) + b"".join(records)
    return _HEADER.pack(len(payload), _checksum(payload)) + payload


def frames(data: memoryview, start: int, end: int) -> Iterator[tuple[int, int, list[Record]]]:
    """The whole frames between two offsets: where each begins, where it ends, its records."""
    while start + _HEADER.size <= end:
        size, checksum = _HEADER.unpack_from(data, start)
        stop = start + _HEADER.size + size
        if stop > end:
            return
        payload = data[start + _HEADER.size : stop]
        if _checksum(payload) != checksum:
            return
        try:
            records = _decoder.decode(payload)
        except msgspec.DecodeError:  # whole, but of another version of this program
            return
        yield start, stop, records
        start = stop


def _checksum(payload: bytes | memoryview) -> int:
    return zlib.crc32(payload, len(payload))
