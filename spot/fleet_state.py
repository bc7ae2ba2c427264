"""Which generation runs on which pipeline, and where it goes when that is lost: pure decisions.

The state of all pipelines of one model and of all generations on them. Methods take what happened
and the time, and return commands; nothing here waits, calls an engine or reads a clock.

    starting ──ready──▶ serving ──drain──▶ draining ──empty──▶ gone
        ▲                  │                                    ▲
        └──── lost ────────┘            (remove, from any) ─────┘

A generation waits, or runs on exactly one pipeline. It leaves one by finishing, by losing it
(crash, stall, error), at a deadline of a draining one, or by preemption at the boundary between two
sub-nodes; in all cases but the first it waits again with all its output, and goes on elsewhere.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from spot.engines.base import Resume
from spot.errors import EngineFailed, EngineUnavailable, ShuntyardError
from spot.generation import Generation
from spot.resume import continues_exactly
from spot.routing import Router

PipelineState = Literal["starting", "serving", "draining", "gone"]
# Why a generation leaves a pipeline before its end: nobody wants it; somebody more urgent wants its
# seat; the pipeline was lost, or is about to be; the pipeline did not take it.
Departure = Literal["cancelled", "preempted", "lost", "moved", "refused"]

_NO_EXACT_RESUME = (
    " pipeline can go on exactly with a request of this kind "
    "(seeded, constrained or penalised output needs engines of this server's own)"
)

_TRANSITIONS: dict[PipelineState, frozenset[PipelineState]] = {
    "starting": frozenset({"serving", "draining", "gone"}),
    "serving": frozenset({"starting", "draining", "gone"}),
    "draining": frozenset({"gone"}),
    "gone": frozenset(),
}


@dataclass(frozen=True, slots=True)
class FailoverPolicy:
    """When to move, when to wait, when to give up. Times in seconds.

    max_migrations: of one generation. A preemption is none.
    max_fruitless: a generation that loses so many pipelines in a row without a token in between
        is taken for the cause.
    no_capacity_timeout_s: how long a generation waits while no pipeline could take it.
    backoff_s, max_backoff_s: before a generation that was lost without a token starts again;
        doubled each time, the first time there is none.
    stall_base_s, stall_steps, slowest_prefill_tokens_per_s: silence of a pipeline that is a fault
        is longer than all three together: a fixed time, so many of its usual steps, and what its
        unread prompts could take.
    resumed_prefill_budget: tokens that migrated generations may recompute on one pipeline at once.
    subnode_tokens: output tokens between two boundaries; None fits them to subnode_s.
    lookahead: generations given to a pipeline beyond its seats, as a share of these, so that a
        seat that comes free is taken in the next step.
    breaker_failures, breaker_s: failures in a row that close a pipeline, and for how long.
    canary_period_s: an idle pipeline is asked for a token about this often.
    drain_margin_s: before the deadline of a draining pipeline, when what still runs is moved.
    """

    max_migrations: int = 32
    max_fruitless: int = 3
    no_capacity_timeout_s: float = 120.0
    backoff_s: float = 0.25
    max_backoff_s: float = 5.0
    stall_base_s: float = 15.0
    stall_steps: float = 50.0
    slowest_prefill_tokens_per_s: float = 50.0
    resumed_prefill_budget: int = 16_384
    subnode_tokens: int | None = None
    subnode_s: float = 0.5
    lookahead: float = 0.125
    breaker_failures: int = 3
    breaker_s: float = 5.0
    drain_margin_s: float = 5.0
    canary_period_s: float = 30.0


@dataclass(slots=True, eq=False)
class Live:
    """A generation in flight.

    output: what it has put out so far. leg: how often it was started. num_leg_tokens: since the
    last start. num_fruitless: pipelines lost in a row without a token in between.
    avoids: these pipelines; it is tried elsewhere first.
    next_boundary: number of output tokens at which its sub-node ends.
    """

    generation: Generation
    order: int
    output: list[int] = field(default_factory=list)
    pipeline_id: str | None = None
    leg: int = 0
    started_s: float = 0.0
    progress_s: float = 0.0
    num_leg_tokens: int = 0
    num_fruitless: int = 0
    num_migrations: int = 0
    is_moving: bool = False
    not_before_s: float = 0.0
    stranded_since_s: float | None = None
    avoids: set[str] = field(default_factory=set)
    next_boundary: int = 1

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first."""
        return self.generation.priority, self.order

    @property
    def remaining(self) -> Generation:
        """The generation as another engine takes it on."""
        if not self.output:
            return self.generation
        return msgspec.structs.replace(self.generation, output_token_ids=list(self.output))

    @property
    def num_context(self) -> int:
        """Tokens that a start must compute, if nothing is cached."""
        return len(self.generation.prompt_token_ids) + len(self.output)

    def can_go_on_at(self, pipeline: Pipeline) -> bool:
        """Whether it would continue there as if it had never left."""
        if not self.output or self.generation.allow_inexact_resume:
            return True
        return continues_exactly(self.generation.sampling, pipeline.resume)


