"""The parts of the scheduler alone: quantiles, labels, reservation, λ, ΔJ, the queue."""

from __future__ import annotations

import itertools
import random

import hypothesis
import pytest
from hypothesis import strategies as st

from workflows.scheduling.active_run import ActiveRun
from workflows.scheduling.allocation import Choice, Situation, choose, cost_s, duration_s
from workflows.scheduling.live_ticket import LiveTicket
from workflows.scheduling.load import Balance, Tail
from workflows.scheduling.messages import PlannedNode, Size, Ticket
from workflows.scheduling.parameters import SchedulerParameters
from workflows.scheduling.partition import Partition
from workflows.scheduling.ready_queue import ReadyQueue
from workflows.scheduling.reservation import Reservation
from workflows.scheduling.scale import RunningQuantile, Scale

PARAMETERS = SchedulerParameters()


@hypothesis.given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_running_quantile_is_that_of_the_last_values(values: list[float], share: float) -> None:
    quantile = RunningQuantile(share, window=10)
    for value in values:
        quantile.add(value)
    ranked = sorted(values[-10:])
    assert quantile.value == next(
        x for i, x in enumerate(ranked, 1) if i >= share * len(ranked) - 1e-9
    )


def test_the_scale_moves_in_steps() -> None:
    scale = Scale(window=64, drift=0.25)
    epochs = set()
    for index in range(1000):
        scale.add_service(10.0 if index < 500 else 100.0)
        scale.update()
        epochs.add(scale.epoch)
    assert scale.service_s == 100.0
    assert len(epochs) == 2


def run_with(name: str, remaining_s: float) -> ActiveRun:
    run = ActiveRun(name, "", 0.0, None)
    run.remaining_s = remaining_s
    return run


def test_nobody_is_long_among_few_or_equals() -> None:
    partition = Partition(PARAMETERS)
    runs = [run_with(str(index), 10.0) for index in range(20)]
    for index, run in enumerate(runs):
        partition.add(run, 1000.0 if index == 0 else 10.0)
        partition.label(run)
        if partition.count < PARAMETERS.min_long_sample:
            assert not run.is_long
    equal = Partition(PARAMETERS)
    for run in runs:
        equal.add(run, 10.0)
        assert not equal.label(run)
        assert not run.is_long


def test_labels_do_not_flap_around_the_threshold() -> None:
    partition = Partition(PARAMETERS)
    for index in range(100):
        partition.add(run_with(str(index), 0.0), 10.0 + index % 3)
    run = run_with("x", 0.0)
    partition.add(run, 20.0)
    threshold_s = partition.threshold_s
    assert threshold_s is not None
    changes = 0
    for index in range(100):
        partition.change(run, threshold_s * (1.05 if index % 2 else 0.95))
        changes += partition.label(run)
    assert changes == 1
    assert run.is_long
    partition.change(run, 0.5 * threshold_s)
    assert partition.label(run)
    assert not run.is_long


def test_statistics_of_the_partition_are_those_of_the_active_runs() -> None:
    partition, rng = Partition(SchedulerParameters(min_long_sample=1)), random.Random(1)
    runs: list[ActiveRun] = []
    for step in range(2000):
        if runs and rng.random() < 0.3:
            run = runs.pop(rng.randrange(len(runs)))
            partition.remove(run)
        elif runs and rng.random() < 0.5:
            partition.change(rng.choice(runs), rng.lognormvariate(0, 3))
        else:
            runs.append(run_with(str(step), 0.0))
            partition.add(runs[-1], rng.lognormvariate(0, 3))
    values = [run.counted_s for run in runs]
    mean = sum(values) / len(values)
    deviation = (sum((x - mean) ** 2 for x in values) / len(values)) ** 0.5
    assert partition.threshold_s == pytest.approx(mean + deviation, rel=1e-4)


@pytest.mark.parametrize(
    ("num_slots", "num_reserved"), [(1, 0), (2, 1), (3, 1), (5, 1), (6, 2), (10, 2), (64, 13)]
)
def test_a_fifth_of_the_slots_is_reserved_but_never_all(num_slots: int, num_reserved: int) -> None:
    assert Reservation(0.2).num_reserved(num_slots) == num_reserved


