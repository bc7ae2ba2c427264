"""Equal deterministic generations run once, and nobody notices but the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot.engines.base import DeltaSink
from spot.errors import EngineFailed, EngineUnavailable, ShuntyardError
from spot.generation import Generation, SamplingParams, TokenDelta
from spot.kept_outputs import KeptOutputs
from spot.shared_generations import SharedGenerations


@dataclass
class Heard:
    """A sink. Appends to what it gets, as the gateway does."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    error: ShuntyardError | None = None
    _merged: TokenDelta | None = None

    def on_delta(self, delta: TokenDelta) -> None:
        assert self.finish is None
        if self._merged is None:
            self._merged = delta
        else:
            self._merged.merge(delta)
        self.tokens = list(self._merged.token_ids)
        self.finish = delta.finish_reason

    def on_error(self, error: ShuntyardError) -> None:
        self.error = error


class Engine:
    """Does what a test says."""

    def __init__(self) -> None:
        self.running: dict[str, DeltaSink] = {}
        self.num_submitted = 0
        self.refuses = False

    def submit(self, generation: Generation, sink: DeltaSink) -> None:
        if self.refuses:
            raise EngineUnavailable("gone")
        assert generation.id not in self.running
        self.num_submitted += 1
        self.running[generation.id] = sink

    def abort(self, generation_id: str) -> None:
        self.running.pop(generation_id, None)

    def say(self, generation_id: str, *token_ids: int, finish: Any = None) -> None:
        sink = self.running[generation_id]
        if finish is not None:
            del self.running[generation_id]
        sink.on_delta(TokenDelta(list(token_ids), finish))


def generation(name: str, **fields: Any) -> Generation:
    sampling = SamplingParams(max_tokens=9, temperature=0)
    return Generation(**{"id": name, "prompt_token_ids": [1, 2], "sampling": sampling, **fields})


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def shared(engine: Engine) -> SharedGenerations:
    return SharedGenerations(engine)  # type: ignore[arg-type]


def test_who_comes_later_hears_all_and_each_token_once(
    engine: Engine, shared: SharedGenerations
) -> None:
    first, second, third = Heard(), Heard(), Heard()
    assert not shared.submit(generation("a"), first)
    assert shared.submit(generation("b"), second)
    engine.say("a", 5, 6)
    engine.say("a", 7)
    assert shared.submit(generation("c"), third)
    assert third.tokens == [5, 6, 7]
    engine.say("a", 8, finish="stop")
    for heard in (first, second, third):
        assert (heard.tokens, heard.finish) == ([5, 6, 7, 8], "stop")
    assert (engine.num_submitted, shared.num_shared) == (1, 2)
    assert not shared.submit(generation("d"), Heard())


def test_the_first_may_leave_and_the_last_ends_it(
    engine: Engine, shared: SharedGenerations
) -> None:
    second = Heard()
    shared.submit(generation("a"), Heard())
    shared.submit(generation("b"), second)
    shared.abort("a")
    engine.say("a", 5)
    assert second.tokens == [5]
    shared.abort("b")
    assert not engine.running
    assert not shared.submit(generation("c"), Heard())
    assert engine.running.keys() == {"c"}


def test_a_failure_is_everybodys(engine: Engine, shared: SharedGenerations) -> None:
    both = [Heard(), Heard()]
    for name, heard in zip("ab", both, strict=True):
        shared.submit(generation(name), heard)
    engine.running.pop("a").on_error(EngineFailed("x"))
    assert all(isinstance(heard.error, EngineFailed) for heard in both)
    assert not shared.submit(generation("c"), Heard())


def test_what_the_engine_refuses_leaves_nothing(engine: Engine, shared: SharedGenerations) -> None:
    engine.refuses = True
    with pytest.raises(EngineUnavailable):
        shared.submit(generation("a"), Heard())
    engine.refuses = False
    assert not shared.submit(generation("b"), Heard())
    assert engine.running.keys() == {"b"}


def sampled(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 9, "temperature": 0, **fields})


