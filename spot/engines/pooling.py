"""A pooling model in a process of its own: texts to vectors, pairs of texts to scores.

The gateway's end of `spot.engines.pooling_host`. Concurrent calls are batched there; a call that is
cancelled leaves the queue. What was running when the host died is done again by the next one, once:
the answer depends on nothing but the input.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import numpy as np
from numpy.typing import NDArray

from spot.engines.base import EngineStats, EngineStatus
from spot.engines.codec import (
    Embed,
    Failed,
    Pooled,
    PoolingCard,
    PoolingReady,
    Refused,
    ScorePairs,
    Step,
    ToGateway,
    TooLong,
)
from spot.engines.host_process import HostConfig
from spot.engines.host_supervisor import HostSupervisor
from spot.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    NotSupported,
    Overloaded,
    ShuntyardError,
)

__all__ = [
    "EmbedResult",
    "InputTooLong",
    "PoolingCard",
    "PoolingConfig",
    "PoolingEngine",
    "ScoreResult",
]

Vectors = NDArray[np.float32]
_MAX_LIVES = 2


class InputTooLong(ContextLengthExceeded):
    """Input number `index` of the call does not fit the model's context."""

    def __init__(self, *, index: int, num_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens, but input {index} has "
            f"{num_tokens}. Shorten it, or have it cut with truncate_prompt_tokens.",
            param=None,
        )
        self.index = index


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """Which model, and how its host runs it.

    model: a folder, or a name on the hub. task: embed, or score for a cross-encoder.
    device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1". dtype: "auto", "float32", ...
    max_model_len: tokens of one input; by default what the model says of itself.
    max_batch, max_batch_tokens: of one forward pass; by default what suits the device.
    max_queue: inputs that may wait; more are refused as Overloaded.
    env: added to the host's environment, for instance OMP_NUM_THREADS.
    """

    model: str
    task: Literal["embed", "score"] = "embed"
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_batch: int | None = None
    max_batch_tokens: int | None = None
    trust_remote_code: bool = False
    max_queue: int = 20_000
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 300.0
    step_timeout_s: float = 120.0
    max_silence_s: float = 10.0
    stall_timeout_s: float = 30.0
    min_backoff_s: float = 0.5

    def host(self) -> HostConfig:
        names = ("model", "task", "device", "dtype", "max_model_len", "trust_remote_code")
        batch = {"max_batch": self.max_batch, "max_batch_tokens": self.max_batch_tokens}
        return HostConfig(
            engine_args={name: getattr(self, name) for name in names} | batch,
            env=self.env,
            command=(sys.executable, "-m", "spot.engines.pooling_host"),
            start_timeout_s=self.start_timeout_s,
            step_timeout_s=self.step_timeout_s,
            max_silence_s=self.max_silence_s,
            stall_timeout_s=self.stall_timeout_s,
            min_backoff_s=self.min_backoff_s,
        )


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """One float32 row and one token count for each input."""

    vectors: Vectors
    num_tokens: list[int]


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """One score for each pair, the higher the better. num_tokens: that the model worked on."""

    scores: list[float]
    num_tokens: int


@dataclass(slots=True)
class _Call:
    message: Embed | ScorePairs
    num_inputs: int
    ended: anyio.Event = field(default_factory=anyio.Event)
    answer: Pooled | None = None
    error: ShuntyardError | None = None
    num_lives: int = 1


