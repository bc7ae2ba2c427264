"""The fleet's decisions: never an illegal state, nobody in two places, nobody starved."""

from __future__ import annotations

from collections import Counter

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spot.engines.base import Resume
from spot.errors import EngineFailed, EngineUnavailable
from spot.failover_policy import FailoverPolicy
from spot.fleet_commands import Command, Fail, Kill, Retire, Start, Stop
from spot.fleet_records import IllegalTransition, Live
from spot.fleet_state import FleetState
from spot.generation import Generation, SamplingParams
from spot.pace import stall_limit_s

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
SEEDED = SamplingParams(max_tokens=100, seed=1)


def generation(
    name: str,
    *,
    sampling: SamplingParams = GREEDY,
    priority: int = 0,
    head_start_s: float | None = None,
) -> Generation:
    return Generation(
        name,
        [ord(c) for c in name],
        sampling,
        priority=priority,
        head_start_s=head_start_s,
    )


def state_with(
    *seats: int, policy: FailoverPolicy | None = None, resume: Resume = "exact"
) -> FleetState:
    state = FleetState(policy or FailoverPolicy(lookahead=0.0))
    for index, num_seats in enumerate(seats):
        state.add(f"p{index}")
        state.ready(f"p{index}", num_seats=num_seats, block_size=4, resume=resume, now_s=0.0)
    return state


def starts(commands: list[Command]) -> list[tuple[str, str]]:
    return [(c.live.generation.id, c.pipeline_id) for c in commands if isinstance(c, Start)]


def emit(state: FleetState, live: Live, num_tokens: int, now_s: float) -> list[Command]:
    live.output += [7] * num_tokens
    return state.progressed(live, num_tokens, now_s)


def test_nothing_is_taken_while_no_pipeline_serves() -> None:
    state = FleetState()
    state.add("p")
    with pytest.raises(EngineUnavailable):
        state.submit(generation("g"), 0.0)


def begun(name: str, *, sampling: SamplingParams) -> Generation:
    return Generation(name, [1, 2, 3], sampling, output_token_ids=[7, 7])


def test_output_from_an_earlier_life_goes_where_it_is_continued_exactly() -> None:
    state = state_with(1, resume="prompt")
    state.add("exact")
    state.ready("exact", num_seats=2, block_size=4, resume="exact", now_s=0.0)
    for index in range(2):
        given = starts(state.submit(begun(f"g{index}", sampling=SEEDED), 0.0))
        assert given == [(f"g{index}", "exact")]


def test_output_from_an_earlier_life_that_nobody_continues_exactly_fails_at_once() -> None:
    state = state_with(1, resume="prompt")
    (failed,) = state.submit(begun("g", sampling=SEEDED), 0.0)
    assert isinstance(failed, Fail)
    assert "can go on exactly" in failed.error.message
    assert not state.lives
    assert starts(state.submit(begun("h", sampling=GREEDY), 0.0)) == [("h", "p0")]


def test_output_from_an_earlier_life_moves_along() -> None:
    state = state_with(1, 1)
    state.submit(begun("g", sampling=SEEDED), 0.0)
    live = state.lives["g"]
    emit(state, live, 3, 0.1)
    assert live.pipeline_id is not None
    (moved,) = (
        command
        for command in state.lost(live.pipeline_id, "gone", 0.2)
        if isinstance(command, Start)
    )
    assert moved.live.remaining.output_token_ids == [7] * 5


@pytest.mark.parametrize(
    ("path", "illegal"),
    [(["drain"], "ready"), (["remove"], "ready"), (["remove"], "drain")],
)
def test_pipelines_do_not_come_back_from_where_they_went(path: list[str], illegal: str) -> None:
    state = state_with(1)
    state.submit(generation("g"), 0.0)

    def do(step: str) -> None:
        if step == "drain":
            state.drain("p0", cause="x", deadline_s=None, now_s=0.0)
        elif step == "remove":
            state.remove("p0", 0.0)
        else:
            state.ready("p0", num_seats=1, block_size=4, resume="exact", now_s=0.0)

    for step in path:
        do(step)
    with pytest.raises(IllegalTransition):
        do(illegal)


def test_a_stalled_pipeline_is_killed_and_its_generations_move() -> None:
    state = state_with(4, 4)
    state.set_weight("p1", 1e-9)
    for index in range(3):
        state.submit(generation(f"g{index}"), 0.0)
    stalled = state.pipelines["p0"]
    assert len(stalled.legs) == 3
    limit_s = stall_limit_s(stalled, state.policy)
    assert not any(isinstance(c, Kill) for c in state.tick(limit_s - 0.1))
    commands = state.tick(limit_s + 0.1)
    assert [c.pipeline_id for c in commands if isinstance(c, Kill)] == ["p0"]
    assert {place for _, place in starts(commands)} == {"p1"}
    assert stalled.state == "starting"


def test_an_idle_pipeline_owes_nothing() -> None:
    state = state_with(4)
    assert state.tick(1e6) == []
    state.submit(generation("g"), 1e6)
    assert state.tick(1e6 + 1) == []


def test_a_suspect_that_waits_for_its_turn_is_not_given_up() -> None:
    policy = FailoverPolicy(backoff_s=0.0, no_capacity_timeout_s=10.0)
    state = state_with(8, policy=policy)
    for name in ("poison", "other"):
        state.submit(generation(name), 0.0)
    for _ in range(2):
        state.lost("p0", "crash", 1.0)
        state.ready("p0", num_seats=8, block_size=4, resume="exact", now_s=1.0)
    for second in range(2, 40):
        state.pipelines["p0"].progress_s = float(second)
        assert not any(isinstance(c, Fail) for c in state.tick(float(second)))
    assert list(state.pipelines["p0"].legs) == ["poison"]
    assert state.num_waiting == 1


def test_of_two_suspects_only_one_runs_on_a_pipeline_at_a_time() -> None:
    state = state_with(8, policy=FailoverPolicy(backoff_s=0.0))
    for name in ("poison", "other"):
        state.submit(generation(name), 0.0)
    for _ in range(2):
        state.lost("p0", "crash", 1.0)
        state.ready("p0", num_seats=8, block_size=4, resume="exact", now_s=1.0)
    assert list(state.pipelines["p0"].legs) == ["poison"]
    commands = state.lost("p0", "crash", 2.0)
    failed = [c for c in commands if isinstance(c, Fail)]
    assert [c.live.generation.id for c in failed] == ["poison"]
    assert isinstance(failed[0].error, EngineFailed)
    assert starts(state.ready("p0", num_seats=8, block_size=4, resume="exact", now_s=3.0)) == [
        ("other", "p0")
    ]


def test_a_token_clears_a_generation_of_suspicion() -> None:
    state = state_with(8, policy=FailoverPolicy(backoff_s=0.0))
    state.submit(generation("g"), 0.0)
    for _ in range(20):
        emit(state, state.lives["g"], 1, 1.0)
        state.lost("p0", "crash", 1.0)
        state.ready("p0", num_seats=8, block_size=4, resume="exact", now_s=1.0)
    assert "g" in state.pipelines["p0"].legs


def test_what_cannot_go_on_exactly_ends_with_a_reason() -> None:
    state = state_with(4, 4, resume="prompt")
    for name, sampling in (("seeded", SEEDED), ("greedy", GREEDY)):
        state.submit(generation(name, sampling=sampling), 0.0)
        emit(state, state.lives[name], 1, 0.1)
    commands: list[Command] = []
    for name in ("p0", "p1"):
        if state.pipelines[name].legs:
            commands += state.leg_lost(
                next(iter(state.pipelines[name].legs.values())), "lost", "gone", 1.0
            )
    failed = {c.live.generation.id: c.error for c in commands if isinstance(c, Fail)}
    assert list(failed) == ["seeded"]
    assert "can go on exactly" in failed["seeded"].message


def test_the_breaker_closes_a_pipeline_that_only_fails_and_opens_again() -> None:
    policy = FailoverPolicy(breaker_failures=2, breaker_s=5.0, max_fruitless=100, backoff_s=0.0)
    state = state_with(4, 4, policy=policy)
    state.set_weight("p1", 1e-9)
    for name in ("f", "g"):
        assert starts(state.submit(generation(name), 1.0)) == [(name, "p0")]
        moved = state.leg_lost(state.lives[name], "lost", "broken", 1.0)
        assert starts(moved) == [(name, "p1")]
    assert starts(state.submit(generation("h"), 2.0)) == [("h", "p1")]
    assert starts(state.submit(generation("i"), 7.0)) == [("i", "p0")]


def test_a_pipeline_that_refuses_every_try_is_no_capacity() -> None:
    state = state_with(2, policy=FailoverPolicy(no_capacity_timeout_s=10.0))
    commands = state.submit(generation("g"), 0.0)
    now_s = 0.0
    num_tries = 0
    while state.lives:
        for command in commands:
            if isinstance(command, Start):
                num_tries += 1
                state.leg_lost(command.live, "refused", "the key is revoked", now_s)
        now_s += 0.25
        assert now_s < 30, "it is tried without end"
        commands = state.tick(now_s)
    assert now_s >= 10
    assert num_tries > 5


def test_a_full_pipeline_that_refuses_is_waited_for() -> None:
    state = state_with(2, policy=FailoverPolicy(no_capacity_timeout_s=10.0, lookahead=0.0))
    busy = starts(state.submit(generation("busy"), 0.0))
    assert busy == [("busy", "p0")]
    state.submit(generation("g"), 0.0)
    now_s = 0.0
    while now_s < 60:
        if state.lives["g"].pipeline_id == "p0":
            state.leg_lost(state.lives["g"], "refused", "too many requests", now_s)
        emit(state, state.lives["busy"], 1, now_s)
        now_s += 0.25
        state.tick(now_s)
        assert "g" in state.lives


def test_weights_follow_what_is_seen() -> None:
    state = state_with(4, 4)
    for index in range(8):
        state.submit(generation(f"g{index}"), 0.0)
    for second in range(1, 30):
        for pipeline, num_tokens in (("p0", 20), ("p1", 10)):
            for live in list(state.pipelines[pipeline].legs.values()):
                emit(state, live, num_tokens, float(second))
        state.tick(float(second))
    fast, slow = state.pipelines["p0"], state.pipelines["p1"]
    assert fast.correction / slow.correction == pytest.approx(2.0, rel=0.1)


def test_a_head_start_counts_like_an_earlier_arrival() -> None:
    """Among those of one priority; plain ones beside them keep the order in which they came."""
    state = state_with(1)
    for name in ("running", "ahead"):
        state.submit(generation(name), 0.0)
    order = []
    for now_s, name, head_start_s in (
        (1.0, "plain", None),
        (2.0, "later", -3.0),
        (3.0, "earlier", 2.5),
        (4.0, "plain too", None),
    ):
        state.submit(generation(name, head_start_s=head_start_s), now_s)
    state.submit(generation("urgent", priority=-1, head_start_s=-100.0), 5.0)
    for name in ("running", "ahead", "urgent", "earlier", "plain"):
        order += [started for started, _ in starts(state.finished(state.lives[name], 6.0))]
    assert order == ["urgent", "earlier", "plain", "plain too", "later"]


def test_what_waits_can_be_ranked_anew() -> None:
    state = state_with(1)
    for name in ("running", "ahead"):
        state.submit(generation(name), 0.0)
    for name in ("a", "b"):
        state.submit(generation(name, head_start_s=0.0), 1.0)
    state.reprioritise("b", 0.5)
    state.reprioritise("unknown", 0.0)
    state.check_invariants()
    assert starts(state.finished(state.lives["running"], 2.0)) == [("b", "p0")]


@pytest.mark.parametrize(
    ("head_start_s", "then_s", "step_s", "max_tokens", "yields"),
    [
        (0.0, 0.0, 0.0, 100, False),  # within the margin
        (0.0, -1.0, 0.0, 100, True),
        (0.0, -1.0, 0.5, 100, False),  # a sub-node takes longer than that
        (0.0, -3.0, 0.5, 100, True),
        (0.0, -1.0, 0.0, 44, False),  # it ends within a sub-node
        (0.0, -1.0, 0.0, 46, True),
        (None, -1.0, 0.0, 100, False),  # a plain one keeps its seat
    ],
)
def test_a_ranked_generation_yields_its_seat_between_two_sub_nodes(
    head_start_s: float | None, then_s: float, step_s: float, max_tokens: int, yields: bool
) -> None:
    policy = FailoverPolicy(lookahead=0.0, subnode_tokens=4)
    state = state_with(1, policy=policy)
    state.pipelines["p0"].step_s = step_s
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    state.submit(generation("running", sampling=sampling, head_start_s=head_start_s), 10.0)
    live = state.lives["running"]
    emit(state, live, 1, 10.1)
    state.submit(generation("next", head_start_s=0.5), 10.2)
    state.submit(generation("waiting", head_start_s=0.6), 10.2)
    state.reprioritise("running", then_s)
    commands = emit(state, live, 40, 10.3)
    assert any(isinstance(one, Stop) for one in commands) == yields


def test_what_the_pipelines_take_at_once_follows_their_states() -> None:
    state = state_with(8, 16, policy=FailoverPolicy())
    assert state.num_admitted == 9 + 18
    state.add("starting")
    state.drain("p0", cause="drained", deadline_s=None, now_s=0.0)
    assert state.num_admitted == 18
    state.lost("p1", "gone", 1.0)
    assert state.num_admitted == 0


class Fleets(RuleBasedStateMachine):
    """Anything may happen, in any order."""

    def __init__(self) -> None:
        super().__init__()
        policy = FailoverPolicy(
            max_migrations=10_000, no_capacity_timeout_s=50.0, subnode_tokens=2, backoff_s=0.1
        )
        self.state = FleetState(policy)
        self.now_s = 0.0
        self.number = 0
        self.where: dict[str, str] = {}
        self.ended: Counter[str] = Counter()
        self.born: set[str] = set()
        self.engines: dict[str, bool] = {}

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Start(live, pipeline_id):
                    name = live.generation.id
                    assert name not in self.where, "started in two places"
                    assert self.state.pipelines[pipeline_id].state in (
                        "serving",
                        "starting",
                        "gone",
                    )
                    self.where[name] = pipeline_id
                case Stop(live, pipeline_id):
                    assert self.where.pop(live.generation.id) == pipeline_id
                case Fail(live):
                    self.ended[live.generation.id] += 1
                case Retire(pipeline_id):
                    assert pipeline_id not in self.where.values()

    def running(self) -> list[Live]:
        return [live for live in self.state.lives.values() if live.pipeline_id is not None]

    @rule(weight=st.floats(0.1, 10.0))
    def add(self, weight: float) -> None:
        self.number += 1
        self.state.add(f"p{self.number}", weight=weight)

    @rule(data=st.data(), seats=st.integers(1, 3))
    def ready(self, data: st.DataObject, seats: int) -> None:
        names = [p.id for p in self.state.pipelines.values() if p.state == "starting"]
        if names:
            self.carry_out(
                self.state.ready(
                    data.draw(st.sampled_from(names)),
                    num_seats=seats,
                    block_size=2,
                    resume="exact",
                    now_s=self.now_s,
                )
            )

    @rule(priority=st.integers(0, 2), head_start_s=st.none() | st.floats(-5.0, 5.0))
    def submit(self, priority: int, head_start_s: float | None) -> None:
        self.number += 1
        given = generation(f"g{self.number}", priority=priority, head_start_s=head_start_s)
        name = given.id
        try:
            commands = self.state.submit(given, self.now_s)
        except EngineUnavailable:
            return
        self.born.add(name)
        self.carry_out(commands)

    @precondition(lambda self: self.state.lives)
    @rule(data=st.data(), head_start_s=st.floats(-5.0, 50.0))
    def reprioritise(self, data: st.DataObject, head_start_s: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.state.lives)))
        self.state.reprioritise(name, head_start_s)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), num_tokens=st.integers(1, 3))
    def token(self, data: st.DataObject, num_tokens: int) -> None:
        live = data.draw(st.sampled_from(self.running()))
        self.carry_out(emit(self.state, live, num_tokens, self.now_s))

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.running()))
        del self.where[live.generation.id]
        self.ended[live.generation.id] += 1
        self.carry_out(self.state.finished(live, self.now_s))

    @precondition(lambda self: self.running())
    @rule(data=st.data(), refused=st.booleans())
    def leg_lost(self, data: st.DataObject, refused: bool) -> None:
        live = data.draw(st.sampled_from(self.running()))
        why = "refused" if refused else "lost"
        self.carry_out(self.state.leg_lost(live, why, "x", self.now_s))  # type: ignore[arg-type]

    @precondition(lambda self: self.state.lives)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.state.lives)))
        self.ended[name] += 1
        self.carry_out(self.state.cancelled(name, self.now_s))

    @precondition(lambda self: self.state.pipelines)
    @rule(data=st.data(), how=st.sampled_from(["lost", "drain", "remove"]))
    def lose(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.state.pipelines)))
        if how == "lost":
            self.carry_out(self.state.lost(name, "crash", self.now_s))
        elif how == "remove":
            self.carry_out(self.state.remove(name, self.now_s))
        elif self.state.pipelines[name].state != "gone":
            deadline_s = self.now_s + 10
            self.carry_out(
                self.state.drain(name, cause="x", deadline_s=deadline_s, now_s=self.now_s)
            )
        if self.state.pipelines[name].state == "gone":
            self.state.forget(name)

    @rule(elapsed_s=st.floats(0.0, 20.0))
    def time_passes(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s
        self.carry_out(self.state.tick(self.now_s))

    @invariant()
    def everything_is_in_one_place(self) -> None:
        self.state.check_invariants()
        running = {live.generation.id: live.pipeline_id for live in self.running()}
        assert running == self.where
        assert max(self.ended.values(), default=1) == 1
        assert self.born - set(self.ended) == set(self.state.lives)

    @invariant()
    def no_seat_is_empty_while_somebody_could_have_it(self) -> None:
        able = [
            p
            for p in self.state.pipelines.values()
            if p.state == "serving" and not p.legs and p.closed_until_s <= self.now_s
        ]
        if able:
            waiting = (live for live in self.state.lives.values() if live.pipeline_id is None)
            assert all(live.not_before_s > 0 for live in waiting)


TestFleets = Fleets.TestCase
TestFleets.settings = hypothesis.settings(max_examples=150, stateful_step_count=40, deadline=None)
