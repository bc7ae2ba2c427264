"""Reads a chat completion's event stream, wherever its bytes happen to be cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


class StreamBroken(Exception):
    """The stream said that it failed, or ended without saying that it was done."""


class EventReader:
    """Cuts bytes into the data of events. Comments and other fields are passed over."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The data of each event that `chunk` completes."""
        *blocks, self._rest = (self._rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in blocks:
            lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)


@dataclass(slots=True)
class StreamTimes:
    """What one stream amounted to. Times are of the caller's clock, in seconds.

    num_output_tokens: by the usage at the end; until then, and without one, the number of pieces.
    """

    started_s: float
    first_s: float | None = None
    last_s: float | None = None
    num_pieces: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    is_done: bool = False
    _reader: EventReader = field(default_factory=EventReader)

    @property
    def ttft_s(self) -> float | None:
        """From the start to the first piece of text."""
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for fewer than two."""
        if self.first_s is None or self.last_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_output_tokens - 1)

    def feed(self, chunk: bytes, now_s: float) -> None:
        """Take bytes that arrived now. Raises StreamBroken for an error event."""
        for data in self._reader.feed(chunk):
            if data == b"[DONE]":
                self.is_done = True
            else:
                self._take(data, now_s)

    def check_complete(self) -> None:
        """Raises StreamBroken unless the stream finished: a reason, then `[DONE]`."""
        if not self.is_done:
            raise StreamBroken("the stream ended without [DONE]")
        if self.finish_reason is None:
            raise StreamBroken("the stream ended without a finish reason")

    def _take(self, data: bytes, now_s: float) -> None:
        try:
            event = json.loads(data)
        except ValueError:
            raise StreamBroken(f"an event is not JSON: {data[:100]!r}") from None
        if not isinstance(event, dict) or "error" in event:
            raise StreamBroken(f"the stream failed: {data[:300]!r}")
        for choice in event.get("choices", ()):
            self._take_choice(choice, now_s)
        usage = event.get("usage")
        if usage:
            self.num_prompt_tokens = usage["prompt_tokens"]
            self.num_output_tokens = usage["completion_tokens"]

    def _take_choice(self, choice: dict[str, Any], now_s: float) -> None:
        if choice.get("delta", {}).get("content"):
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s = now_s
            self.num_pieces += 1
            self.num_output_tokens = self.num_pieces
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
