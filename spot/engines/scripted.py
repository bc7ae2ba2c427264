"""An engine for tests and ceilings: scripted or seeded tokens, chosen speed, faults on demand.

Without a script it is the deterministic model of `spot.engines.hash_model`. No weights, no text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from spot.engines.base import DeltaSink, EngineCard, EngineStats
from spot.engines.hash_model import (
    HashedContinuation,
    HashModel,
    finish_of,
    hash_tokens,
    hashed_logits,
    top_logprobs,
)
from spot.engines.loop_engine import LoopEngine
from spot.errors import (
    EngineFailed,
    GenerationFailed,
    InvalidRequest,
    ShuntyardError,
)
from spot.generation import FinishReason, Generation, TokenDelta, TokenLogprobs

Script = Callable[[Generation], Sequence[int]]


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
    continuation: HashedContinuation | None
    output: list[int] = field(default_factory=list)
    has_begun: bool = False


class ScriptedEngine(LoopEngine):
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
        card = EngineCard(
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            engine="scripted",
            max_num_seqs=max_num_seqs,
            resume="exact",
        )
        super().__init__(card)
        self.eos_token_id = eos_token_id
        self.script = script
        self.step_time_s = step_time_s
        self.tokens_per_step = tokens_per_step
        self.faults = faults or Faults()
        self.aborted: list[str] = []
        self.submitted: list[Generation] = []
        self._model = HashModel(vocab_size, eos_token_id)
        self._running: dict[str, _Running] = {}
        self._waiting: dict[str, _Running] = {}

    @property
    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._running), waiting=len(self._waiting))

    def submit(self, generation: Generation, sink: DeltaSink) -> None:
        self._check_ready()
        self.submitted.append(generation)
        if self.faults.refuse is not None:
            sink.on_error(InvalidRequest(self.faults.refuse))
            return
        script = None if self.script is None else self.script(generation)
        continuation = self._model.begin(generation) if script is None else None
        job = _Running(generation, sink, script, continuation)
        job.output.extend(generation.output_token_ids)
        self._waiting[generation.id] = job
        self._wakeup.set()

    def abort(self, generation_id: str) -> None:
        if self._running.pop(generation_id, None) or self._waiting.pop(generation_id, None):
            self.aborted.append(generation_id)

    def _has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def _fail_all(self, message: str) -> None:
        jobs = [*self._running.values(), *self._waiting.values()]
        self._running.clear()
        self._waiting.clear()
        for job in jobs:
            job.sink.on_error(EngineFailed(message))

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
            finish, stop_token_id = finish_of(
                token_id,
                len(job.output),
                job.generation,
                eos_token_id=self.eos_token_id,
                max_model_len=self._card.max_model_len,
            )
        if not new_ids:
            return
        delta = TokenDelta(new_ids, finish, stop_token_id, logprobs)
        if not job.has_begun:
            job.has_begun = True
            delta.num_cached_tokens = 0
            if sampling.prompt_logprobs is not None and not job.generation.output_token_ids:
                delta.prompt_logprobs = self._model.begin(job.generation).prompt_logprobs()
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

    def _next_token(self, job: _Running) -> tuple[int, TokenLogprobs | None]:
        if job.continuation is not None:
            return job.continuation.next_token()
        assert job.script is not None
        position = len(job.output)
        token_id = job.script[position] if position < len(job.script) else self.eos_token_id
        if job.generation.sampling.logprobs is None:
            return token_id, None
        return token_id, self._logprobs_at(job, token_id)

    def _logprobs_at(self, job: _Running, token_id: int) -> TokenLogprobs:
        context = hash_tokens(b"", [*job.generation.prompt_token_ids[-4:], len(job.output)])
        logits = hashed_logits(context, self._card.vocab_size)
        logits.setdefault(token_id, 0.0)
        return top_logprobs(logits, token_id, job.generation.sampling.logprobs or 0)