@pytest.mark.parametrize(
    ("fields", "is_shared"),
    [
        ({}, True),
        ({"via": ["x"]}, True),
        ({"priority": 1}, True),
        ({"priority": -1}, False),
        ({"prompt_token_ids": [1, 3]}, False),
        ({"cache_salt": "s"}, False),
        ({"sampling": sampled(max_tokens=8)}, False),
        ({"sampling": sampled(logprobs=1)}, False),
        ({"sampling": sampled(stop_token_ids=[3])}, False),
        ({"output_token_ids": [5]}, False),
        ({"reasoning_ended": True}, False),
    ],
)
def test_only_what_an_engine_could_not_tell_apart_is_shared(
    shared: SharedGenerations, fields: dict[str, Any], is_shared: bool
) -> None:
    shared.submit(generation("a"), Heard())
    sharing = shared.submit(generation("b", **fields), Heard())
    assert sharing == ("inflight" if is_shared else None)


@pytest.mark.parametrize(
    ("sampling", "is_shared"),
    [
        (SamplingParams(max_tokens=9, temperature=0.7), False),
        (SamplingParams(max_tokens=9, temperature=0.7, seed=0), True),
    ],
)
def test_samples_are_shared_with_a_seed_only(
    shared: SharedGenerations, sampling: SamplingParams, is_shared: bool
) -> None:
    shared.submit(generation("a", sampling=sampling), Heard())
    sharing = shared.submit(generation("b", sampling=sampling), Heard())
    assert sharing == ("inflight" if is_shared else None)


def test_every_field_of_a_generation_is_compared_or_known_not_to_matter() -> None:
    """A new field must be thought about: by default it keeps generations apart."""
    known = {"id", "priority", "via"}
    for name in Generation.__struct_fields__:
        engine = Engine()
        shared = SharedGenerations(engine)  # type: ignore[arg-type]
        shared.submit(generation("a"), Heard())
        other = generation("b")
        if name in known:
            continue
        value = {"prompt_token_ids": [9], "sampling": sampled(seed=1), "output_token_ids": [9]}
        changed = msgspec.structs.replace(other, **{name: value.get(name, "x")})
        assert not shared.submit(changed, Heard()), name


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def kept() -> KeptOutputs:
    return KeptOutputs(ttl_s=10, max_bytes=10_000)


@pytest.fixture
def keeping(engine: Engine, kept: KeptOutputs, clock: Clock) -> SharedGenerations:
    return SharedGenerations(engine, kept, clock=clock)  # type: ignore[arg-type]


def test_an_output_that_ended_by_itself_is_replayed_for_a_time(
    engine: Engine, keeping: SharedGenerations, clock: Clock
) -> None:
    first, second = Heard(), Heard()
    keeping.submit(generation("a"), first)
    engine.say("a", 5, 6)
    engine.say("a", 7, finish="stop")
    clock.now_s += 10
    assert keeping.submit(generation("b"), second) == "cache"
    assert (second.tokens, second.finish) == (first.tokens, first.finish) == ([5, 6, 7], "stop")
    assert (engine.num_submitted, keeping.num_shared) == (1, 1)
    clock.now_s += 1
    assert keeping.submit(generation("c"), Heard()) is None
    assert engine.num_submitted == 2


def test_all_that_was_said_is_replayed_though_the_first_has_left(
    engine: Engine, keeping: SharedGenerations
) -> None:
    keeping.submit(generation("a"), Heard())
    keeping.submit(generation("b"), Heard())
    engine.say("a", 5)
    keeping.abort("a")
    engine.say("a", 6, finish="stop")
    late = Heard()
    assert keeping.submit(generation("c"), late) == "cache"
    assert late.tokens == [5, 6]


def test_even_the_most_urgent_takes_what_is_there(
    engine: Engine, keeping: SharedGenerations
) -> None:
    keeping.submit(generation("a"), Heard())
    engine.say("a", 5, finish="stop")
    assert keeping.submit(generation("b", priority=-9), Heard()) == "cache"