@dataclass(slots=True, eq=False)
class Pipeline:
    """One pipeline as the fleet sees it.

    weight: expected throughput, in any unit that all pipelines share.
    num_seats: generations that its engine runs at once.
    step_s: usual time between two tokens of one generation there.
    prefill_tokens_per_s: how fast long prompts usually come to their first token.
    tokens_per_s: observed, over the last seconds.
    deadline_s: when a draining pipeline must be empty.
    """

    id: str
    weight: float = 1.0
    state: PipelineState = "starting"
    num_seats: int = 0
    block_size: int = 16
    resume: Resume = "prompt"
    legs: dict[str, Live] = field(default_factory=dict)
    progress_s: float = 0.0
    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    tokens_per_s: float = 0.0
    num_tokens: int = 0
    num_counted: int = 0
    num_failures: int = 0
    closed_until_s: float = 0.0
    deadline_s: float | None = None
    cause: str = ""
    num_migrated_in: int = 0
    num_migrated_out: int = 0
    correction: float = 1.0

    @property
    def load(self) -> float:
        return len(self.legs) / max(1, self.num_seats)


@dataclass(frozen=True, slots=True)
class Start:
    """Submit the generation, with its output so far, to this pipeline."""

    live: Live
    pipeline_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Abort the generation's work on this pipeline, of which there may be nothing left."""

    live: Live
    pipeline_id: str
    why: Departure


@dataclass(frozen=True, slots=True)
class Fail:
    """End the generation with this error."""

    live: Live
    error: ShuntyardError


@dataclass(frozen=True, slots=True)
class Kill:
    """The pipeline hangs: end its processes."""

    pipeline_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Retire:
    """The pipeline is gone: stop its engine."""

    pipeline_id: str


Command = Start | Stop | Fail | Kill | Retire


class IllegalTransition(ValueError):
    """A pipeline cannot go from its state to that one."""