def test_without_a_share_nothing_is_reserved() -> None:
    reservation = Reservation(0.0)
    for _ in range(100):
        reservation.count(is_heavy=False)
    assert not reservation.is_due(num_slots=1, num_running_heavy=0)
    assert not reservation.is_due(num_slots=8, num_running_heavy=0)


def balance_after(load: float, *, relief: float = 0.0, seconds: float = 100.0) -> float:
    balance = Balance(PARAMETERS)
    balance.update(load=load, relief=relief, now_s=0.0, median_s=1.0)
    return balance.update(load=load, relief=relief, now_s=seconds, median_s=1.0)


def test_lambda_follows_the_load_and_the_tail_relieves_it() -> None:
    assert balance_after(0.0) == 0.0
    assert balance_after(1.0) == pytest.approx(0.5)
    assert balance_after(10.0) == 1.0
    assert balance_after(10.0, relief=0.4) == pytest.approx(0.6)
    assert balance_after(10.0, relief=5.0) == 0.0
    assert balance_after(10.0, seconds=0.01) == 0.0


def test_lambda_ignores_small_changes() -> None:
    balance = Balance(PARAMETERS)
    values = set()
    for index in range(1000):
        load = 1.0 + 0.05 * (index % 2)
        values.add(balance.update(load=load, relief=0.0, now_s=10.0 * index, median_s=1.0))
    assert len(values) <= 2


def test_the_tail_counts_once_it_is_far_behind_the_median() -> None:
    tail = Tail(PARAMETERS)
    for _ in range(98):
        tail.add(1.0)
    assert tail.relief == 0.0
    for _ in range(3):
        tail.add(8.0)
    assert tail.relief == pytest.approx(PARAMETERS.tail_relief)


situations = st.builds(
    lambda counts, waiting, free, busy, batch, split, overhead, item, balance: Situation(
        num_items=sum(counts),
        ends=list(itertools.accumulate(counts)),
        num_waiting=waiting,
        num_free=free,
        num_slots=free + busy,
        max_batch=batch,
        max_split=max(split, len(counts)),
        min_split=1,
        overhead_s=overhead,
        item_s=item,
        balance=balance,
    ),
    st.lists(st.integers(1, 40), min_size=1, max_size=10),
    st.integers(0, 100),
    st.integers(1, 8),
    st.integers(0, 8),
    st.integers(1, 64),
    st.integers(1, 8),
    st.floats(0, 1),
    st.floats(1e-3, 1),
    st.floats(0, 1),
)