@pytest.mark.parametrize("end", ["length", "failure", "left", "replaced"])
def test_what_was_cut_or_may_be_another_now_is_not_replayed(
    engine: Engine, keeping: SharedGenerations, kept: KeptOutputs, end: str
) -> None:
    keeping.submit(generation("a"), Heard())
    engine.say("a", 5)
    if end == "length":
        engine.say("a", 6, finish="length")
    elif end == "failure":
        engine.running.pop("a").on_error(EngineFailed("x"))
    elif end == "left":
        keeping.abort("a")
    else:
        kept.clear()
        engine.say("a", 6, finish="stop")
    assert keeping.submit(generation("b"), Heard()) is None
    assert len(kept) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "s"},
        {"prompt_token_ids": [1, 3]},
        {"sampling": sampled(logprobs=1)},
        {"output_token_ids": [5]},
        {"sampling": SamplingParams(max_tokens=9, temperature=0.7)},
    ],
)
def test_only_what_an_engine_could_not_tell_apart_is_replayed(
    engine: Engine, keeping: SharedGenerations, fields: dict[str, Any]
) -> None:
    keeping.submit(generation("a"), Heard())
    engine.say("a", 5, finish="stop")
    assert keeping.submit(generation("b", **fields), Heard()) is None


def test_a_replay_can_be_aborted_like_any_other(engine: Engine, keeping: SharedGenerations) -> None:
    keeping.submit(generation("a"), Heard())
    engine.say("a", 5, finish="stop")
    keeping.submit(generation("b"), Heard())
    keeping.abort("b")
    assert keeping.submit(generation("c"), Heard()) == "cache"


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "say", "finish", "fail"]), st.integers(0, 3)),
    max_size=60,
)


@given(steps=STEPS)
def test_whatever_happens_each_hears_the_whole_and_nothing_leaks(steps: list[Step]) -> None:
    """Three kinds of work; who shares one has heard the same whenever it is looked at."""
    engine = Engine()
    shared = SharedGenerations(engine)  # type: ignore[arg-type]
    open_: dict[str, tuple[int, Heard]] = {}
    said: dict[int, list[int]] = {}

    def end(kind: int) -> list[Heard]:
        gone = [name for name, (own, _) in open_.items() if own == kind]
        said.pop(kind, None)
        return [open_.pop(name)[1] for name in gone]

    def of_kind(kind: int) -> list[str]:
        return [name for name, (own, _) in open_.items() if own == kind]

    actions: dict[str, Callable[[int, int], None]] = {}

    def join(number: int, kind: int) -> None:
        name = f"g{number}"
        heard = Heard()
        shared.submit(generation(name, prompt_token_ids=[kind]), heard)
        open_[name] = (kind, heard)
        said.setdefault(kind, [])

    def leave(number: int, kind: int) -> None:
        if names := of_kind(kind):
            name = names[number % len(names)]
            shared.abort(name)
            del open_[name]
            if not of_kind(kind):
                said.pop(kind, None)

    def leader(kind: int) -> str | None:
        groups = {group.id for name, group in shared._members.items() if name in of_kind(kind)}
        assert len(groups) <= 1
        return next(iter(groups), None)

    def say(number: int, kind: int) -> None:
        if (name := leader(kind)) is not None:
            said[kind].append(number)
            engine.say(name, number)

    def finish(number: int, kind: int) -> None:
        if (name := leader(kind)) is not None:
            expected = [*said[kind], number]
            engine.say(name, number, finish="stop")
            assert all((one.tokens, one.finish) == (expected, "stop") for one in end(kind))

    def fail(number: int, kind: int) -> None:
        if (name := leader(kind)) is not None:
            engine.running.pop(name).on_error(EngineFailed("x"))
            assert all(one.error is not None for one in end(kind))

    actions.update(join=join, leave=leave, say=say, finish=finish, fail=fail)
    for number, (action, kind) in enumerate(steps):
        actions[action](number, kind)
        for own, heard in open_.values():
            assert heard.tokens == said[own]
        assert len(engine.running) == len({own for own, _ in open_.values()})
    for name in list(open_):
        shared.abort(name)
    assert not engine.running
    assert not shared._members
    assert not shared._groups
