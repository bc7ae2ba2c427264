"""What the endpoints work with: the served model, admission, what outlives a request."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from server.collector import Generations
from server.errors import ModelNotFound, ShuttingDown
from server.journal import Journal
from server.metrics import Metrics
from server.sampling import SamplingDefaults
from server.sse import StreamKeeper
from server.text.tokenizer import ChatTokenizer
from server.version import INSTANCE
from spot.engines.base import Engine, EngineStatus
from spot.errors import EngineUnavailable, Overloaded, ShuntyardError
from spot.kept_outputs import KeptOutputs
from spot.parsed import ParserSource
from spot.shared_generations import SharedGenerations
from workflows.service import WorkflowService


def unix_s() -> int:
    """Wall-clock seconds, for timestamps that people read. Never for durations."""
    return int(time.time())  # noqa: TID251


def wall_s() -> float:
    """The wall clock, to the fraction of a second; see `unix_s`."""
    return time.time()  # noqa: TID251


@dataclass(slots=True)
class ChatOptions:
    """How conversations are rendered and parsed.

    parsers: None without `--tool-call-parser` and `--reasoning-parser`.
    """

    enable_auto_tool_choice: bool = False
    has_tool_parser: bool = False
    has_reasoning_parser: bool = False
    parsers: ParserSource | None = None
    default_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    exclude_tools_when_none: bool = False
    response_role: str = "assistant"
    emit_reasoning_content: bool = True


@dataclass(slots=True)
class ServedModel:
    """One generative model under its served names; the first is its id in answers without one."""

    names: list[str]
    tokenizer: ChatTokenizer
    engine: Engine
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    chat: ChatOptions = field(default_factory=ChatOptions)
    created: int = field(default_factory=unix_s)
    root: str = ""

    @property
    def max_model_len(self) -> int:
        """Context length in tokens. Raises EngineUnavailable until the engine has told it."""
        card = self.engine.card
        if card is None:
            raise EngineUnavailable(f"The model is not ready yet: {self.engine.status.detail}")
        return card.max_model_len

    @property
    def vocab_size(self) -> int:
        card = self.engine.card
        return self.tokenizer.vocab_size if card is None else card.vocab_size

    def check_name(self, name: str | None) -> str:
        """The name to answer with. Absent or empty means the default. Raises ModelNotFound."""
        if not name:
            return self.names[0]
        if name not in self.names:
            raise model_not_found(name, self.names)
        return name


def model_not_found(name: str, served: list[str]) -> ModelNotFound:
    names = ", ".join(f"'{item}'" for item in served)
    return ModelNotFound(f"The model '{name[:200]}' does not exist; this server has {names}.")


class Admission:
    """Counts what is in flight and refuses what is too much.

    max_requests: HTTP requests being answered. max_queue: generations beyond the engine's seats. A
    single request with more of them passes where nothing else runs: it could never be served else.
    """

    def __init__(self, *, max_requests: int, max_queue: int) -> None:
        self._max_requests = max_requests
        self._max_queue = max_queue
        self.num_requests = 0
        self.num_generations = 0
        self.closed = False

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request in flight. Raises Overloaded or ShuttingDown."""
        if self.closed:
            raise ShuttingDown("The server is shutting down.")
        if self.num_requests >= self._max_requests:
            raise Overloaded(
                f"The server is at its limit of {self._max_requests} concurrent requests."
            )
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    @contextmanager
    def generations(self, count: int, *, num_seats: int) -> Iterator[None]:
        """Generations in flight. Raises Overloaded when the queue before the engine is full."""
        num_queued = self.num_generations + count - num_seats
        if self.num_generations and num_queued > self._max_queue:
            raise Overloaded(
                f"The queue is full ({self._max_queue} generations wait for the engine).",
                retry_after_s=2.0,
            )
        self.num_generations += count
        try:
            yield
        finally:
            self.num_generations -= count


@dataclass(slots=True)
class Limits:
    """Bounds on what a client may send; see the settings of the same names."""

    max_body_bytes: int = 16 * 1024 * 1024
    max_json_depth: int = 128
    stream_interval: int = 1


class Failable(Protocol):
    """Something in flight that can be ended from outside."""

    def fail(self, error: ShuntyardError) -> None: ...


class HasStatus(Protocol):
    """An engine of any kind, as far as readiness is concerned."""

    @property
    def status(self) -> EngineStatus: ...


@dataclass(slots=True)
class Gateway:
    """Everything that endpoints share.

    instance: by which this run of the server knows itself.
    further_engines: those of pooling models. journal: None unless generations are journaled.
    workflows: entered by the caller, as the engine and the keeper are.
    shares_equal: whether equal deterministic generations that run at once are one.
    kept_outputs: what such ones said, for equal ones that come later; None where nothing is kept.
    patience_s: how long workflows' work waits for an engine that starts.
    generations: where they run. prefills_ahead: whether what is known of a workflow's prompt is
    read while the rest is still being made.
    """

    model: ServedModel
    metrics: Metrics
    admission: Admission
    keeper: StreamKeeper
    limits: Limits = field(default_factory=Limits)
    salt_secret: bytes | None = None
    version: str = ""
    instance: str = INSTANCE
    further_engines: list[HasStatus] = field(default_factory=list)
    live: set[Failable] = field(default_factory=set)
    journal: Journal | None = None
    workflows: WorkflowService = field(default_factory=WorkflowService)
    shares_equal: bool = False
    kept_outputs: KeptOutputs | None = None
    prefills_ahead: bool = False
    patience_s: float = 120.0
    generations: Generations = field(init=False)

    def __post_init__(self) -> None:
        engine, kept = self.model.engine, self.kept_outputs
        self.generations = SharedGenerations(engine, kept) if self.shares_equal else engine

    @property
    def fingerprint(self) -> str:
        return f"shuntyard-{self.version}"

    def end_all(self, error: ShuntyardError) -> None:
        """End every answer that is being generated with this error."""
        for run in list(self.live):
            run.fail(error)

    def cache_salt(self, tenant: str, asked: str | None) -> str | None:
        """Keeps one tenant's prefix cache from another's timing (where there are several)."""
        if self.salt_secret is None:
            return asked
        text = f"{len(tenant)}:{tenant}{asked or ''}"
        return hmac.new(self.salt_secret, text.encode(), hashlib.sha256).hexdigest()
