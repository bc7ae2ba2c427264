"""The contract between the gateway and whatever generates tokens.

An engine is pushed generations and pushes token deltas back, on the event loop that runs it; no
call here blocks or waits. Everything that is text (templates, detokenizing, stop strings, parsers)
stays with the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol

import msgspec

from spot.errors import ShuntyardError
from spot.generation import Generation, TokenDelta

# How an engine goes on with a generation that has output already: exactly; exactly unless it is
# seeded; by taking the output for prompt (see `spot.resume`).
Resume = Literal["exact", "unseeded", "prompt"]
EngineState = Literal["starting", "ready", "draining", "stalled", "dead", "stopped"]


class EngineCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an engine says of itself once it is ready.

    max_model_len: prompt plus output, in tokens.
    vocab_size: number of token ids that the engine accepts (0 <= id < vocab_size).
    cache: the KV cache's configuration, for people.
    resume: what it can do with a generation that has output already.
    instances: servers that work may be passed on to, by what they say of themselves.
    """

    max_model_len: int
    vocab_size: int
    dtype: str = ""
    engine: str = ""
    max_num_seqs: int = 0
    block_size: int = 0
    num_kv_blocks: int = 0
    max_logprobs: int = 20
    cache: dict[str, str] = {}
    resume: Resume = "prompt"
    instances: list[str] = []


class EngineStats(msgspec.Struct, omit_defaults=True):
    """A moment's load. kv_cache_usage is a share, 0 to 1; cache counters are totals in tokens."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class EngineStatus:
    """Whether work is taken now. `detail` says in words why not, or what start-up is doing.

    A stalled engine gives no sign of life: it may come back, or will be started anew.
    """

    state: EngineState
    detail: str = ""
    pids: list[int] = field(default_factory=list)
    num_restarts: int = 0
    is_misconfigured: bool = False


class DeltaSink(Protocol):
    """Where an engine puts what it generates for one generation."""

    def on_delta(self, delta: TokenDelta) -> None:
        """Take one delta. The last one has a finish reason; nothing follows it."""

    def on_error(self, error: ShuntyardError) -> None:
        """The generation ended without a finish. Nothing follows."""


class Engine(Protocol):
    """Turns generations into token deltas. An async context manager; leaving it stops the engine.

    Entering does not wait until the engine is ready: `status` says what it is doing.
    """

    @property
    def status(self) -> EngineStatus: ...

    @property
    def card(self) -> EngineCard | None:
        """None until the engine was ready for the first time."""

    @property
    def stats(self) -> EngineStats: ...

    def submit(self, generation: Generation, sink: DeltaSink) -> None:
        """Start one generation, or go on with one that has output tokens already.

        Deltas bring what is new only: no token, logprob or prompt logprob comes a second time.
        Raises EngineUnavailable if no work is taken now.

        A request that the engine refuses ends with InvalidRequest in `sink.on_error`.
        """

    def abort(self, generation_id: str) -> None:
        """Forget a generation and free what it holds. Its sink hears nothing more. Idempotent."""

    async def wait_ready(self) -> EngineCard:
        """Wait for the first readiness. Raises EngineFailed if the engine cannot start at all.

        EngineMisconfigured, which is one, if that is for its settings.
        """

    async def drain(self) -> None:
        """Take no new work; return when what runs has finished."""

    async def __aenter__(self) -> Engine: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class PipelineEngine(Engine, Protocol):
    """An engine that can be one pipeline among several."""

    def kill(self, reason: str) -> None:
        """End an engine that hangs, at once. What ran on it fails; it may come back by itself."""
