"""Who waits for a pipeline, and which one takes whom next: pure decisions."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping

from spot.errors import EngineUnavailable
from spot.failover_policy import FailoverPolicy
from spot.fleet_commands import Fail, Start
from spot.fleet_records import Live, Pipeline
from spot.routing import Router


class Dispatcher:
    """The generations that wait, in order, and the choice of a pipeline for each.

    pipelines: those of the fleet, as they are at each moment. It gives out their seats, and changes
        nothing else of them.
    """

    def __init__(
        self, policy: FailoverPolicy, router: Router, pipelines: Mapping[str, Pipeline]
    ) -> None:
        self._policy = policy
        self._router = router
        self._pipelines = pipelines
        self._waiting: list[tuple[tuple[int, float, int], Live]] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def waiting(self) -> Iterator[Live]:
        """Most urgent first."""
        return (live for _, live in self._waiting)

    def enqueue(self, live: Live) -> None:
        insort(self._waiting, (live.rank, live))

    def withdraw(self, live: Live) -> None:
        self._waiting.remove((live.rank, live))

    def forget(self, pipeline_id: str) -> None:
        """A pipeline's caches are lost: no prefix draws anything there any more."""
        self._router.forget(pipeline_id)

    def dispatch(self, now_s: float) -> list[Start | Fail]:
        """Start what waits, most urgent first, wherever there is room.

        Whoever has waited too long for a pipeline that could take it waits no more, and fails.
        """
        if not self._waiting:
            return []
        commands: list[Start | Fail] = []
        open_pipelines = [p for p in self._pipelines.values() if is_open(p, now_s)]
        for _, live in list(self._waiting):
            roomy = [p for p in open_pipelines if self.has_room(p)]
            if not roomy and open_pipelines:
                break
            if live.not_before_s > now_s:
                continue
            candidates = self._candidates(live, open_pipelines)
            if candidates:
                self.withdraw(live)
                commands.append(self._start(live, candidates, now_s))
            else:
                commands += self._strand(live, now_s)
        return commands

    def has_room(self, pipeline: Pipeline) -> bool:
        return len(pipeline.legs) < self.limit(pipeline)

    def limit(self, pipeline: Pipeline) -> int:
        """Generations that are given to a pipeline at once."""
        return pipeline.num_seats + max(1, int(pipeline.num_seats * self._policy.lookahead))

    def most_urgent_without_seat(self, pipeline: Pipeline, now_s: float) -> Live | None:
        """Whoever would take a seat of this pipeline first, or None."""
        found: list[Live] = []
        if len(pipeline.legs) > pipeline.num_seats:
            found += [other for other in pipeline.legs.values() if not other.num_leg_tokens]
        if pipeline.state == "serving" and self._waiting and not self.has_room(pipeline):
            found += [live for _, live in self._waiting[:1] if live.not_before_s <= now_s]
        return min(found, key=lambda live: live.rank, default=None)

    def check_invariants(self) -> None:
        """For tests."""
        assert self._waiting == sorted(self._waiting, key=lambda item: item[0])
        assert all(live.pipeline_id is None for live in self.waiting())

    def _candidates(self, live: Live, pipelines: list[Pipeline]) -> list[Pipeline]:
        """Pipelines with room for it; one that has just lost it only if there is no other."""
        able = [p for p in pipelines if self._may_take(p, live)]
        others = [p for p in able if p.id not in live.avoids]
        return [p for p in others or able if self.has_room(p)]

    def _may_take(self, pipeline: Pipeline, live: Live) -> bool:
        if not live.leg and not live.output:
            return True
        if not live.can_go_on_at(pipeline):
            return False
        is_suspect = self._policy.is_suspect
        if is_suspect(live.num_fruitless) and any(
            is_suspect(other.num_fruitless) for other in pipeline.legs.values()
        ):
            return False  # of two suspects at once nobody could say which it was
        pending = sum(other.num_context for other in _recomputing(pipeline))
        return not pending or pending + live.num_context <= self._policy.resumed_prefill_budget

    def _start(self, live: Live, candidates: list[Pipeline], now_s: float) -> Start:
        chosen = self._pipelines[
            self._router.pick(
                live.generation.prompt_token_ids,
                weights={p.id: p.weight * p.correction for p in candidates},
                loads={p.id: p.load for p in candidates},
                salt=live.generation.cache_salt,
            )
        ]
        chosen.seat(live, now_s)
        return Start(live, chosen.id)

    def _strand(self, live: Live, now_s: float) -> list[Fail]:
        """Note that nothing could take this one, and give it up when that lasts too long.

        A pipeline that serves but is closed and has nothing to do takes no work, whatever it says:
        it refuses each try (an upstream whose key was revoked, say).
        """
        working = [
            p
            for p in self._pipelines.values()
            if p.state == "serving" and (p.legs or is_open(p, now_s))
        ]
        if any(live.can_go_on_at(p) for p in working):
            live.stranded_since_s = None  # it only waits for its turn
            return []
        if live.stranded_since_s is None:
            live.stranded_since_s = now_s
        waited_s = now_s - live.stranded_since_s
        if waited_s < self._policy.no_capacity_timeout_s:
            return []
        self.withdraw(live)
        return [Fail(live, EngineUnavailable(f"no pipeline could go on for {waited_s:.0f} s"))]


def is_open(pipeline: Pipeline, now_s: float) -> bool:
    """Whether it takes work: it serves, and its failures do not keep it closed."""
    return pipeline.state == "serving" and pipeline.closed_until_s <= now_s


def _recomputing(pipeline: Pipeline) -> Iterable[Live]:
    """Migrated generations whose context is being recomputed there."""
    return (o for o in pipeline.legs.values() if o.num_migrations and not o.num_leg_tokens)
