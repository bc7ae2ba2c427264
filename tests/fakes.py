"""Stand-ins for the parts around the one under test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.types import Message, Scope

from server.record import SCOPE_KEY, RequestRecord
from spot.engines.base import DeltaSink, EngineCard, EngineStats, EngineStatus
from spot.errors import EngineUnavailable, ShuntyardError
from spot.generation import Generation, TokenDelta
from spot.parsed import ChainedParser, OutputParser, ParsedDelta, ParserSource

OPEN_THINK, CLOSE_THINK = "<think>", "</think>"


class HandEngine:
    """An engine that is driven by hand: the test pushes the deltas."""

    def __init__(self, *, max_model_len: int = 4096, vocab_size: int = 49152) -> None:
        self.card = EngineCard(
            max_model_len=max_model_len, vocab_size=vocab_size, engine="hand", max_num_seqs=8
        )
        self.status = EngineStatus("ready")
        self.stats = EngineStats()
        self.generations: list[Generation] = []
        self.aborted: list[str] = []
        self.refuse_after: int | None = None
        self._sinks: dict[str, DeltaSink] = {}

    def submit(self, generation: Generation, sink: DeltaSink) -> None:
        if self.refuse_after is not None and len(self.generations) >= self.refuse_after:
            raise EngineUnavailable("the engine is draining")
        self.generations.append(generation)
        self._sinks[generation.id] = sink

    def abort(self, generation_id: str) -> None:
        self.aborted.append(generation_id)

    def push(self, index: int, *token_ids: int, finish: Any = None, **fields: Any) -> None:
        """Give tokens to the generation that was submitted as number `index`."""
        sink = self._sinks[self.generations[index].id]
        sink.on_delta(TokenDelta(list(token_ids), finish, **fields))

    def fail(self, index: int, error: ShuntyardError) -> None:
        self._sinks[self.generations[index].id].on_error(error)


class ThinkParser:
    """A reasoning parser for tests: `<think>…</think>` is reasoning, the rest content.

    Tags may be split over pieces.
    """

    def __init__(self) -> None:
        self._held = ""
        self._thinks = False

    def feed(self, text: str, token_ids: list[int], finished: bool) -> ParsedDelta:
        parsed = ParsedDelta()
        self._held += text
        while True:
            tag = CLOSE_THINK if self._thinks else OPEN_THINK
            before, found, after = self._held.partition(tag)
            if not found:
                break
            self._add(parsed, before)
            self._held, self._thinks = after, not self._thinks
        keep = 0 if finished else _overlap(self._held, tag)
        cut = len(self._held) - keep
        self._add(parsed, self._held[:cut])
        self._held = self._held[cut:]
        return parsed

    def _add(self, parsed: ParsedDelta, text: str) -> None:
        if self._thinks:
            parsed.reasoning += text
        else:
            parsed.content += text


class ThinkSource:
    """A reasoning parser for a whole model, and a tool parser behind it.

    A `spot.parsed.ParserSource`.
    """

    def __init__(self, tools: ParserSource | None = None) -> None:
        self._tools = tools

    def new(self, body: dict[str, Any], prompt_token_ids: list[int]) -> OutputParser:
        if self._tools is None:
            return ThinkParser()
        return ChainedParser(ThinkParser(), self._tools.new(body, prompt_token_ids))

    def adjust(self, body: dict[str, Any]) -> dict[str, Any] | None:
        return None if self._tools is None else self._tools.adjust(body)

    def reasoning_ended(self, body: dict[str, Any], prompt_token_ids: list[int]) -> bool | None:
        return False


def _overlap(text: str, tag: str) -> int:
    sizes = range(min(len(text), len(tag) - 1), 0, -1)
    return next((size for size in sizes if tag.startswith(text[-size:])), 0)


class Wire:
    """Both ends of one ASGI exchange: what the client sends, and what was sent to it."""

    def __init__(self, *incoming: Message) -> None:
        self._incoming = list(incoming)
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        return self._incoming.pop(0) if self._incoming else {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {key.decode(): value.decode() for key, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])


def body_messages(*chunks: bytes) -> list[Message]:
    """A request body in several pieces, as a server hands it to an application."""
    return [
        {"type": "http.request", "body": chunk, "more_body": position < len(chunks) - 1}
        for position, chunk in enumerate(chunks)
    ]


def http_scope(
    path: str = "/",
    *,
    method: str = "POST",
    headers: Sequence[tuple[str, str]] = (),
    root_path: str = "",
) -> Scope:
    """A request's scope, with a record as the outermost middleware leaves one."""
    return {
        "type": "http",
        "method": method,
        "path": path,
        "root_path": root_path,
        "query_string": b"",
        "headers": [(key.lower().encode(), value.encode("latin-1")) for key, value in headers],
        SCOPE_KEY: RequestRecord("req_test", method, path, 0.0),
    }
