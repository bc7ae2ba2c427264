"""An engine that takes the time of a continuously batching LLM engine, without a model.

What runs together is decided by `spot.engines.batching` (vLLM's scheduler), how long a step takes
by a `StepTime` per pipeline stage, and which tokens come by a `TokenModel`. It runs in real time;
it is made for virtual time (`spot.virtual_time`), where an hour of serving costs what its tokens
cost to count.

The pipeline. As in vLLM's `EngineCore.step_with_batch_queue` (0.32, `v1/engine/core.py`), up to
`num_stages` steps are under way, and a new one is planned as soon as fewer are, from the sequences
that take part in none. A step enters a stage when it has left the stage before and the step before
it has left this one. So a token's latency is the sum over the stages, and at saturation a step
completes each time that the slowest stage takes; stages idle when steps are uneven or missing (the
bubbles). Like vLLM the engine does not spread sequences over the steps: those admitted together
stay together, and few of them leave stages idle. `spread_over_stages` limits each step to an equal
share of the seats.

What is not modelled: time between steps (scheduling, sampling, sending activations between stages,
unless the StepTime has it), overlap of scheduling with the step before (async scheduling), steps
that vLLM pads or captures as graphs, KV transfers, and any noise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskGroup

from spot.engines.base import DeltaSink, EngineCard, EngineState, EngineStats, EngineStatus
from spot.engines.batching import BatchedSequence, ContinuousBatcher, Step
from spot.engines.hash_model import Continuation, TokenModel, finish_of
from spot.engines.step_time import StepTime
from spot.errors import ContextLengthExceeded, EngineFailed, EngineUnavailable
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


class SimulatedEngine:
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
        if not stages:
            raise ValueError("stages must not be empty")
        if num_kv_blocks * block_size < max_model_len:
            raise ValueError(f"num_kv_blocks={num_kv_blocks} cannot hold max_model_len tokens")
        self._stages = list(stages)
        self._tokens = tokens
        self._card = EngineCard(
            max_model_len=max_model_len,
            vocab_size=tokens.vocab_size,
            engine="simulated",
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            resume="exact",
        )
        self._max_num_batched_tokens = max_num_batched_tokens
        self._enable_prefix_caching = enable_prefix_caching
        self._max_seqs_per_step = (
            math.ceil(max_num_seqs / len(stages)) if spread_over_stages else None
        )
        self._speed = 1.0
        self._is_frozen = False
        self._state: EngineState = "stopped"
        self._detail = ""
        self._group: TaskGroup | None = None
        self._wakeup = anyio.Event()
        self._idle = anyio.Event()
        self._start_over()

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(state=self._state, detail=self._detail)

    @property
    def card(self) -> EngineCard:
        return self._card

    @property
    def stats(self) -> EngineStats:
        batcher = self._batcher
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
        self._speed = speed

    def submit(self, generation: Generation, sink: DeltaSink) -> None:
        if self._state != "ready":
            raise EngineUnavailable(f"the engine is {self._state}")
        token_ids = [*generation.prompt_token_ids, *generation.output_token_ids]
        if len(token_ids) >= self._card.max_model_len:
            message = f"{len(token_ids)} tokens leave no room in {self._card.max_model_len}"
            sink.on_error(ContextLengthExceeded(message, param=None))
            return
        assert generation.id not in self._jobs
        sequence = self._batcher.add(
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

    def kill(self, reason: str) -> None:
        self.die(reason)

    def die(self, message: str = "the engine died") -> None:
        """Fail everything, forget the cache, and take no more work."""
        self._state, self._detail = "dead", message
        jobs = list(self._jobs.values())
        self._start_over()
        self._idle.set()
        self._wakeup.set()
        for job in jobs:
            job.sink.on_error(EngineFailed(message))

    def revive(self) -> None:
        """Take work again after `die`, with an empty cache and new counters."""
        self._state, self._detail = "ready", ""

    def check_invariants(self) -> None:
        """Seats, blocks and jobs agree."""
        self._batcher.check_invariants()
        assert len(self._jobs) == len(self._batcher.running) + self._batcher.num_waiting
        assert len(self._under_way) <= len(self._stages)

    async def wait_ready(self) -> EngineCard:
        return self._card

    async def drain(self) -> None:
        self._state = "draining"
        while self._jobs:
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

    def _start_over(self) -> None:
        self._batcher = ContinuousBatcher(
            num_blocks=self._card.num_kv_blocks,
            block_size=self._card.block_size,
            max_num_seqs=self._card.max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
            max_seqs_per_step=self._max_seqs_per_step,
            enable_prefix_caching=self._enable_prefix_caching,
        )
        self._jobs: dict[str, _Job] = {}
        self._under_way: deque[tuple[float, Step]] = deque()
        self._free_at_s = [0.0] * len(self._stages)

    async def _run(self) -> None:
        """One turn per step: what is due comes out, what may begin begins, then a wait."""
        while True:
            self._wakeup = anyio.Event()
            deadline_s = math.inf
            if not self._is_frozen:
                self._complete_due(anyio.current_time())
                self._begin(anyio.current_time())
                if self._under_way:
                    deadline_s = self._under_way[0][0]
            with anyio.CancelScope(deadline=deadline_s):
                await self._wakeup.wait()

    def _begin(self, now_s: float) -> None:
        while len(self._under_way) < len(self._stages):
            step = self._batcher.plan(now_s=now_s)
            if step is None:
                break
            self._under_way.append((self._pass_stages(step, now_s), step))

    def _pass_stages(self, step: Step, now_s: float) -> float:
        """Take each stage's time for a step that begins now. Returns when it leaves the last."""
        at_s = now_s
        for index, stage in enumerate(self._stages):
            step_s = stage.step_s(
                step.num_prefill_tokens, step.num_decode_seqs, step.context_tokens
            )
            at_s = max(at_s, self._free_at_s[index]) + step_s / self._speed
            self._free_at_s[index] = at_s
        return at_s

    def _complete_due(self, now_s: float) -> None:
        while self._under_way and self._under_way[0][0] <= now_s and not self._is_frozen:
            _, step = self._under_way.popleft()
            for sequence in self._batcher.complete(step):
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
            self._batcher.append(job.sequence, token_id)
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
        self._batcher.finish(job.sequence)
        if not self._jobs:
            self._idle.set()
