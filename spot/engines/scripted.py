"""An engine for tests and ceilings: scripted or seeded tokens, chosen speed, faults on demand.

Without a script it is a small deterministic language model: the logits of a position are a hash of
the tokens before it, so penalties, seeds, biases and logprobs mean what they mean elsewhere and the
same prefix always continues alike. No weights, no text.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from spot.engines.base import DeltaSink, EngineCard, EngineState, EngineStats, EngineStatus
from spot.errors import (
    EngineFailed,
    EngineUnavailable,
    GenerationFailed,
    InvalidRequest,
    ShuntyardError,
)
from spot.generation import FinishReason, Generation, TokenDelta, TokenLogprobs

Script = Callable[[Generation], Sequence[int]]

_NUM_CANDIDATES = 32
_NEVER = -9999.0


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, and when. Counts are output tokens of one generation.

    fail_at_token: the generation ends with EngineFailed after this many tokens.
    fault_everywhere_at_token: it ends with GenerationFailed then.
    die_at_token: the whole engine dies then, with every generation on it.
    stall_at_token: no token comes after this many; the generation stays open.
    refuse: every submission is refused with this message.
    """

    fail_at_token: int | None = None
    fault_everywhere_at_token: int | None = None
    die_at_token: int | None = None
    stall_at_token: int | None = None
    refuse: str | None = None


@dataclass(slots=True)
class _Running:
    generation: Generation
    sink: DeltaSink
    script: Sequence[int] | None
    output: list[int] = field(default_factory=list)
    prefix_hash: bytes = b""
    has_begun: bool = False


class ScriptedEngine:
    """Implements `spot.engines.base.Engine` without a model.

    script: the output tokens of a generation, by the generation; None uses the seeded model.
        A script that ends without a stop token continues with `eos_token_id`.
    step_time_s: time per token of each running generation.
    tokens_per_step: tokens that one step adds to each generation.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_id: int,
        max_model_len: int = 4096,
        max_num_seqs: int = 256,
        script: Script | None = None,
        step_time_s: float = 0.0,
        tokens_per_step: int = 1,
        faults: Faults | None = None,
    ) -> None:
        self._card = EngineCard(
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            engine="scripted",
            max_num_seqs=max_num_seqs,
            resume="exact",
        )
        self.eos_token_id = eos_token_id
        self.script = script
        self.step_time_s = step_time_s
        self.tokens_per_step = tokens_per_step
        self.faults = faults or Faults()
        self.aborted: list[str] = []
        self.submitted: list[Generation] = []
        self._chance = random.Random()
        self._state: EngineState = "stopped"
        self._detail = ""
        self._running: dict[str, _Running] = {}
        self._waiting: dict[str, _Running] = {}
        self._wakeup = anyio.Event()
        self._idle = anyio.Event()
        self._group: TaskGroup | None = None

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(state=self._state, detail=self._detail)

    @property
    def card(self) -> EngineCard:
        return self._card

    @property
    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._running), waiting=len(self._waiting))

    def submit(self, generation: Generation, sink: DeltaSink) -> None:
        if self._state != "ready":
            raise EngineUnavailable(f"the engine is {self._state}")
        self.submitted.append(generation)
        if self.faults.refuse is not None:
            sink.on_error(InvalidRequest(self.faults.refuse))
            return
        script = None if self.script is None else self.script(generation)
        job = _Running(generation, sink, script)
        job.output.extend(generation.output_token_ids)
        if script is None:
            job.prefix_hash = _hash_tokens(b"", [*generation.prompt_token_ids, *job.output])
        self._waiting[generation.id] = job
        self._wakeup.set()

    def abort(self, generation_id: str) -> None:
        if self._running.pop(generation_id, None) or self._waiting.pop(generation_id, None):
            self.aborted.append(generation_id)

    def kill(self, reason: str) -> None:
        self.die(reason)

    def die(self, message: str = "the engine died") -> None:
        """Fail everything that runs and take no more work."""
        self._state, self._detail = "dead", message
        jobs = [*self._running.values(), *self._waiting.values()]
        self._running.clear()
        self._waiting.clear()
        for job in jobs:
            job.sink.on_error(EngineFailed(message))

    def revive(self) -> None:
        """Take work again after `die`."""
        self._state, self._detail = "ready", ""

    async def wait_ready(self) -> EngineCard:
        return self._card

    async def drain(self) -> None:
        self._state = "draining"
        while self._running or self._waiting:
            self._idle = anyio.Event()
            await self._idle.wait()

    async def __aenter__(self) -> Self:
        self._state = "ready"
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._run)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.die("the server is shutting down")
        self._state = "stopped"
        if self._group is not None:
            self._group.cancel_scope.cancel()
            await self._group.__aexit__(exc_type, exc, traceback)

    async def _run(self) -> None:
        while True:
            if not (self._running or self._waiting):
                self._idle.set()
                self._wakeup = anyio.Event()
                await self._wakeup.wait()
            self._admit()
            if self.step_time_s > 0:
                await anyio.sleep(self.step_time_s)
            else:
                await anyio.lowlevel.checkpoint()
            for job in list(self._running.values()):
                if job.generation.id in self._running:
                    self._advance(job)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._card.max_num_seqs:
            generation_id = next(iter(self._waiting))
            self._running[generation_id] = self._waiting.pop(generation_id)

    def _advance(self, job: _Running) -> None:
        sampling = job.generation.sampling
        new_ids: list[int] = []
        logprobs: list[TokenLogprobs] | None = None if sampling.logprobs is None else []
        finish: FinishReason | None = None
        stop_token_id: int | None = None
        while len(new_ids) < self.tokens_per_step and finish is None:
            if (error := self._fault(job)) is not None:
                self._running.pop(job.generation.id, None)
                job.sink.on_error(error)
                return
            if self.faults.stall_at_token == len(job.output) or self._state == "dead":
                break
            token_id, entry = self._next_token(job)
            job.output.append(token_id)
            new_ids.append(token_id)
            if logprobs is not None:
                logprobs.append(entry or TokenLogprobs([token_id], [0.0], 1))
            finish, stop_token_id = self._finish(job, token_id)
        if not new_ids:
            return
        delta = TokenDelta(new_ids, finish, stop_token_id, logprobs)
        if not job.has_begun:
            job.has_begun = True
            delta.num_cached_tokens = 0
            if sampling.prompt_logprobs is not None and not job.generation.output_token_ids:
                delta.prompt_logprobs = self._prompt_logprobs(job)
        if finish is not None:
            self._running.pop(job.generation.id, None)
        job.sink.on_delta(delta)

    def _fault(self, job: _Running) -> ShuntyardError | None:
        if self.faults.fail_at_token == len(job.output):
            return EngineFailed("the engine failed on this generation")
        if self.faults.fault_everywhere_at_token == len(job.output):
            return GenerationFailed("a bug")
        if self.faults.die_at_token == len(job.output):
            self._running.pop(job.generation.id, None)
            self.die()
            return EngineFailed("the engine died")
        return None

    def _finish(self, job: _Running, token_id: int) -> tuple[FinishReason | None, int | None]:
        sampling = job.generation.sampling
        num_output = len(job.output)
        if num_output >= sampling.min_tokens:
            if token_id == self.eos_token_id and not sampling.ignore_eos:
                return "stop", None
            if token_id in sampling.stop_token_ids:
                return "stop", token_id
        total = len(job.generation.prompt_token_ids) + num_output
        if num_output >= sampling.max_tokens or total >= self._card.max_model_len:
            return "length", None
        return None, None

    def _next_token(self, job: _Running) -> tuple[int, TokenLogprobs | None]:
        if job.script is not None:
            position = len(job.output)
            token_id = job.script[position] if position < len(job.script) else self.eos_token_id
            if job.generation.sampling.logprobs is None:
                return token_id, None
            return token_id, self._logprobs_at(job, token_id)
        logits = self._logits(job)
        token_id = _sample(logits, job.generation.sampling.temperature, self._rng(job))
        entry = None
        if job.generation.sampling.logprobs is not None:
            entry = _top_logprobs(logits, token_id, job.generation.sampling.logprobs)
        job.prefix_hash = _hash_tokens(job.prefix_hash, [token_id])
        return token_id, entry

    def _rng(self, job: _Running) -> random.Random:
        """With a seed, chance depends on the seed and the position only."""
        seed = job.generation.sampling.seed
        if seed is None:
            return self._chance
        position = len(job.generation.prompt_token_ids) + len(job.output)
        return random.Random(f"{seed}@{position}")

    def _logits(self, job: _Running) -> dict[int, float]:
        sampling = job.generation.sampling
        logits = _hashed_logits(job.prefix_hash, self._card.vocab_size)
        if sampling.allowed_token_ids is not None:
            logits = {t: logits.get(t, 0.0) for t in sampling.allowed_token_ids}
        for token_id, bias in (sampling.logit_bias or {}).items():
            logits[token_id] = logits.get(token_id, 0.0) + bias
        for token_id in logits:
            count = job.output.count(token_id)
            if count:
                logits[token_id] -= sampling.presence_penalty + sampling.frequency_penalty * count
        if len(job.output) < sampling.min_tokens:
            logits.pop(self.eos_token_id, None)
        return logits

    def _logprobs_at(self, job: _Running, token_id: int) -> TokenLogprobs:
        context = _hash_tokens(b"", [*job.generation.prompt_token_ids[-4:], len(job.output)])
        logits = _hashed_logits(context, self._card.vocab_size)
        logits.setdefault(token_id, 0.0)
        return _top_logprobs(logits, token_id, job.generation.sampling.logprobs or 0)

    def _prompt_logprobs(self, job: _Running) -> list[TokenLogprobs | None]:
        prompt = job.generation.prompt_token_ids
        entries: list[TokenLogprobs | None] = [None]
        context = b""
        for position in range(1, len(prompt)):
            context = _hash_tokens(context, [prompt[position - 1]])
            logits = _hashed_logits(context, self._card.vocab_size)
            logits.setdefault(prompt[position], 0.0)
            top = job.generation.sampling.prompt_logprobs or 0
            entries.append(_top_logprobs(logits, prompt[position], top))
        return entries


def _hash_tokens(prefix: bytes, token_ids: Sequence[int]) -> bytes:
    """A hash of all tokens so far: of `prefix` and one more, token by token."""
    for token_id in token_ids:
        prefix = hashlib.blake2b(prefix + token_id.to_bytes(4, "little"), digest_size=16).digest()
    return prefix


def _hashed_logits(context: bytes, vocab_size: int) -> dict[int, float]:
    rng = random.Random(context)
    return {rng.randrange(vocab_size): rng.gauss(0.0, 2.0) for _ in range(_NUM_CANDIDATES)}


def _log_softmax(logits: dict[int, float]) -> dict[int, float]:
    top = max(logits.values())
    log_total = top + math.log(sum(math.exp(value - top) for value in logits.values()))
    return {token_id: value - log_total for token_id, value in logits.items()}


def _sample(logits: dict[int, float], temperature: float, rng: random.Random) -> int:
    if temperature == 0:
        return max(logits, key=lambda token_id: (logits[token_id], -token_id))
    scaled = _log_softmax({t: value / temperature for t, value in logits.items()})
    return rng.choices(list(scaled), [math.exp(value) for value in scaled.values()])[0]


def _top_logprobs(logits: dict[int, float], token_id: int, num_top: int) -> TokenLogprobs:
    logprobs = _log_softmax(logits)
    ranked = sorted(logprobs, key=lambda t: (-logprobs[t], t))
    top = ranked if num_top < 0 else ranked[:num_top]
    return TokenLogprobs(
        [token_id, *top],
        [logprobs.get(token_id, _NEVER), *(logprobs[t] for t in top)],
        ranked.index(token_id) + 1,
    )
