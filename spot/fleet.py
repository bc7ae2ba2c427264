"""All pipelines of one model as one engine: generations survive the loss of a pipeline.

The shell around `spot.fleet_state`: it carries out commands, and tells the state what engines and
time bring. The caller sees a pause where a generation moves, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import anyio
import msgspec
from anyio.abc import TaskGroup

from spot.engines.base import (
    DeltaSink,
    EngineCard,
    EngineStats,
    EngineStatus,
    PipelineEngine,
    Resume,
)
from spot.errors import (
    EngineFailed,
    EngineUnavailable,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    ShuntyardError,
)
from spot.failover_policy import FailoverPolicy
from spot.fleet_commands import Command, Fail, Kill, Retire, Start, Stop
from spot.fleet_events import EventKind, FleetEvents
from spot.fleet_records import Live, Pipeline
from spot.fleet_state import FleetState
from spot.generation import Generation, SamplingParams, TokenDelta
from spot.pace import stall_limit_s

logger = logging.getLogger(__name__)

_LEVELS = {
    "migrated": logging.DEBUG,
    "down": logging.WARNING,
    "stalled": logging.WARNING,
    "lost": logging.WARNING,
}
_TICK_S = 0.25
_CALM_TICK_S = 1.0


@dataclass(slots=True)
class PipelineSpec:
    """An engine and what is expected of it. weight: throughput, in the unit of all others."""

    id: str
    engine: PipelineEngine
    weight: float = 1.0


@dataclass(slots=True, eq=False)
class _Member:
    """An engine of the fleet. leave: it shall stop. left: it has."""

    spec: PipelineSpec
    leave: anyio.Event = field(default_factory=anyio.Event)
    left: anyio.Event = field(default_factory=anyio.Event)
    num_restarts: int = 0


@dataclass(slots=True, eq=False)
class _Flight:
    """A generation as its caller knows it.

    leg: what may speak for it now. num_counted: migrations that are in the fleet's events.
    num_told: those that the caller has been told of; of one whose target failed before it made a
        token, with the next one's first delta.
    num_reported: output tokens whose service was reported.
    """

    sink: DeltaSink
    leg: _LegSink | None = None
    num_counted: int = 0
    num_told: int = 0
    num_reported: int = 0


class _LegSink:
    """Takes what one pipeline generates for one generation, as long as it is the one to do so."""

    __slots__ = ("_fleet", "_flight", "_is_resumed", "_live")

    def __init__(self, fleet: Fleet, live: Live, flight: _Flight) -> None:
        self._fleet = fleet
        self._live = live
        self._flight = flight
        self._is_resumed = bool(live.output)

    def on_delta(self, delta: TokenDelta) -> None:
        fleet, live, flight = self._fleet, self._live, self._flight
        if fleet.sink_of(live) is not self:
            return
        live.output.extend(delta.token_ids)
        if self._is_resumed:
            delta.num_cached_tokens = delta.queue_s = None  # said of the first start only
        if live.num_migrations != flight.num_told:
            delta.num_migrations = live.num_migrations - flight.num_told
            flight.num_told = live.num_migrations
        if delta.finish_reason is None:
            flight.sink.on_delta(delta)
            fleet.on_progress(live, len(delta.token_ids))
        else:
            fleet.on_finish(live, len(delta.token_ids))
            flight.sink.on_delta(delta)

    def on_error(self, error: ShuntyardError) -> None:
        if self._fleet.sink_of(self._live) is self:
            self._fleet.on_leg_error(self._live, error)


class _Canary:
    """Hears whether a pipeline is alive."""

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.is_alive = False

    def on_delta(self, delta: TokenDelta) -> None:
        self.is_alive = True
        self.ended.set()

    def on_error(self, error: ShuntyardError) -> None:
        # Whatever the pipeline has against this one, it answers.
        self.is_alive = isinstance(error, InvalidRequest | Overloaded)
        self.ended.set()


class Fleet:
    """Several engines of the same model, as a `spot.engines.base.Engine`.

    on_subnode: is told the id of a generation and the tokens that it attained, after each sub-node
        and at its end.
    on_capacity: is told how many generations the pipelines take at once, when that changes.
    on_pipelines: is called when a pipeline begins to serve, also anew, and when one is gone.
    """

    def __init__(
        self,
        specs: list[PipelineSpec],
        *,
        policy: FailoverPolicy | None = None,
        on_subnode: Callable[[str, int], None] | None = None,
        on_capacity: Callable[[int], None] | None = None,
        on_pipelines: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = FleetState(policy)
        self.events = FleetEvents()
        self._specs = specs
        self._on_subnode = on_subnode
        self._on_capacity = on_capacity
        self._on_pipelines = on_pipelines
        self._num_admitted: int | None = None
        self._members: dict[str, _Member] = {}
        self._flights: dict[str, _Flight] = {}
        self._card: EngineCard | None = None
        self._closed = False
        self._idle = anyio.Event()
        self._group: TaskGroup | None = None
        self._stack = AsyncExitStack()
        self._num_canaries = 0
        self.num_migrations = 0
        self.num_preemptions = 0
        self.num_lost = 0

    # The engine that callers see -----------------------------------------------------------

    @property
    def status(self) -> EngineStatus:
        """Ready as long as one pipeline is; `detail` speaks of the first that is not."""
        statuses = [member.spec.engine.status for member in self._members.values()]
        if self._closed:
            return EngineStatus("draining", "the server is shutting down")
        if not statuses:
            return EngineStatus("stopped" if self._group is None else "dead", "no pipeline is left")
        if all(status.state == "stopped" for status in statuses) and self._group is not None:
            return EngineStatus("dead", "no pipeline is left")
        states = {pipeline.state for pipeline in self.state.pipelines.values()}
        best = next((s for s in statuses if s.state == "ready"), None)
        if best is None:
            best = next((s for s in statuses if s.state == "starting"), statuses[0])
        elif "serving" not in states:
            is_leaving = "draining" in states
            best = EngineStatus(
                "dead" if is_leaving else "starting",
                "every pipeline is being drained" if is_leaving else "about to serve",
            )
        return EngineStatus(
            best.state,
            best.detail,
            [pid for status in statuses for pid in status.pids],
            sum(status.num_restarts for status in statuses),
            all(status.is_misconfigured for status in statuses),
        )

    @property
    def card(self) -> EngineCard | None:
        """What every pipeline can do; the seats of all that serve."""
        return self._card

    @property
    def stats(self) -> EngineStats:
        stats = [member.spec.engine.stats for member in self._members.values()]
        if len(stats) == 1 and not self.state.num_waiting:
            return stats[0]
        return EngineStats(
            running=sum(s.running for s in stats),
            waiting=sum(s.waiting for s in stats) + self.state.num_waiting,
            kv_cache_usage=max((s.kv_cache_usage for s in stats), default=0.0),
            prefix_cache_queries=sum(s.prefix_cache_queries for s in stats),
            prefix_cache_hits=sum(s.prefix_cache_hits for s in stats),
            num_preemptions=sum(s.num_preemptions for s in stats),
        )

    @property
    def num_live(self) -> int:
        return len(self.state.lives)

    def submit(self, generation: Generation, sink: DeltaSink) -> None:
        if self._closed:
            raise EngineUnavailable("the server is shutting down")
        self._flights[generation.id] = _Flight(sink, num_reported=len(generation.output_token_ids))
        try:
            commands = self.state.submit(generation, self._now_s())
        except EngineUnavailable:
            del self._flights[generation.id]
            raise EngineUnavailable(
                f"the engine is {self.status.state}: {self.status.detail}"
            ) from None
        self._carry_out(commands)

    def abort(self, generation_id: str) -> None:
        if self._flights.pop(generation_id, None) is not None:
            self._carry_out(self.state.cancelled(generation_id, self._now_s()))
            self._note_idle()

    def reprioritise(self, generation_id: str, head_start_s: float) -> None:
        """Let a generation count as having come so much earlier than it did. Unknown ones are
        ignored. One that is in an engine already keeps its place there until its next sub-node.
        """
        self.state.reprioritise(generation_id, head_start_s)

    async def wait_ready(self) -> EngineCard:
        """Until the first pipeline is ready. Raises EngineFailed once none can ever be."""
        failures: list[EngineFailed] = []
        async with anyio.create_task_group() as tasks:

            async def wait_for(engine: PipelineEngine) -> None:
                try:
                    await engine.wait_ready()
                except EngineFailed as error:
                    failures.append(error)
                else:
                    tasks.cancel_scope.cancel()

            for member in self._members.values():
                tasks.start_soon(wait_for, member.spec.engine)
        self._look_at_engines()
        if self._card is None:
            raise failures[0] if failures else EngineFailed("there is no pipeline")
        return self._card

    async def drain(self) -> None:
        self._closed = True
        while self.state.lives:
            self._idle = anyio.Event()
            await self._idle.wait()

    async def __aenter__(self) -> Self:
        self._group = await self._stack.enter_async_context(anyio.create_task_group())
        for spec in self._specs:
            await self.add(spec)
        self._group.start_soon(self._tick)
        self._group.start_soon(self._send_canaries)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed = True
        for live in list(self.state.lives.values()):
            self._end_badly(live, EngineFailed("the server was stopped"))
        for member in self._members.values():
            member.leave.set()
        with anyio.CancelScope(shield=True):
            for member in list(self._members.values()):
                await member.left.wait()
        if self._group is not None:
            self._group.cancel_scope.cancel()
        await self._stack.__aexit__(exc_type, exc, traceback)

    # What operators do ---------------------------------------------------------------------

    async def add(self, spec: PipelineSpec) -> None:
        """Start another pipeline. Raises ValueError if its id is taken."""
        assert self._group is not None, "the fleet is not entered"
        self.state.add(spec.id, weight=spec.weight)
        member = self._members[spec.id] = _Member(spec)
        self._say("added", spec.id)
        await self._group.start(self._run_member, member)

    def drain_pipeline(
        self,
        pipeline_id: str,
        *,
        deadline_s: float | None,
        cause: Literal["drained", "notice"] = "drained",
    ) -> None:
        """Take no new work there; move what still runs when the deadline (from now) nears.

        Raises KeyError for an unknown pipeline, ValueError for one that is gone.
        """
        now_s = self._now_s()
        self._known(pipeline_id)
        at_s = None if deadline_s is None else now_s + deadline_s
        commands = self.state.drain(
            pipeline_id, cause=f"the pipeline is {cause}", deadline_s=at_s, now_s=now_s
        )
        self._say("draining", pipeline_id, cause)
        self._carry_out(commands)

    def remove_pipeline(self, pipeline_id: str) -> None:
        """Stop a pipeline now; what runs there goes on elsewhere. Raises KeyError."""
        self._known(pipeline_id)
        self._carry_out(self.state.remove(pipeline_id, self._now_s()))

    def set_weight(self, pipeline_id: str, weight: float) -> None:
        """Raises KeyError, ValueError."""
        self._known(pipeline_id)
        self.state.set_weight(pipeline_id, weight)
        self._say("weight", pipeline_id, f"{weight:g}")

    def describe(self) -> list[dict[str, Any]]:
        """Each pipeline's state and load, as the admin API gives it."""
        return [self._describe(pipeline_id) for pipeline_id in self.state.pipelines]

    def engine(self, pipeline_id: str) -> PipelineEngine:
        """Raises KeyError."""
        return self._members[pipeline_id].spec.engine

    def statuses(self) -> dict[str, EngineStatus]:
        """What each pipeline's engine is doing."""
        return {name: member.spec.engine.status for name, member in self._members.items()}

    def _known(self, pipeline_id: str) -> None:
        if pipeline_id not in self.state.pipelines:
            raise KeyError(pipeline_id)

    def _describe(self, pipeline_id: str) -> dict[str, Any]:
        pipeline, engine = self.state.pipelines[pipeline_id], self.engine(pipeline_id)
        status, card = engine.status, engine.card
        return {
            "id": pipeline.id,
            "engine": card.engine if card is not None else "",
            "state": pipeline.state,
            "detail": status.detail or pipeline.cause,
            "weight": pipeline.weight,
            "observed_tokens_per_s": round(pipeline.tokens_per_s, 1),
            "running": len(pipeline.legs),
            "waiting": max(0, len(pipeline.legs) - pipeline.num_seats),
            "seats": pipeline.num_seats,
            "resume": pipeline.resume,
            "migrated_in": pipeline.num_migrated_in,
            "migrated_out": pipeline.num_migrated_out,
            "restarts": status.num_restarts,
            "pids": status.pids,
        }

    # What engines tell ---------------------------------------------------------------------

    def sink_of(self, live: Live) -> _LegSink | None:
        """The sink that may speak for a generation now."""
        flight = self._flights.get(live.generation.id)
        return None if flight is None else flight.leg

    def on_progress(self, live: Live, num_tokens: int) -> None:
        # The caller may have aborted it while it took the delta.
        if live.pipeline_id is None:
            return
        boundary = live.next_boundary
        commands = self.state.progressed(live, num_tokens, self._now_s())
        if live.next_boundary != boundary:
            self._report(live)
        if commands:
            self._carry_out(commands)

    def on_finish(self, live: Live, num_tokens: int) -> None:
        self._report(live)
        del self._flights[live.generation.id]
        self._carry_out(self.state.finished(live, self._now_s(), num_tokens=num_tokens))
        self._note_idle()

    def on_leg_error(self, live: Live, error: ShuntyardError) -> None:
        if isinstance(error, InvalidRequest | GenerationFailed):
            self._carry_out(self.state.finished(live, self._now_s()))
            self._end_badly(live, error)
            return
        assert live.pipeline_id is not None
        now_s = self._now_s()
        engine = self._members[live.pipeline_id].spec.engine
        if isinstance(error, EngineUnavailable | Overloaded):
            commands = self.state.leg_lost(live, "refused", error.message, now_s)
        elif engine.status.state != "ready":
            self._say("down", live.pipeline_id, error.message)
            commands = self.state.lost(live.pipeline_id, error.message, now_s)
        else:
            commands = self.state.leg_lost(live, "lost", error.message, now_s)
        self._carry_out(commands)

    def _report(self, live: Live) -> None:
        flight = self._flights.get(live.generation.id)
        if self._on_subnode is None or flight is None:
            return
        attained = len(live.output) - flight.num_reported
        flight.num_reported = len(live.output)
        self._on_subnode(live.generation.id, attained)

    def _say(self, kind: EventKind, pipeline_id: str, detail: str = "") -> None:
        is_expected = kind == "down" and self._closed
        level = logging.INFO if is_expected else _LEVELS.get(kind, logging.INFO)
        logger.log(level, "pipeline %s: %s%s", pipeline_id, kind, f" ({detail})" if detail else "")
        self.events.add(kind, pipeline_id, detail)

    # Carrying out --------------------------------------------------------------------------

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Start(live, pipeline_id):
                    self._start(live, pipeline_id)
                case Stop(live, pipeline_id, why):
                    self.num_preemptions += why == "preempted"
                    if flight := self._flights.get(live.generation.id):
                        flight.leg = None
                    if member := self._members.get(pipeline_id):
                        member.spec.engine.abort(live.generation.id)
                case Fail(live, error):
                    self.num_lost += 1
                    self._say("lost", "", error.message)
                    self._end_badly(live, error)
                case Kill(pipeline_id, reason):
                    self._say("stalled", pipeline_id, reason)
                    self._members[pipeline_id].spec.engine.kill(reason)
                case Retire(pipeline_id):
                    self._retire(pipeline_id)
        self._note_capacity()

    def _note_capacity(self) -> None:
        num_admitted = self.state.num_admitted
        if self._on_capacity is not None and num_admitted != self._num_admitted:
            self._num_admitted = num_admitted
            self._on_capacity(num_admitted)

    def _start(self, live: Live, pipeline_id: str) -> None:
        generation_id = live.generation.id
        flight = self._flights.get(generation_id)
        if flight is None or live.pipeline_id != pipeline_id:
            return  # ended, or moved on, by an earlier command's doing
        if live.num_migrations != flight.num_counted:
            flight.num_counted = live.num_migrations
            self.num_migrations += 1
            self._say("migrated", pipeline_id, f"{len(live.output)} tokens so far")
        leg = flight.leg = _LegSink(self, live, flight)
        try:
            self._members[pipeline_id].spec.engine.submit(live.remaining, leg)
        except ShuntyardError as error:
            leg.on_error(error)

    def _end_badly(self, live: Live, error: ShuntyardError) -> None:
        flight = self._flights.pop(live.generation.id, None)
        self._note_idle()
        if flight is not None:
            flight.sink.on_error(error)

    def _note_idle(self) -> None:
        if not self.state.lives:
            self._idle.set()

    def _retire(self, pipeline_id: str) -> None:
        member = self._members.get(pipeline_id)
        if member is not None:
            member.leave.set()

    # Running -------------------------------------------------------------------------------

    async def _run_member(self, member: _Member, *, task_status: Any) -> None:
        """Run one engine until it shall leave. Not by cancelling it: it ends in order."""
        pipeline_id = member.spec.id
        try:
            async with member.spec.engine:
                task_status.started()
                await member.leave.wait()
        finally:
            del self._members[pipeline_id]
            if self.state.pipelines[pipeline_id].state != "gone":
                self._carry_out(self.state.remove(pipeline_id, self._now_s()))
            self.state.forget(pipeline_id)
            self._update_card()
            self._say("gone", pipeline_id)
            self._on_pipelines()
            member.left.set()

    async def _tick(self) -> None:
        while True:
            self._look_at_engines()
            self._carry_out(self.state.tick(self._now_s()))
            await anyio.sleep(_TICK_S if self._is_unsettled else _CALM_TICK_S)

    @property
    def _is_unsettled(self) -> bool:
        """Whether something may change by itself at any moment."""
        pipelines = self.state.pipelines.values()
        return self.state.num_waiting > 0 or any(p.state != "serving" for p in pipelines)

    async def _send_canaries(self) -> None:
        """Let idle pipelines make a token now and then: one that hangs should not wait for users.

        An idle pipeline owes nothing, so silence says nothing of it.
        """
        period_s = self.state.policy.canary_period_s
        while True:
            await anyio.sleep(period_s / 2)
            async with anyio.create_task_group() as tasks:
                for pipeline in self.state.pipelines.values():
                    idle_s = self._now_s() - pipeline.progress_s
                    is_idle = pipeline.state == "serving" and not pipeline.legs
                    if is_idle and idle_s >= period_s / 2 and not self._works_for_others(pipeline):
                        tasks.start_soon(self._send_canary, pipeline)

    def _works_for_others(self, pipeline: Pipeline) -> bool:
        """Whether an engine is busy with what is not ours: its queue may be long."""
        return self._members[pipeline.id].spec.engine.stats.running > 0

    async def _send_canary(self, pipeline: Pipeline) -> None:
        engine = self._members[pipeline.id].spec.engine
        self._num_canaries += 1
        generation = Generation(
            f"canary-{self._num_canaries}", [1], SamplingParams(max_tokens=1, temperature=0.0)
        )
        canary = _Canary()
        limit_s = stall_limit_s(pipeline, self.state.policy)
        with anyio.move_on_after(limit_s):
            try:
                engine.submit(generation, canary)
            except ShuntyardError:
                return  # busy with something else than being silent
            await canary.ended.wait()
        engine.abort(generation.id)
        if pipeline.state != "serving":
            return
        if canary.is_alive:
            self.state.alive(pipeline.id, self._now_s())
        elif not pipeline.legs:
            reason = f"an idle pipeline did not make a token within {limit_s:.1f} s"
            self._carry_out(self.state.stalled(pipeline.id, reason, self._now_s()))

    def _look_at_engines(self) -> None:
        """Notice engines that became ready, or no longer are."""
        for pipeline_id, member in list(self._members.items()):
            status = member.spec.engine.status
            pipeline = self.state.pipelines[pipeline_id]
            restarted = status.num_restarts != member.num_restarts
            is_ready = status.state == "ready"
            if pipeline.state in ("serving", "draining") and (restarted or not is_ready):
                detail = status.detail or status.state
                self._say("down", pipeline_id, detail)
                self._carry_out(self.state.lost(pipeline_id, detail, self._now_s()))
            member.num_restarts = status.num_restarts
            if pipeline.state == "starting" and is_ready:
                self._become_ready(pipeline_id, member)

    def _become_ready(self, pipeline_id: str, member: _Member) -> None:
        card = member.spec.engine.card
        assert card is not None
        commands = self.state.ready(
            pipeline_id,
            num_seats=card.max_num_seqs,
            block_size=card.block_size,
            resume=card.resume,
            now_s=self._now_s(),
        )
        self._update_card()
        self._say("ready", pipeline_id)
        self._on_pipelines()
        self._carry_out(commands)

    def _update_card(self) -> None:
        """What is true of every pipeline that was ever ready."""
        cards = [c for m in self._members.values() if (c := m.spec.engine.card) is not None]
        if not cards:
            return
        resumes: list[Resume] = ["prompt", "unseeded", "exact"]
        self._card = msgspec.structs.replace(
            cards[0],
            max_model_len=min(card.max_model_len for card in cards),
            vocab_size=min(card.vocab_size for card in cards),
            max_num_seqs=sum(card.max_num_seqs for card in cards),
            block_size=max(card.block_size for card in cards),
            num_kv_blocks=sum(card.num_kv_blocks for card in cards),
            max_logprobs=min(card.max_logprobs for card in cards),
            resume=min((card.resume for card in cards), key=resumes.index),
            instances=sorted({instance for card in cards for instance in card.instances}),
        )

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