class PoolingEngine:
    """One pooling host and its restarts. An async context manager; leaving it stops the host.

    Entering does not wait until the model is loaded: `status` says what it is doing.
    host: how to run the host, where it is not as `config` says.
    on_line: takes each line that the host writes; by default it is logged.
    """

    def __init__(
        self,
        config: PoolingConfig,
        *,
        host: HostConfig | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self._config = config
        self._supervisor = HostSupervisor(
            host or config.host(),
            name="pooling",
            on_message=self._on_message,
            on_death=self._on_death,
            is_busy=lambda: bool(self._calls),
            on_line=on_line,
        )
        self._card: PoolingCard | None = None
        self._stats = EngineStats()
        self._calls: dict[int, _Call] = {}
        self._num_queued = 0
        self._next_handle = 1

    @property
    def status(self) -> EngineStatus:
        return self._supervisor.status

    @property
    def card(self) -> PoolingCard | None:
        """None until the model was loaded for the first time."""
        return self._card

    @property
    def stats(self) -> EngineStats:
        """Requests in the host, and inputs that wait there."""
        return self._stats

    async def embed(
        self,
        inputs: Sequence[str] | Sequence[list[int]],
        *,
        dimensions: int | None = None,
        truncate_to: int | None = None,
    ) -> EmbedResult:
        """Vectors for texts, or for token ids taken as they are.

        dimensions: cut vectors to so many, normalized again; only where the model was made for it.
        truncate_to: cut inputs to so many tokens; -1 for the model's context.
        Raises InputTooLong, InvalidRequest, NotSupported, EngineUnavailable, EngineFailed,
        Overloaded.
        """
        card = self._ready_card()
        if card.task != "embed":
            raise NotSupported("This model scores pairs of texts; it gives no embeddings.")
        check_dimensions(card, dimensions)
        _check_ids(card, inputs)
        cut = _truncation(card, truncate_to)
        answer = await self._ask(
            lambda handle: Embed(handle, list(inputs), cut), num_inputs=len(inputs)
        )
        vectors = np.frombuffer(answer.values, "<f4").reshape(len(inputs), card.dimension)
        if dimensions is not None and dimensions < card.dimension:
            vectors = _normalized(vectors[:, :dimensions])
        return EmbedResult(vectors, answer.num_tokens)

    async def score(
        self, pairs: Sequence[tuple[str, str]], *, truncate_to: int | None = None
    ) -> ScoreResult:
        """How well the texts of each pair go together: a cross-encoder's score or, from an
        embedding model, the cosine of the two vectors. Raises as `embed` does."""
        card = self._ready_card()
        if card.task == "embed":
            return await self._cosines(pairs, truncate_to)
        cut = _truncation(card, truncate_to)
        answer = await self._ask(
            lambda handle: ScorePairs(handle, list(pairs), cut), num_inputs=len(pairs)
        )
        scores = np.frombuffer(answer.values, "<f4").astype(float).tolist()
        return ScoreResult(scores, sum(answer.num_tokens))

    async def wait_ready(self) -> PoolingCard:
        """Wait until the model is loaded. Raises EngineFailed if it cannot be."""
        await self._supervisor.wait_decided()
        if self._card is None:
            raise EngineFailed(self.status.detail)
        return self._card

    async def __aenter__(self) -> PoolingEngine:
        await self._supervisor.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._supervisor.__aexit__(*exc_info)
        self._end_all(EngineUnavailable("The model was stopped."))

    async def _cosines(
        self, pairs: Sequence[tuple[str, str]], truncate_to: int | None
    ) -> ScoreResult:
        """Each distinct text is embedded once."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        places = {text: place for place, text in enumerate(texts)}
        try:
            result = await self.embed(texts, truncate_to=truncate_to)
        except InputTooLong as error:
            text = texts[error.index]
            error.index = next(i for i, pair in enumerate(pairs) if text in pair)
            raise
        vectors = _normalized(result.vectors.astype(np.float64))
        left = vectors[[places[pair[0]] for pair in pairs]]
        right = vectors[[places[pair[1]] for pair in pairs]]
        return ScoreResult(np.sum(left * right, axis=1).tolist(), sum(result.num_tokens))

    def _ready_card(self) -> PoolingCard:
        if self.status.state == "ready" and self._card is not None:
            return self._card
        # Why a model died may name files and addresses: that is for the log and the status.
        stage = f": {self.status.detail}" if self.status.state == "starting" else ""
        raise EngineUnavailable(f"The model is {self.status.state}{stage}.")

    async def _ask(
        self, message: Callable[[int], Embed | ScorePairs], *, num_inputs: int
    ) -> Pooled:
        """Send one call to the host and wait for its answer; cancelling takes it back."""
        handle = self._next_handle
        if num_inputs == 0:
            return Pooled(handle, b"", [])
        if self._num_queued and self._num_queued + num_inputs > self._config.max_queue:
            raise Overloaded(f"The queue is full ({self._num_queued} inputs wait for the model).")
        self._next_handle += 1
        call = _Call(message(handle), num_inputs)
        try:
            self._supervisor.put(call.message)
        except (ValueError, OverflowError) as error:
            raise InvalidRequest(f"The request cannot be sent to the model: {error}") from error
        self._calls[handle] = call
        self._num_queued += num_inputs
        try:
            await call.ended.wait()
        finally:
            if self._forget(handle):
                self._supervisor.put_abort(handle)
        if call.error is not None:
            raise call.error
        assert call.answer is not None
        return call.answer

    def _forget(self, handle: int) -> _Call | None:
        call = self._calls.pop(handle, None)
        if call is not None:
            self._num_queued -= call.num_inputs
        return call

    def _end(self, handle: int, *, answer: Pooled | None = None, error: Any = None) -> None:
        call = self._forget(handle)
        if call is not None:
            call.answer, call.error = answer, error
            call.ended.set()

    def _end_all(self, error: ShuntyardError) -> None:
        for handle in list(self._calls):
            self._end(handle, error=error)

    def _on_death(self, reason: str, was_ready: bool) -> None:
        """Calls outlive one death; a start that failed as well ends them."""
        self._stats = EngineStats()
        for handle, call in list(self._calls.items()):
            call.num_lives += 1
            if call.num_lives > _MAX_LIVES or not was_ready:
                self._end(handle, error=EngineFailed("The model's process ended."))

    def _on_message(self, message: ToGateway) -> None:
        match message:
            case Step():
                self._stats = message.stats or self._stats
            case Pooled():
                self._end(message.handle, answer=message)
            case TooLong():
                self._end(message.handle, error=self._too_long(message))
            case Refused():
                refusal = InvalidRequest(message.message, param=message.param)
                self._end(message.handle, error=refusal)
            case Failed():
                self._end(message.handle, error=EngineFailed(message.message))
            case PoolingReady(card):
                self._card = card
                for call in self._calls.values():
                    self._supervisor.put(call.message)

    def _too_long(self, fault: TooLong) -> InputTooLong:
        assert self._card is not None
        return InputTooLong(
            index=fault.index,
            num_tokens=fault.num_tokens,
            max_model_len=self._card.max_model_len,
        )


def check_dimensions(card: PoolingCard, dimensions: int | None) -> None:
    """Raise unless the model's vectors may have so many dimensions."""
    if dimensions is None or dimensions == card.dimension:
        return
    if not card.matryoshka:
        raise InvalidRequest(
            f"This model's embeddings have {card.dimension} dimensions and cannot be shortened: it "
            "was not trained for that (matryoshka).",
            param="dimensions",
            code="unsupported_value",
        )
    allowed = card.matryoshka_dimensions
    if dimensions > card.dimension or dimensions < 1 or (allowed and dimensions not in allowed):
        choices = ", ".join(map(str, allowed)) if allowed else f"1 to {card.dimension}"
        raise InvalidRequest(f"dimensions must be one of {choices}.", param="dimensions")


def _check_ids(card: PoolingCard, inputs: Sequence[str] | Sequence[list[int]]) -> None:
    for item in inputs:
        if isinstance(item, str):
            return
        bad = [token_id for token_id in item if not 0 <= token_id < card.vocab_size]
        if bad:
            raise InvalidRequest(f"Token ids must be below {card.vocab_size}; not {bad[:10]}.")


def _truncation(card: PoolingCard, truncate_to: int | None) -> int | None:
    """Raises InvalidRequest for a length that the model's context does not have."""
    if truncate_to is None:
        return None
    if truncate_to == -1:
        return card.max_model_len
    if not 1 <= truncate_to <= card.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1, or 1 to {card.max_model_len}.",
            param="truncate_prompt_tokens",
        )
    return truncate_to


def _normalized(vectors: NDArray[Any]) -> NDArray[Any]:
    """Rows of length one; a row of zeros stays."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12))
