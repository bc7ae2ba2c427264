"""An engine that takes the time of a continuously batching LLM engine, without a model.

`placement.simulator` says what runs together (vLLM's scheduler), how steps pass the stages, and, by
a `StepTime` per stage, how long they take; a `TokenModel` says which tokens come. It runs in real
time; it is made for virtual time (`spot.virtual_time`), where an hour of serving costs what its
tokens cost to count. What is modelled and what is not: `docs/simulator.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from placement.estimator import Estimator, Stage
from placement.simulator.batching import BatchedSequence
from placement.simulator.simulated_pipeline import SimulatedPipeline, simulated_pipeline
from placement.simulator.step_time import StepTime
from spot.engines.base import DeltaSink, EngineCard, EngineStats
from spot.engines.hash_model import Continuation, TokenModel, finish_of
from spot.engines.loop_engine import LoopEngine
from spot.errors import ContextLengthExceeded, EngineFailed
from spot.generation import Generation, TokenDelta


@dataclass(slots=True, eq=False)
class _Job:
    generation: Generation
    sink: DeltaSink
    sequence: BatchedSequence
    continuation: Continuation
    num_output: int
    submitted_s: float
    has_begun: bool = False


class SimulatedEngine(LoopEngine):
    """Implements `spot.engines.base.Engine` in simulated time.

    stages: the step time of each pipeline stage.
    tokens: what is said. `RollingModel` for many tokens, `HashModel` for true sampling.
    max_num_batched_tokens: new tokens per step, prompts and outputs together.
    num_kv_blocks: KV capacity, of `block_size` tokens each. Must hold `max_model_len`.
    Raises ValueError if the parts do not fit each other.
    """

    def __init__(
        self,
        stages: Sequence[StepTime],
        tokens: TokenModel,
        *,
        num_kv_blocks: int,
        block_size: int = 16,
        max_model_len: int = 4096,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = False,
        spread_over_stages: bool = False,
    ) -> None:
        if num_kv_blocks * block_size < max_model_len:
            raise ValueError(f"num_kv_blocks={num_kv_blocks} cannot hold max_model_len tokens")
        card = EngineCard(
            max_model_len=max_model_len,
            vocab_size=tokens.vocab_size,
            engine="simulated",
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            resume="exact",
        )
        super().__init__(card)
        self._pipeline = SimulatedPipeline(
            stages=tuple(stages),
            num_kv_blocks=num_kv_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_seqs_per_step=math.ceil(max_num_seqs / len(stages))
            if spread_over_stages and stages
            else None,
            enable_prefix_caching=enable_prefix_caching,
        )
        self._tokens = tokens
        self._speed = 1.0
        self._is_frozen = False
        self._start_over()

    @property
    def stats(self) -> EngineStats:
        batcher = self._steps.batcher
        return EngineStats(
            running=len(batcher.running),
            waiting=batcher.num_waiting,
            kv_cache_usage=batcher.kv.num_used / batcher.kv.num_blocks,
            prefix_cache_queries=batcher.prefix_cache_queries,
            prefix_cache_hits=batcher.prefix_cache_hits,
            num_preemptions=batcher.num_preemptions,
        )

    @property
    def speed(self) -> float:
        """How fast the machine is, as a share of what `stages` say. Holds from the next step on."""
        return self._speed

    @speed.setter
    def speed(self, speed: float) -> None:
        if not speed > 0:
            raise ValueError("speed must be positive; see freeze")
        self._speed = self._steps.speed = speed

    def submit(self, generation: Generation, sink: DeltaSink) -> None:
        self._check_ready()
        token_ids = [*generation.prompt_token_ids, *generation.output_token_ids]
        if len(token_ids) >= self._card.max_model_len:
            message = f"{len(token_ids)} tokens leave no room in {self._card.max_model_len}"
            sink.on_error(ContextLengthExceeded(message, param=None))
            return
        assert generation.id not in self._jobs
        sequence = self._steps.batcher.add(
            generation.id,
            token_ids,
            priority=generation.priority,
            cache_root=hash(generation.cache_salt),
        )
        self._jobs[generation.id] = _Job(
            generation,
            sink,
            sequence,
            self._tokens.begin(generation),
            len(generation.output_token_ids),
            anyio.current_time(),
        )
        self._wakeup.set()

    def abort(self, generation_id: str) -> None:
        if (job := self._jobs.get(generation_id)) is not None:
            self._forget(job)
            self._wakeup.set()

    def freeze(self) -> None:
        """Stall: nothing comes out and nothing begins until `thaw`. Work is still taken."""
        self._is_frozen = True
        self._wakeup.set()

    def thaw(self) -> None:
        """Go on after `freeze`. What was under way comes out when due, or now if that is past."""
        self._is_frozen = False
        self._wakeup.set()

    def check_invariants(self) -> None:
        """Seats, blocks and jobs agree."""
        batcher = self._steps.batcher
        batcher.check_invariants()
        assert len(self._jobs) == len(batcher.running) + batcher.num_waiting
        assert self._steps.num_under_way <= len(self._pipeline.stages)

    def _has_work(self) -> bool:
        return bool(self._jobs)

    def _fail_all(self, message: str) -> None:
        jobs = list(self._jobs.values())
        self._start_over()
        self._idle.set()
        self._wakeup.set()
        for job in jobs:
            job.sink.on_error(EngineFailed(message))

    def _start_over(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._steps = self._pipeline.start()
        self._steps.speed = self._speed

    async def _run(self) -> None:
        """One turn per step: what is due comes out, what may begin begins, then a wait."""
        while True:
            self._wakeup = anyio.Event()
            deadline_s = math.inf
            if not self._is_frozen:
                self._complete_due(anyio.current_time())
                self._steps.begin(anyio.current_time())
                deadline_s = self._steps.due_s
            with anyio.CancelScope(deadline=deadline_s):
                await self._wakeup.wait()

    def _complete_due(self, now_s: float) -> None:
        while not self._is_frozen and (step := self._steps.take_due(now_s)) is not None:
            for sequence in self._steps.batcher.complete(step):
                job = self._jobs.get(sequence.id)
                # A sink may abort, kill or submit anew: only who is still the same goes on.
                if job is not None and job.sequence is sequence:
                    self._advance(job)

    def _advance(self, job: _Job) -> None:
        generation = job.generation
        token_id, entry = job.continuation.next_token()
        job.num_output += 1
        finish, stop_token_id = finish_of(
            token_id,
            job.num_output,
            generation,
            eos_token_id=self._tokens.eos_token_id,
            max_model_len=self._card.max_model_len,
        )
        delta = TokenDelta([token_id], finish, stop_token_id, None if entry is None else [entry])
        if not job.has_begun:
            self._begin_delta(job, delta)
        if finish is None:
            self._steps.batcher.append(job.sequence, token_id)
        else:
            self._forget(job)
        job.sink.on_delta(delta)

    def _begin_delta(self, job: _Job, delta: TokenDelta) -> None:
        """Add what only a generation's first delta says."""
        job.has_begun = True
        generation, sequence = job.generation, job.sequence
        assert sequence.num_cached is not None
        assert sequence.admitted_s is not None
        delta.num_cached_tokens = min(sequence.num_cached, len(generation.prompt_token_ids))
        delta.queue_s = sequence.admitted_s - job.submitted_s
        if generation.sampling.prompt_logprobs is not None and not generation.output_token_ids:
            delta.prompt_logprobs = job.continuation.prompt_logprobs()

    def _forget(self, job: _Job) -> None:
        del self._jobs[job.generation.id]
        self._steps.batcher.finish(job.sequence)
        if not self._jobs:
            self._idle.set()


def planned_engine(
    estimator: Estimator,
    stages: Sequence[Stage],
    tokens: TokenModel,
    *,
    max_model_len: int | None = None,
    enable_prefix_caching: bool = False,
) -> SimulatedEngine:
    """The engine of a planned pipeline, with the memory and the times of its estimate.

    max_model_len: by default what the model and the KV cache allow.
    Raises Infeasible if the weights do not fit.
    """
    pipeline = simulated_pipeline(estimator, stages)
    return SimulatedEngine(
        pipeline.stages,
        tokens,
        num_kv_blocks=pipeline.num_kv_blocks,
        block_size=pipeline.block_size,
        max_model_len=max_model_len or min(estimator.model.max_context, pipeline.num_kv_tokens),
        max_num_seqs=pipeline.max_num_seqs,
        max_num_batched_tokens=pipeline.max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )
