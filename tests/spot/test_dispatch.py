"""Who waits, and who goes where next."""

from __future__ import annotations

import pytest

from spot.dispatch import Dispatcher
from spot.engines.base import Resume
from spot.errors import EngineUnavailable
from spot.failover_policy import FailoverPolicy
from spot.fleet_commands import Fail, Start
from spot.fleet_records import Live, Pipeline
from spot.generation import Generation, SamplingParams
from spot.routing import Router

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
SEEDED = SamplingParams(max_tokens=100, seed=1)


class Yard:
    """A dispatcher with serving pipelines p0, p1, ..., of which p0 is chosen first."""

    def __init__(
        self, *seats: int, policy: FailoverPolicy | None = None, resume: Resume = "exact"
    ) -> None:
        self.pipelines = {
            f"p{i}": Pipeline(f"p{i}", 10.0 ** (-9 * i), "serving", n, resume=resume)
            for i, n in enumerate(seats)
        }
        self.dispatcher = Dispatcher(
            policy or FailoverPolicy(lookahead=0.0), Router(), self.pipelines
        )
        self.num_arrived = 0
        self.lives: dict[str, Live] = {}

    def wait(
        self,
        name: str,
        *,
        priority: int = 0,
        num_prompt: int = 1,
        output: tuple[int, ...] = (),
        sampling: SamplingParams = GREEDY,
        num_fruitless: int = 0,
        not_before_s: float = 0.0,
    ) -> Live:
        self.num_arrived += 1
        prompt = [self.num_arrived] * num_prompt
        live = Live(
            Generation(name, prompt, sampling, priority=priority),
            self.num_arrived,
            output=list(output),
            num_migrations=int(bool(output)),
            num_fruitless=num_fruitless,
            not_before_s=not_before_s,
        )
        self.lives[name] = live
        self.dispatcher.enqueue(live)
        return live

    def go(self, now_s: float = 0.0) -> list[tuple[str, str]]:
        commands = self.dispatcher.dispatch(now_s)
        self.dispatcher.check_invariants()
        assert all(isinstance(command, Start) for command in commands)
        return [(c.live.generation.id, c.pipeline_id) for c in commands if isinstance(c, Start)]


def test_one_more_than_its_seats_is_given_to_a_pipeline_and_the_rest_waits() -> None:
    yard = Yard(2)
    for index in range(5):
        yard.wait(f"g{index}")
    assert [name for name, _ in yard.go()] == ["g0", "g1", "g2"]
    assert yard.dispatcher.num_waiting == 2
    yard.pipelines["p0"].unseat(yard.lives["g0"])
    assert yard.go() == [("g3", "p0")]


def test_the_most_urgent_goes_first_and_equals_in_order() -> None:
    yard = Yard(0)
    for index, priority in enumerate([0, 0, 5, 1, -1]):
        yard.wait(f"g{index}", priority=priority)
    order = []
    for _ in range(5):
        ((name, _),) = yard.go()
        order.append(name)
        yard.pipelines["p0"].unseat(yard.lives[name])
    assert order == ["g4", "g0", "g1", "g3", "g2"]


def test_whoever_left_is_not_started() -> None:
    yard = Yard(4)
    yard.dispatcher.withdraw(yard.wait("g"))
    assert yard.go() == []


def test_a_closed_pipeline_gets_nothing_until_its_time_is_over() -> None:
    yard = Yard(4)
    yard.pipelines["p0"].closed_until_s = 5.0
    yard.wait("g")
    assert yard.go(4.9) == []
    assert yard.go(5.0) == [("g", "p0")]


def test_backing_off_lets_the_next_one_pass() -> None:
    yard = Yard(4)
    yard.wait("lost", not_before_s=5.0)
    yard.wait("new")
    assert yard.go(1.0) == [("new", "p0")]
    assert yard.go(5.0) == [("lost", "p0")]


def test_the_pipeline_that_lost_it_is_the_last_resort() -> None:
    yard = Yard(1, 1)
    yard.wait("g").avoids.add("p0")
    assert yard.go() == [("g", "p1")]
    yard.wait("h").avoids |= {"p0", "p1"}
    assert yard.go() == [("h", "p0")]


def test_output_goes_where_it_is_continued_exactly() -> None:
    yard = Yard(4, 4, resume="prompt")
    yard.pipelines["p1"].resume = "exact"
    yard.wait("seeded", output=(7,), sampling=SEEDED)
    yard.wait("greedy", output=(7,))
    assert yard.go() == [("seeded", "p1"), ("greedy", "p0")]


def test_migrated_prompts_do_not_stampede_one_survivor() -> None:
    yard = Yard(64, policy=FailoverPolicy(resumed_prefill_budget=1000))
    for index in range(4):
        yard.wait(f"g{index}", num_prompt=400, output=(7,))
    assert [name for name, _ in yard.go()] == ["g0", "g1"]
    yard.lives["g0"].num_leg_tokens = 1
    assert [name for name, _ in yard.go()] == ["g2"]


def test_of_two_suspects_only_one_runs_on_a_pipeline_at_a_time() -> None:
    yard = Yard(8)
    for name in ("poison", "other"):
        yard.wait(name, num_fruitless=2).leg = 2
    assert yard.go() == [("poison", "p0")]
    yard.pipelines["p0"].unseat(yard.lives["poison"])
    assert yard.go() == [("other", "p0")]


def test_patience_ends_only_where_nothing_could_take_it() -> None:
    yard = Yard(4, policy=FailoverPolicy(no_capacity_timeout_s=10.0))
    pipeline = yard.pipelines["p0"]
    pipeline.state = "starting"
    live = yard.wait("g", output=(7,), sampling=SEEDED)
    assert yard.go(0.0) == []
    pipeline.state, pipeline.closed_until_s = "serving", 100.0
    pipeline.seat(yard.wait("other"), 50.0)
    yard.dispatcher.withdraw(yard.lives["other"])
    assert yard.go(50.0) == []  # it only waits for its turn: patience begins anew
    pipeline.resume = "prompt"
    assert yard.go(51.0) == []
    assert yard.go(60.9) == []
    (failed,) = yard.dispatcher.dispatch(61.0)
    assert isinstance(failed, Fail)
    assert failed.live is live
    assert isinstance(failed.error, EngineUnavailable)
    assert yard.dispatcher.num_waiting == 0


@pytest.mark.parametrize(("not_before_s", "urgent"), [(0.0, -1), (9.0, None)])
def test_whoever_may_start_now_and_finds_no_room_wants_a_seat(
    not_before_s: float, urgent: int | None
) -> None:
    yard = Yard(1)
    for name in ("g", "h"):
        yard.wait(name)
        yard.go()
        yard.lives[name].num_leg_tokens = 1
    yard.wait("urgent", priority=-1, not_before_s=not_before_s)
    assert yard.go(1.0) == []
    found = yard.dispatcher.most_urgent_without_seat(yard.pipelines["p0"], 1.0)
    assert (None if found is None else found.generation.priority) == urgent