@hypothesis.given(situations)
def test_a_choice_fits_and_a_split_wins_by_the_guard(situation: Situation) -> None:
    choice = choose(situation, PARAMETERS)
    assert 1 <= choice.split <= situation.num_free
    assert choice.split <= choice.num_items <= situation.num_items
    assert -(-choice.num_items // choice.split) <= situation.max_batch
    if choice.split > 1:
        # k never loses: neither in ΔJ, nor in the time that the same items would take whole.
        most = min(situation.num_items, situation.max_batch)
        gain = 1 - PARAMETERS.split_gain
        assert cost_s(choice, situation) <= gain * cost_s(Choice(most, 1), situation)
        whole = Choice(choice.num_items, 1)
        assert duration_s(choice, situation) <= duration_s(whole, situation)


def situation(num_items: int, **changes: object) -> Situation:
    values: dict[str, object] = {
        "num_items": num_items,
        "ends": [num_items],
        "num_waiting": 0,
        "num_free": 3,
        "num_slots": 3,
        "max_batch": 64,
        "max_split": 4,
        "min_split": 1,
        "overhead_s": 0.1,
        "item_s": 0.1,
        "balance": 0.0,
    }
    return Situation(**{**values, **changes})  # type: ignore[arg-type]


def test_the_split_falls_with_load_with_overhead_and_with_waiting_work() -> None:
    assert choose(situation(48), PARAMETERS).split == 3
    assert choose(situation(48, balance=1.0), PARAMETERS).split == 1
    assert choose(situation(48, overhead_s=100.0), PARAMETERS).split == 1
    assert choose(situation(48, num_waiting=50, overhead_s=0.5), PARAMETERS).split == 1
    assert choose(situation(1), PARAMETERS).split == 1


def test_heavy_work_that_has_waited_is_split_even_under_load() -> None:
    assert choose(situation(48, balance=1.0, min_split=2), PARAMETERS).split == 2
    assert choose(situation(48, balance=1.0, min_split=3), PARAMETERS).split == 3
    assert choose(situation(48, balance=1.0, min_split=9), PARAMETERS).split == 3


def live(order: int, key: float, tenant: str) -> LiveTicket:
    ticket = Ticket(id=str(order), run_id="", node_id="", resource="", profile="")
    return LiveTicket(ticket, order, 0.0, ActiveRun("", tenant, 0.0, None), key=key)


@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from(["add", "remove", "rekey", "first"]), st.integers(0, 50)),
        max_size=200,
    )
)
def test_the_queue_agrees_with_a_sorted_list(steps: list[tuple[str, int]]) -> None:
    queue, model = ReadyQueue(), {}
    for index, (kind, number) in enumerate(steps):
        if kind == "add":
            model[index] = live(index, float(number), "ab"[number % 2])
            queue.add(model[index])
        elif model:
            chosen = model[sorted(model)[number % len(model)]]
            if kind == "remove":
                queue.remove(model.pop(chosen.order))
            elif kind == "rekey":
                queue.remove(chosen)
                chosen.key = float(number)
                queue.add(chosen)
        ranked = sorted(model.values(), key=lambda one: (one.key, one.order))
        assert len(queue) == len(ranked)
        assert queue.first() is (ranked[0] if ranked else None)
        for tenant in "ab":
            own = [one for one in ranked if one.tenant == tenant]
            assert queue.first(tenant) is (own[0] if own else None)
            assert (tenant in queue.tenants) == bool(own)


def nodes(*edges: str) -> tuple[PlannedNode, ...]:
    """`a:bc` is a node a with the children b and c."""
    return tuple(
        PlannedNode(id=edge[0], profile="llm", resource="llm", children=tuple(edge[2:]))
        for edge in edges
    )


def test_contribution_counts_direct_successors() -> None:
    run = ActiveRun("r", "", 0.0, None)
    run.add(nodes("a:bc", "b:d", "c:d", "d:"), lambda profile, size: 2.0, PARAMETERS)
    assert [run.nodes[name].depth for name in "abcd"] == [2, 1, 1, 0]
    assert run.contribution("a", 4.0, 1.0) == pytest.approx(2 * 2.0 / 4.0 + 2 * 0.1)
    assert run.contribution("d", 4.0, 1.0) == 0.0


def test_the_correction_is_one_without_history_and_within_its_limits() -> None:
    run = ActiveRun("r", "", 0.0, None)
    run.add(nodes("a:", "b:"), lambda profile, size: 10.0, PARAMETERS)
    assert run.correction(PARAMETERS, 20.0) == 1.0
    run.progress("a", 1.0, 1000.0, 0.1)
    assert run.correction(PARAMETERS, 20.0) == PARAMETERS.max_correction
    other = ActiveRun("s", "", 0.0, None)
    other.add(nodes("a:", "b:"), lambda profile, size: 1000.0, PARAMETERS)
    other.progress("a", 1.0, 0.0, 0.1)
    assert other.correction(PARAMETERS, 1.0) == PARAMETERS.min_correction


def test_sizes_add_and_divide() -> None:
    assert Size(4.0, 8.0).share(0.25) + Size(1.0, 1.0) == Size(2.0, 3.0)


def test_a_node_that_is_ready_again_needs_all_of_its_work() -> None:
    """Less of it now, perhaps, than was done of the first try."""
    run = ActiveRun("r", "", 0.0, None)
    run.add(nodes("a:", "b:"), lambda profile, size: 10.0, PARAMETERS)
    run.progress("a", done=0.9, service_s=9.0, keep=0.0)
    assert run.remaining_s == pytest.approx(11.0)
    run.expect("a", 2.0)
    assert run.remaining_s == pytest.approx(12.0)
    run.end("a", was_measured=True)
    assert run.remaining_s == pytest.approx(10.0)
