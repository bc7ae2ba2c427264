"""Messages between the gateway and an engine host: length-prefixed MessagePack on a local socket.

The gateway sends ToHost messages, the host answers with ToGateway messages. All deltas of one
engine step travel in one `Step`. Generations are named by a small integer handle on the wire.

A pooling host (`spot.engines.pooling_host`) speaks the same language, with messages of its own for
its work: Embed, ScorePairs; PoolingReady, Pooled, TooLong.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Literal

import msgspec

from spot.engines.base import EngineCard, EngineStats
from spot.generation import Generation, TokenDelta

MAX_FRAME_BYTES = 256 * 1024 * 1024
_HEADER = struct.Struct("<I")


class Submit(msgspec.Struct, tag="s", array_like=True):
    handle: int
    generation: Generation


class Abort(msgspec.Struct, tag="a", array_like=True):
    handles: list[int]


class Ping(msgspec.Struct, tag="p", array_like=True):
    """Liveness probe of the host's own loop; answered by Pong with the same number."""

    number: int


class Stop(msgspec.Struct, tag="x", array_like=True):
    """Shut the engine down and exit."""


class Progress(msgspec.Struct, tag="P", array_like=True):
    """What start-up is doing, in words."""

    detail: str


class Ready(msgspec.Struct, tag="R", array_like=True):
    card: EngineCard
    pids: list[int]


class HandleDelta(msgspec.Struct, array_like=True):
    handle: int
    delta: TokenDelta


class Step(msgspec.Struct, tag="S", array_like=True):
    """Every delta of one engine step. stats is present when it changed.

    num_tokens: new output tokens, and what was computed of prompts that are prefilled now.
    """

    deltas: list[HandleDelta]
    stats: EngineStats | None = None
    num_tokens: int = 0


class Refused(msgspec.Struct, tag="F", array_like=True):
    """The engine cannot serve this generation as it stands; the caller's fault."""

    handle: int
    message: str
    param: str | None = None


class Failed(msgspec.Struct, tag="E", array_like=True):
    """This generation failed inside the engine, which lives on.

    everywhere: another engine would fail at it too.
    """

    handle: int
    message: str
    everywhere: bool = False


class Pong(msgspec.Struct, tag="o", array_like=True):
    number: int


class Dead(msgspec.Struct, tag="D", array_like=True):
    """The engine died or could not start; the host exits after this.

    fatal: another start is no use.
    is_misconfigured: the engine's settings are at fault; the message names one.
    """

    message: str
    fatal: bool = False
    is_misconfigured: bool = False


class Embed(msgspec.Struct, tag="e", array_like=True):
    """Texts or token ids to vectors. truncate_to: cut each input to so many tokens."""

    handle: int
    inputs: list[str | list[int]]
    truncate_to: int | None = None


class ScorePairs(msgspec.Struct, tag="c", array_like=True):
    """Pairs of texts to one score each. truncate_to: cut each pair to so many tokens."""

    handle: int
    pairs: list[tuple[str, str]]
    truncate_to: int | None = None


class PoolingCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a pooling model says of itself once it is loaded.

    task: embed (a vector per text) or score (a number per pair of texts).
    dimension: of its vectors; 1 for scores.
    max_model_len: of one input, or of one pair, in tokens.
    matryoshka: whether vectors may be cut short; matryoshka_dimensions, if any, says to what.
    """

    task: Literal["embed", "score"]
    dimension: int
    max_model_len: int
    vocab_size: int
    device: str = "cpu"
    dtype: str = "float32"
    matryoshka: bool = False
    matryoshka_dimensions: list[int] = []


class PoolingReady(msgspec.Struct, tag="r", array_like=True):
    card: PoolingCard
    pids: list[int]


class Pooled(msgspec.Struct, tag="v", array_like=True):
    """The answer to one Embed or ScorePairs.

    values: float32, little-endian, one row of the card's dimension for each input.
    """

    handle: int
    values: bytes
    num_tokens: list[int]


class TooLong(msgspec.Struct, tag="l", array_like=True):
    """Input number `index` is longer than the model's context: nothing of the request is done."""

    handle: int
    index: int
    num_tokens: int


ToHost = Submit | Abort | Ping | Stop | Embed | ScorePairs
ToGateway = (
    Progress | Ready | Step | Refused | Failed | Pong | Dead | PoolingReady | Pooled | TooLong
)

_encoder = msgspec.msgpack.Encoder()
to_host_decoder: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)
to_gateway_decoder: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)


def encode_frame(message: ToHost | ToGateway) -> bytes:
    """One message with its length prefix. Raises ValueError above MAX_FRAME_BYTES."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"message of {len(payload)} bytes is over {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(payload)) + payload


class FrameReader:
    """Cuts a byte stream into payloads, wherever the chunks happen to end."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Payloads that `chunk` completes. Raises ValueError on an impossible length."""
        self._buffer += chunk
        start = 0
        buffer = self._buffer
        while len(buffer) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes is over {MAX_FRAME_BYTES}")
            end = start + _HEADER.size + length
            if len(buffer) < end:
                break
            yield bytes(buffer[start + _HEADER.size : end])
            start = end
        if start:
            del buffer[:start]