class FleetState:
    """The decisions. `pipelines` and `lives` may be read; they change only through the methods."""

    def __init__(self, policy: FailoverPolicy | None = None, router: Router | None = None) -> None:
        self.policy = policy or FailoverPolicy()
        self.pipelines: dict[str, Pipeline] = {}
        self.lives: dict[str, Live] = {}
        self._router = router or Router()
        self._waiting: list[tuple[tuple[int, int], Live]] = []
        self._num_arrived = 0
        self._counted_s: float | None = None

    # Generations ---------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, generation: Generation, now_s: float) -> list[Command]:
        """Take a generation, which may have output from an earlier life of the server.

        Raises EngineUnavailable while no pipeline serves.
        """
        if not any(p.state == "serving" for p in self.pipelines.values()):
            raise EngineUnavailable("no pipeline takes work now")
        self._num_arrived += 1
        live = Live(generation, self._num_arrived, output=list(generation.output_token_ids))
        if not self._can_ever_resume(live):
            return [Fail(live, EngineFailed(f"no{_NO_EXACT_RESUME}"))]
        self.lives[generation.id] = live
        self._enqueue(live)
        return self._dispatch(now_s)

    def progressed(self, live: Live, num_tokens: int, now_s: float) -> list[Command]:
        """A generation put out tokens. Called for each delta, so it does little."""
        assert live.pipeline_id is not None
        pipeline = self.pipelines[live.pipeline_id]
        if not live.num_leg_tokens:
            self._observe_prefill(live, pipeline, now_s)
        else:
            step_s = (now_s - live.progress_s) / max(1, num_tokens)
            pipeline.step_s += 0.05 * (step_s - pipeline.step_s) if pipeline.step_s else step_s
        live.num_leg_tokens += num_tokens
        if live.num_fruitless:
            live.num_fruitless = 0
            live.avoids.clear()
        live.progress_s = pipeline.progress_s = now_s
        pipeline.num_tokens += num_tokens
        pipeline.num_failures = 0
        if len(live.output) < live.next_boundary:
            return []
        live.next_boundary = self._boundary_after(live, pipeline)
        return self._at_boundary(live, pipeline, now_s)

    def _observe_prefill(self, live: Live, pipeline: Pipeline, now_s: float) -> None:
        """Learn how fast prompts are read there, waiting and cached ones included."""
        elapsed_s = now_s - live.started_s
        if live.num_context >= 256 and elapsed_s > 0:
            rate = live.num_context / elapsed_s
            known = pipeline.prefill_tokens_per_s or rate
            pipeline.prefill_tokens_per_s = known + 0.1 * (rate - known)

    def finished(self, live: Live, now_s: float, *, num_tokens: int = 0) -> list[Command]:
        """A generation came to its end. num_tokens: what it put out last."""
        if num_tokens and live.pipeline_id is not None:
            pipeline = self.pipelines[live.pipeline_id]
            pipeline.num_tokens += num_tokens
            pipeline.num_failures = 0
            pipeline.progress_s = now_s
        self._forget(live)
        return self._settle(now_s)

    def cancelled(self, generation_id: str, now_s: float) -> list[Command]:
        """Nobody wants it any more. Unknown ones are ignored."""
        live = self.lives.get(generation_id)
        if live is None:
            return []
        pipeline_id = live.pipeline_id
        self._forget(live)
        stop: list[Command] = []
        if pipeline_id is not None:
            stop.append(Stop(live, pipeline_id, "cancelled"))
        return stop + self._settle(now_s)

    def leg_lost(
        self, live: Live, why: Literal["lost", "refused"], message: str, now_s: float
    ) -> list[Command]:
        """A generation's pipeline gave up on it, through no fault of the request.

        lost: it was being worked on. refused: the pipeline takes no work now.
        """
        assert live.pipeline_id is not None
        pipeline = self.pipelines[live.pipeline_id]
        if why == "refused":
            pipeline.closed_until_s = max(pipeline.closed_until_s, now_s + 0.5)
        else:
            self._count_failure(pipeline, now_s)
        return self._displace(live, why, message, now_s) + self._settle(now_s)

    # Pipelines -----------------------------------------------------------------------------

    def add(self, pipeline_id: str, *, weight: float = 1.0) -> Pipeline:
        """A pipeline that will be ready at some time. Raises ValueError if the id is taken."""
        if pipeline_id in self.pipelines:
            raise ValueError(f"there is a pipeline {pipeline_id} already")
        pipeline = self.pipelines[pipeline_id] = Pipeline(pipeline_id, weight)
        return pipeline

    def ready(
        self, pipeline_id: str, *, num_seats: int, block_size: int, resume: Resume, now_s: float
    ) -> list[Command]:
        """An engine takes work: for the first time, or again."""
        pipeline = self.pipelines[pipeline_id]
        self._move(pipeline, "serving")
        pipeline.num_seats = num_seats or 256
        pipeline.block_size = block_size or 16
        pipeline.resume = resume
        pipeline.progress_s = now_s
        pipeline.num_failures, pipeline.closed_until_s = 0, 0.0
        for live in self.lives.values():
            live.avoids.discard(pipeline_id)
        return self._dispatch(now_s)

    def lost(self, pipeline_id: str, reason: str, now_s: float) -> list[Command]:
        """An engine is dead. It may come back by itself (`ready`), unless it was to go anyway."""
        pipeline = self.pipelines[pipeline_id]
        pipeline.cause = reason
        self._router.forget(pipeline_id)
        commands: list[Command] = []
        for live in list(pipeline.legs.values()):
            commands += self._displace(live, "lost", reason, now_s)
        if pipeline.state == "serving":
            self._move(pipeline, "starting")
        return commands + self._settle(now_s)

    def stalled(self, pipeline_id: str, reason: str, now_s: float) -> list[Command]:
        """An engine hangs: it is to be ended, and counts as lost."""
        return [Kill(pipeline_id, reason), *self.lost(pipeline_id, reason, now_s)]

    def alive(self, pipeline_id: str, now_s: float) -> None:
        """An idle engine has made a token for the asking."""
        self.pipelines[pipeline_id].progress_s = now_s

    def drain(
        self, pipeline_id: str, *, cause: str, deadline_s: float | None, now_s: float
    ) -> list[Command]:
        """Admit nothing more. What still runs at the deadline goes on elsewhere."""
        pipeline = self.pipelines[pipeline_id]
        if pipeline.state != "draining":
            self._move(pipeline, "draining")
        pipeline.cause = cause
        pipeline.deadline_s = deadline_s
        return self._settle(now_s)

    def remove(self, pipeline_id: str, now_s: float) -> list[Command]:
        """Let go of a pipeline now; what runs on it goes on elsewhere, or waits."""
        pipeline = self.pipelines[pipeline_id]
        commands: list[Command] = []
        for live in list(pipeline.legs.values()):
            commands += self._displace(live, "moved", "the pipeline was removed", now_s)
        if pipeline.state != "gone":
            self._move(pipeline, "gone")
            commands.append(Retire(pipeline_id))
        return commands + self._settle(now_s)

    def forget(self, pipeline_id: str) -> None:
        """A pipeline that is gone is not spoken of any more."""
        assert self.pipelines[pipeline_id].state == "gone"
        del self.pipelines[pipeline_id]
        self._router.forget(pipeline_id)

    def set_weight(self, pipeline_id: str, weight: float) -> None:
        """Raises ValueError unless it is positive."""
        if not weight > 0:
            raise ValueError("a weight must be positive")
        self.pipelines[pipeline_id].weight = weight

    def tick(self, now_s: float) -> list[Command]:
        """What time alone brings: stalls, deadlines, backoffs, the end of patience.

        Call about once a second, more often while something waits or is on its way.
        """
        self._count(now_s)
        commands: list[Command] = []
        for pipeline in list(self.pipelines.values()):
            commands += self._watch(pipeline, now_s)
        return commands + self._settle(now_s)

    # Inside --------------------------------------------------------------------------------

    def _move(self, pipeline: Pipeline, state: PipelineState) -> None:
        if state not in _TRANSITIONS[pipeline.state]:
            raise IllegalTransition(f"{pipeline.id} cannot go from {pipeline.state} to {state}")
        pipeline.state = state

    def _enqueue(self, live: Live) -> None:
        insort(self._waiting, (live.rank, live))

    def _forget(self, live: Live) -> None:
        """Take a generation out, wherever it is."""
        del self.lives[live.generation.id]
        if live.pipeline_id is None:
            self._waiting.remove((live.rank, live))
        else:
            self._leave(live)

    def _leave(self, live: Live) -> Pipeline:
        assert live.pipeline_id is not None
        pipeline = self.pipelines[live.pipeline_id]
        del pipeline.legs[live.generation.id]
        live.pipeline_id = None
        return pipeline

    def _displace(self, live: Live, why: Departure, message: str, now_s: float) -> list[Command]:
        """Take a generation off its pipeline and let it wait for another, or give it up."""
        pipeline = self._leave(live)
        stop = Stop(live, pipeline.id, why)
        if why != "refused":
            pipeline.num_migrated_out += 1
            live.num_migrations += 1
            live.is_moving = True
        if why == "lost":
            live.num_fruitless += 1
            live.avoids.add(pipeline.id)
            live.not_before_s = now_s + self._backoff_s(live.num_fruitless)
        error = self._hopeless(live, message)
        if error is not None:
            del self.lives[live.generation.id]
            return [stop, Fail(live, error)]
        self._enqueue(live)
        return [stop]

    def _backoff_s(self, num_fruitless: int) -> float:
        if num_fruitless < 2:
            return 0.0
        delay_s: float = self.policy.backoff_s * 2 ** (num_fruitless - 2)
        return min(delay_s, self.policy.max_backoff_s)

    def _hopeless(self, live: Live, message: str) -> EngineFailed | None:
        """Why a generation that lost its pipeline is not worth another try, or None."""
        if live.num_fruitless >= self.policy.max_fruitless:
            return EngineFailed(
                f"{live.num_fruitless} pipelines in a row failed on this request before it put "
                f"out a token: {message}"
            )
        if live.num_migrations > self.policy.max_migrations:
            return EngineFailed(f"the request lost its pipeline too often: {message}")
        if not self._can_ever_resume(live):
            return EngineFailed(f"{message}; no other{_NO_EXACT_RESUME}")
        return None

    def _can_ever_resume(self, live: Live) -> bool:
        """Whether there is or may come a pipeline that continues this generation exactly."""
        if not live.output:
            return True
        staying = [p for p in self.pipelines.values() if p.state in ("starting", "serving")]
        if not staying:
            return True  # what comes next is not known; patience has its limit elsewhere
        return any(p.num_seats == 0 or live.can_go_on_at(p) for p in staying)

    def _count_failure(self, pipeline: Pipeline, now_s: float) -> None:
        pipeline.num_failures += 1
        if pipeline.num_failures >= self.policy.breaker_failures:
            times = pipeline.num_failures // self.policy.breaker_failures
            pipeline.closed_until_s = now_s + self.policy.breaker_s * min(times, 12)

    # Dispatch ------------------------------------------------------------------------------

    def _settle(self, now_s: float) -> list[Command]:
        """Retire what is drained, and give out free seats."""
        commands: list[Command] = []
        for pipeline in self.pipelines.values():
            if pipeline.state == "draining" and not pipeline.legs:
                self._move(pipeline, "gone")
                commands.append(Retire(pipeline.id))
        return commands + self._dispatch(now_s)

    def _dispatch(self, now_s: float) -> list[Command]:
        """Start what waits, most urgent first, wherever there is room."""
        if not self._waiting:
            return []
        commands: list[Command] = []
        open_pipelines = [p for p in self.pipelines.values() if self._is_open(p, now_s)]
        for item in list(self._waiting):
            live = item[1]
            roomy = [p for p in open_pipelines if self._has_room(p)]
            if not roomy and open_pipelines:
                break
            if live.not_before_s > now_s:
                continue
            candidates = self._candidates(live, open_pipelines)
            if candidates:
                self._waiting.remove(item)
                commands.append(self._start(live, candidates, now_s))
            else:
                commands += self._strand(item, now_s)
        return commands

    def _candidates(self, live: Live, pipelines: list[Pipeline]) -> list[Pipeline]:
        """Pipelines with room for it; one that has just lost it only if there is no other."""
        able = [p for p in pipelines if self._may_take(p, live)]
        others = [p for p in able if p.id not in live.avoids]
        return [p for p in others or able if self._has_room(p)]

    def _is_open(self, pipeline: Pipeline, now_s: float) -> bool:
        return pipeline.state == "serving" and pipeline.closed_until_s <= now_s

    def _has_room(self, pipeline: Pipeline) -> bool:
        lookahead = max(1, int(pipeline.num_seats * self.policy.lookahead))
        return len(pipeline.legs) < pipeline.num_seats + lookahead

    def _may_take(self, pipeline: Pipeline, live: Live) -> bool:
        if not live.leg and not live.output:
            return True
        if not live.can_go_on_at(pipeline):
            return False
        suspected = live.num_fruitless >= self.policy.max_fruitless - 1
        if suspected and any(_is_suspect(other, self.policy) for other in pipeline.legs.values()):
            return False  # of two suspects at once nobody could say which it was
        pending = sum(other.num_context for other in _recomputing(pipeline))
        return not pending or pending + live.num_context <= self.policy.resumed_prefill_budget

    def _start(self, live: Live, candidates: list[Pipeline], now_s: float) -> Start:
        chosen = self.pipelines[
            self._router.pick(
                live.generation.prompt_token_ids,
                weights={p.id: p.weight * p.correction for p in candidates},
                loads={p.id: p.load for p in candidates},
                salt=live.generation.cache_salt,
            )
        ]
        if not chosen.legs:
            chosen.progress_s = now_s  # it owed nothing until now
        chosen.legs[live.generation.id] = live
        chosen.num_migrated_in += live.is_moving
        live.is_moving = False
        live.pipeline_id = chosen.id
        live.leg += 1
        live.started_s = live.progress_s = now_s
        live.num_leg_tokens = 0
        live.stranded_since_s = None
        live.next_boundary = len(live.output) + 1
        return Start(live, chosen.id)

    def _strand(self, item: tuple[tuple[int, int], Live], now_s: float) -> list[Command]:
        """Note that nothing could take this one, and give it up when that lasts too long."""
        live = item[1]
        serving = [p for p in self.pipelines.values() if p.state == "serving"]
        if any(live.can_go_on_at(p) for p in serving):
            live.stranded_since_s = None  # it only waits for its turn
            return []
        if live.stranded_since_s is None:
            live.stranded_since_s = now_s
        waited_s = now_s - live.stranded_since_s
        if waited_s < self.policy.no_capacity_timeout_s:
            return []
        self._waiting.remove(item)
        del self.lives[live.generation.id]
        return [Fail(live, EngineUnavailable(f"no pipeline could go on for {waited_s:.0f} s"))]

    # Sub-nodes -----------------------------------------------------------------------------

    def _boundary_after(self, live: Live, pipeline: Pipeline) -> int:
        """Number of output tokens at which the next sub-node ends: on a KV block's end."""
        tokens = self.policy.subnode_tokens
        if tokens is None:
            step_s = pipeline.step_s or 0.02
            tokens = min(256, max(pipeline.block_size, int(self.policy.subnode_s / step_s)))
        prompt = len(live.generation.prompt_token_ids)
        end = prompt + len(live.output) + tokens
        aligned = end - end % pipeline.block_size if tokens >= pipeline.block_size else end
        return max(len(live.output) + 1, aligned - prompt)

    def _at_boundary(self, live: Live, pipeline: Pipeline, now_s: float) -> list[Command]:
        """Give the seat up if somebody more urgent waits for one."""
        urgent = self._most_urgent_without_seat(pipeline, now_s)
        if urgent is None or urgent >= live.generation.priority:
            return []
        if not live.can_go_on_at(pipeline):
            return []
        self._leave(live)
        self._enqueue(live)
        return [Stop(live, pipeline.id, "preempted"), *self._dispatch(now_s)]

    def _most_urgent_without_seat(self, pipeline: Pipeline, now_s: float) -> int | None:
        """The priority of whoever would take a seat of this pipeline first, or None."""
        found: list[int] = []
        if len(pipeline.legs) > pipeline.num_seats:
            found += [o.generation.priority for o in pipeline.legs.values() if not o.num_leg_tokens]
        if pipeline.state == "serving" and self._waiting and not self._has_room(pipeline):
            found += [
                w.generation.priority for _, w in self._waiting[:1] if w.not_before_s <= now_s
            ]
        return min(found, default=None)

    # Watching ------------------------------------------------------------------------------

    def _watch(self, pipeline: Pipeline, now_s: float) -> list[Command]:
        commands: list[Command] = []
        if pipeline.state not in ("serving", "draining"):
            return commands
        limit_s = self.stall_limit_s(pipeline)
        silent_s = now_s - pipeline.progress_s
        if pipeline.legs and silent_s > limit_s:
            reason = f"no token for {silent_s:.1f} s (limit {limit_s:.1f} s)"
            return self.stalled(pipeline.id, reason, now_s)
        if pipeline.deadline_s is not None:
            remaining_s = pipeline.deadline_s - now_s
            if pipeline.state == "draining" and remaining_s <= self.policy.drain_margin_s:
                commands += self._evacuate(pipeline, now_s)
        return commands

    def stall_limit_s(self, pipeline: Pipeline) -> float:
        """Silence that is a fault: more than what is being computed can explain.

        Prompts may be read ten times slower than usual, but no slower than the policy's worst.
        """
        slowest = self.policy.slowest_prefill_tokens_per_s
        starting = (live for live in pipeline.legs.values() if not live.num_leg_tokens)
        num_prefill = sum(live.num_context for live in starting)
        return (
            self.policy.stall_base_s
            + self.policy.stall_steps * pipeline.step_s
            + num_prefill / max(slowest, pipeline.prefill_tokens_per_s / 10)
        )

    def _evacuate(self, pipeline: Pipeline, now_s: float) -> list[Command]:
        """Move what still runs, as far as others have room for it."""
        commands: list[Command] = []
        others = [
            p for p in self.pipelines.values() if p is not pipeline and self._is_open(p, now_s)
        ]
        for live in list(pipeline.legs.values()):
            if not any(self._has_room(p) and live.can_go_on_at(p) for p in others):
                continue
            commands += self._displace(live, "moved", pipeline.cause, now_s)
            commands += self._dispatch(now_s)
        return commands

    def _count(self, now_s: float) -> None:
        """Observe each pipeline's tokens per second, and correct weights by what is seen.

        Only a pipeline whose seats are taken shows what it can do. The correction is what it does
        in relation to its weight, against the mean of those that show it.
        """
        if self._counted_s is None:
            self._counted_s = now_s
        elapsed_s = now_s - self._counted_s
        if elapsed_s < 1.0:
            return
        self._counted_s = now_s
        for pipeline in self.pipelines.values():
            rate = (pipeline.num_tokens - pipeline.num_counted) / elapsed_s
            pipeline.num_counted = pipeline.num_tokens
            pipeline.tokens_per_s += 0.3 * (rate - pipeline.tokens_per_s)
        busy = [p for p in self.pipelines.values() if p.load >= 0.8 and p.tokens_per_s > 0]
        if len(busy) > 1:
            mean = sum(p.tokens_per_s for p in busy) / sum(p.weight for p in busy)
            for pipeline in busy:
                target = pipeline.tokens_per_s / pipeline.weight / mean
                corrected = pipeline.correction + 0.2 * (target - pipeline.correction)
                pipeline.correction = min(4.0, max(0.25, corrected))

    def check_invariants(self) -> None:
        """For tests: each generation is in exactly one place, and no pipeline is overfull."""
        placed: dict[str, int] = dict.fromkeys(self.lives, 0)
        for live in self._all_placed():
            placed[live.generation.id] += 1
        assert set(placed.values()) <= {1}, placed
        for pipeline in self.pipelines.values():
            assert pipeline.state in ("serving", "draining") or not pipeline.legs, pipeline
            assert all(live.pipeline_id == pipeline.id for live in pipeline.legs.values())
        assert self._waiting == sorted(self._waiting, key=lambda item: item[0])

    def _all_placed(self) -> Iterator[Live]:
        yield from (live for _, live in self._waiting)
        for pipeline in self.pipelines.values():
            yield from pipeline.legs.values()


def _recomputing(pipeline: Pipeline) -> Iterable[Live]:
    """Migrated generations whose context is being recomputed there."""
    return (o for o in pipeline.legs.values() if o.num_migrations and not o.num_leg_tokens)


def _is_suspect(live: Live, policy: FailoverPolicy) -> bool:
    return live.num_fruitless >= policy.max_fruitless - 1
