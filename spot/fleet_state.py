"""Which generation runs on which pipeline, and where it goes when that is lost: pure decisions.

The state of all pipelines of one model and of all generations on them. Methods take what happened
and the time, and return commands; nothing here waits, calls an engine or reads a clock.

A generation waits, or runs on exactly one pipeline. It leaves one by finishing, by losing it
(crash, stall, error), at a deadline of a draining one, or by preemption at the boundary between two
sub-nodes; in all cases but the first it waits again with all its output, and goes on elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from spot.dispatch import Dispatcher, is_open
from spot.engines.base import Resume
from spot.errors import EngineFailed, EngineUnavailable
from spot.failover_policy import FailoverPolicy
from spot.fleet_commands import Command, Departure, Fail, Kill, Retire, Stop
from spot.fleet_records import Live, Pipeline
from spot.generation import Generation
from spot.pace import (
    ThroughputWatch,
    boundary_after,
    observe_tokens,
    subnode_s,
    subnode_tokens,
    why_stalled,
)
from spot.routing import Router

_NO_EXACT_RESUME = (
    " pipeline can go on exactly with a request of this kind "
    "(seeded, constrained or penalised output needs engines of this server's own)"
)


class FleetState:
    """The decisions. `pipelines` and `lives` may be read; they change only through the methods."""

    def __init__(self, policy: FailoverPolicy | None = None, router: Router | None = None) -> None:
        self.policy = policy or FailoverPolicy()
        self.pipelines: dict[str, Pipeline] = {}
        self.lives: dict[str, Live] = {}
        self._dispatcher = Dispatcher(self.policy, router or Router(), self.pipelines)
        self._throughput = ThroughputWatch()
        self._num_arrived = 0

    # Generations ---------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return self._dispatcher.num_waiting

    def submit(self, generation: Generation, now_s: float) -> list[Command]:
        """Take a generation, which may have output from an earlier life of the server.

        Raises EngineUnavailable while no pipeline serves.
        """
        if not any(p.state == "serving" for p in self.pipelines.values()):
            raise EngineUnavailable("no pipeline takes work now")
        self._num_arrived += 1
        live = Live(
            generation,
            self._num_arrived,
            now_s,
            now_s - (generation.head_start_s or 0.0),
            list(generation.output_token_ids),
        )
        if not self._can_ever_resume(live):
            return [Fail(live, EngineFailed(f"no{_NO_EXACT_RESUME}"))]
        self.lives[generation.id] = live
        self._dispatcher.enqueue(live)
        return self._dispatch(now_s)

    @property
    def num_admitted(self) -> int:
        """Generations that the pipelines take at once."""
        return sum(
            self._dispatcher.limit(pipeline)
            for pipeline in self.pipelines.values()
            if pipeline.state == "serving"
        )

    def reprioritise(self, generation_id: str, head_start_s: float) -> None:
        """A generation counts as having come so much earlier than it did: at once if it waits, from
        its next boundary on if it runs. Unknown ones are ignored."""
        live = self.lives.get(generation_id)
        if live is None:
            return
        due_s = live.came_s - head_start_s
        if live.pipeline_id is not None:
            live.due_s = due_s
            return
        self._dispatcher.withdraw(live)
        live.due_s = due_s
        self._dispatcher.enqueue(live)

    def progressed(self, live: Live, num_tokens: int, now_s: float) -> list[Command]:
        """A generation put out tokens. Called for each delta, so it does little."""
        assert live.pipeline_id is not None
        pipeline = self.pipelines[live.pipeline_id]
        observe_tokens(live, pipeline, num_tokens, now_s)
        live.num_leg_tokens += num_tokens
        if live.num_fruitless:
            live.num_fruitless = 0
            live.avoids.clear()
        live.stranded_since_s = None
        live.progress_s = pipeline.progress_s = now_s
        pipeline.num_tokens += num_tokens
        pipeline.num_failures = 0
        if len(live.output) < live.next_boundary:
            return []
        live.next_boundary = boundary_after(live, pipeline, self.policy)
        return self._at_boundary(live, pipeline, now_s)

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
            live.stranded_since_s = None  # it had been taken
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
        pipeline.become("serving")
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
        self._dispatcher.forget(pipeline_id)
        commands: list[Command] = []
        for live in list(pipeline.legs.values()):
            commands += self._displace(live, "lost", reason, now_s)
        if pipeline.state == "serving":
            pipeline.become("starting")
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
            pipeline.become("draining")
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
            pipeline.become("gone")
            commands.append(Retire(pipeline_id))
        return commands + self._settle(now_s)

    def forget(self, pipeline_id: str) -> None:
        """A pipeline that is gone is not spoken of any more."""
        assert self.pipelines[pipeline_id].state == "gone"
        del self.pipelines[pipeline_id]
        self._dispatcher.forget(pipeline_id)

    def set_weight(self, pipeline_id: str, weight: float) -> None:
        """Raises ValueError unless it is positive."""
        if not weight > 0:
            raise ValueError("a weight must be positive")
        self.pipelines[pipeline_id].weight = weight

    def tick(self, now_s: float) -> list[Command]:
        """What time alone brings: stalls, deadlines, backoffs, the end of patience.

        Call about once a second, more often while something waits or is on its way.
        """
        self._throughput.count(self.pipelines.values(), now_s)
        commands: list[Command] = []
        for pipeline in list(self.pipelines.values()):
            commands += self._watch(pipeline, now_s)
        return commands + self._settle(now_s)

    # Inside --------------------------------------------------------------------------------

    def _forget(self, live: Live) -> None:
        """Take a generation out, wherever it is."""
        del self.lives[live.generation.id]
        if live.pipeline_id is None:
            self._dispatcher.withdraw(live)
        else:
            self._leave(live)

    def _leave(self, live: Live) -> Pipeline:
        assert live.pipeline_id is not None
        pipeline = self.pipelines[live.pipeline_id]
        pipeline.unseat(live)
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
            live.not_before_s = now_s + self.policy.retry_delay_s(live.num_fruitless)
        error = self._hopeless(live, message)
        if error is not None:
            del self.lives[live.generation.id]
            return [stop, Fail(live, error)]
        self._dispatcher.enqueue(live)
        return [stop]

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
                pipeline.become("gone")
                commands.append(Retire(pipeline.id))
        return commands + self._dispatch(now_s)

    def _dispatch(self, now_s: float) -> list[Command]:
        commands: list[Command] = [*self._dispatcher.dispatch(now_s)]
        for command in commands:
            if isinstance(command, Fail):
                del self.lives[command.live.generation.id]
        return commands

    def _at_boundary(self, live: Live, pipeline: Pipeline, now_s: float) -> list[Command]:
        """Give the seat up if somebody more urgent waits for one."""
        urgent = self._dispatcher.most_urgent_without_seat(pipeline, now_s)
        if urgent is None or not live.yields_to(
            urgent,
            margin_s=subnode_s(pipeline, self.policy),
            num_few=subnode_tokens(pipeline, self.policy),
        ):
            return []
        if not live.can_go_on_at(pipeline):
            return []
        self._leave(live)
        self._dispatcher.enqueue(live)
        return [Stop(live, pipeline.id, "preempted"), *self._dispatch(now_s)]

    # Watching ------------------------------------------------------------------------------

    def _watch(self, pipeline: Pipeline, now_s: float) -> list[Command]:
        commands: list[Command] = []
        if pipeline.state not in ("serving", "draining"):
            return commands
        if (reason := why_stalled(pipeline, self.policy, now_s)) is not None:
            return self.stalled(pipeline.id, reason, now_s)
        if pipeline.deadline_s is not None:
            remaining_s = pipeline.deadline_s - now_s
            if pipeline.state == "draining" and remaining_s <= self.policy.drain_margin_s:
                commands += self._evacuate(pipeline, now_s)
        return commands

    def _evacuate(self, pipeline: Pipeline, now_s: float) -> list[Command]:
        """Move what still runs, as far as others have room for it."""
        commands: list[Command] = []
        others = [p for p in self.pipelines.values() if p is not pipeline and is_open(p, now_s)]
        for live in list(pipeline.legs.values()):
            if not any(self._dispatcher.has_room(p) and live.can_go_on_at(p) for p in others):
                continue
            commands += self._displace(live, "moved", pipeline.cause, now_s)
            commands += self._dispatch(now_s)
        return commands

    def check_invariants(self) -> None:
        """For tests: each generation is in exactly one place, and no pipeline is overfull."""
        placed: dict[str, int] = dict.fromkeys(self.lives, 0)
        for live in self._all_placed():
            placed[live.generation.id] += 1
        assert set(placed.values()) <= {1}, placed
        for pipeline in self.pipelines.values():
            assert pipeline.state in ("serving", "draining") or not pipeline.legs, pipeline
            assert all(live.pipeline_id == pipeline.id for live in pipeline.legs.values())
        self._dispatcher.check_invariants()

    def _all_placed(self) -> Iterator[Live]:
        yield from self._dispatcher.waiting()
        for pipeline in self.pipelines.values():
            yield from pipeline.legs.values()
