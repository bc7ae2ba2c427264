"""What is dispatched when: order, reservation, tenants, sharing, splitting, ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.workflows.scheduling.world import World, node
from workflows.scheduling.book import UnknownRun
from workflows.scheduling.costs import Cost, FixedCosts
from workflows.scheduling.messages import (
    Abort,
    Dispatch,
    DispatchProgressed,
    Expire,
    NodeEnded,
    NodesAdded,
    NodesRemoved,
    Reprioritise,
    Tick,
    Ticket,
    TicketJoined,
    TicketLeft,
    TicketReady,
)
from workflows.scheduling.parameters import PolicyName, SchedulerParameters, preset

# Enough head start that the shortest goes first in a handful of runs.
SHORT_FIRST = SchedulerParameters(ageing=100.0)


def started(world: World) -> list[str]:
    return [ticket_id.partition(".")[0] for ticket_id in world.log]


def test_nothing_is_dispatched_before_the_capacity_is_known() -> None:
    world = World()
    assert world.single("a") == []
    world.capacity("llm", 1)
    assert started(world) == ["a"]


def test_a_free_slot_is_taken_at_once() -> None:
    world = World()
    world.capacity("llm", 2)
    for name in "abc":
        world.single(name)
    assert started(world) == ["a", "b"]
    world.finish_ticket("a.n")
    assert started(world) == ["a", "b", "c"]


def test_the_run_with_less_left_goes_first() -> None:
    world = World(SHORT_FIRST)
    world.capacity("llm", 1)
    world.single("first", 5.0)
    world.single("long", 9.0)
    world.single("short", 1.0)
    world.single("middle", 4.0)
    world.drain()
    assert started(world) == ["first", "short", "middle", "long"]


def test_a_run_near_its_end_goes_before_a_new_one_of_the_same_kind() -> None:
    world = World(SHORT_FIRST)
    world.capacity("llm", 1)
    nodes = (node("a", 5.0, children=("b",)), node("b", 1.0))
    world.run("old", *nodes)
    world.ready("old", "a", 5.0)
    world.run("new", *nodes)
    world.ready("new", "a", 5.0)
    world.ready("old", "b", 1.0)  # as if it did not depend on a
    world.finish_ticket("old.a", 5.0)
    assert world.log == ["old.a", "old.b"]


def test_a_node_that_many_wait_for_goes_first() -> None:
    world = World(SHORT_FIRST)
    world.capacity("llm", 1)
    world.single("first")
    world.run("leaf", node("x", 2.0), node("y", 2.0), node("z", 2.0))
    world.run("root", node("x", 2.0, children=("y", "z")), node("y", 2.0), node("z", 2.0))
    world.ready("leaf", "x", 2.0)
    world.ready("root", "x", 2.0)
    world.drain()
    assert world.log[1:] == ["root.x", "leaf.x"]


def test_a_late_deadline_does_not_matter_and_a_near_one_does() -> None:
    world = World()
    world.capacity("llm", 1)
    world.single("first")
    world.single("none")
    world.single("late", deadline_s=1000.0)
    world.single("near", deadline_s=1.5)
    world.drain(step_s=0.1)
    assert started(world) == ["first", "near", "none", "late"]


def test_a_declared_priority_is_a_head_start() -> None:
    world = World()
    world.capacity("llm", 1)
    world.single("first")
    world.single("plain")
    world.run("urgent", node("n"))
    world.ready("urgent", "n", priority=-1)
    world.drain()
    assert started(world) == ["first", "urgent", "plain"]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", ["first", "long", "short", "middle"]),
        ("srtf", ["first", "short", "middle", "long"]),
        ("plas", ["first", "long", "short", "middle"]),
        ("topology", ["first", "long", "short", "middle"]),
    ],
)
def test_each_policy_has_its_order(policy: PolicyName, order: list[str]) -> None:
    world = World(SchedulerParameters(policy=policy))
    world.capacity("llm", 1)
    world.single("first", 5.0)
    world.single("long", 9.0)
    world.single("short", 1.0)
    world.single("middle", 4.0)
    world.drain()
    assert started(world) == order


def test_plas_puts_back_a_run_that_has_had_much() -> None:
    world = World(SchedulerParameters(policy="plas"))
    world.capacity("llm", 1)
    world.run("served", node("a"), node("b"))
    world.ready("served", "a")
    world.finish_ticket("served.a", 50.0)
    world.single("other", 3.0)
    world.ready("served", "b")
    world.single("fresh", 3.0)
    world.drain()
    assert world.log == ["served.a", "other.n", "fresh.n", "served.b"]


# Long runs -----------------------------------------------------------------------------------


def crowd(parameters: SchedulerParameters, num_slots: int) -> World:
    """Many short runs and two long ones wait for slots that long-forgotten work holds."""
    world = World(parameters)
    world.capacity("llm", num_slots)
    for index in range(num_slots):
        world.single(f"held{index}")
    for index in range(40):
        world.single(f"short{index}", 1.0)
    for index in range(2):
        world.single(f"long{index}", 100.0)
    return world


def test_heavy_work_has_its_share_of_the_slots_at_once() -> None:
    world = crowd(replace(SHORT_FIRST, heavy_weight=0.0), 10)
    for index in range(3):
        world.finish_ticket(f"held{index}.n")
    # ceil(0.2 · 10) = 2 slots for heavy work, and then the short runs go on.
    assert started(world)[10:] == ["long0", "long1", "short0"]


def test_without_a_reservation_the_shortest_goes_first() -> None:
    parameters = replace(SHORT_FIRST, heavy_weight=0.0, reserved_share=0.0)
    world = crowd(parameters, 10)
    for index in range(3):
        world.finish_ticket(f"held{index}.n")
    assert started(world)[10:] == ["short0", "short1", "short2"]


def test_with_a_single_slot_heavy_work_has_every_fifth_turn() -> None:
    world = crowd(replace(SHORT_FIRST, heavy_weight=0.0), 1)
    world.drain()
    turns = started(world)[1:]
    assert [turns.index("long0"), turns.index("long1")] == [4, 9]


def test_no_slot_idles_for_heavy_work_that_is_not_there() -> None:
    world = World()
    world.capacity("llm", 10)
    for index in range(30):
        world.single(f"short{index}", 1.0 + index / 100)
    assert len(world.running) == 10


# Tenants -------------------------------------------------------------------------------------


def shares(weights: dict[str, float], num_turns: int) -> dict[str, float]:
    """Two tenants with a backlog each, the first one much larger and older."""
    world = World(replace(SHORT_FIRST, reserved_share=0.0), weights=weights)
    world.capacity("llm", 2)
    for index in range(200):
        world.single(f"big{index}", tenant="big")
    for index in range(100):
        world.single(f"small{index}", 2.0, tenant="small")
    done = {"big": 0.0, "small": 0.0}
    for _ in range(num_turns):
        world.now_s += 1.0
        dispatch = world.running[min(world.running)]
        name = dispatch.parts[0].ticket.run_id.rstrip("0123456789")
        service_s = dispatch.parts[0].ticket.size.outputs
        done[name] += service_s
        world.finish(dispatch, service_s)
    return done


def test_tenants_that_wait_have_equal_shares() -> None:
    done = shares({}, 100)
    assert done["big"] == pytest.approx(done["small"], abs=10.0)


def test_weights_set_the_shares() -> None:
    done = shares({"small": 3.0}, 80)
    assert done["small"] == pytest.approx(3 * done["big"], abs=20.0)


def test_a_tenant_that_was_away_has_no_credit() -> None:
    world = World(replace(SHORT_FIRST, reserved_share=0.0))
    world.capacity("llm", 1)
    for index in range(100):
        world.single(f"a{index}", tenant="a")
    for _ in range(50):
        world.now_s += 1.0
        world.finish(world.running[min(world.running)])
    for index in range(50):
        world.single(f"b{index}", tenant="b")
    before = len(world.log)
    for _ in range(20):
        world.now_s += 1.0
        world.finish(world.running[min(world.running)])
    new = [name[0] for name in started(world)[before:]]
    assert new.count("a") >= 5


# Shared tickets ------------------------------------------------------------------------------


def test_a_shared_ticket_has_the_rank_of_its_most_urgent_run() -> None:
    world = World(SHORT_FIRST)
    world.capacity("llm", 1)
    world.single("first")
    world.run("long", node("n", 1.0), node("rest", 50.0))
    world.single("middle", 10.0)
    world.ready("long", "n")
    world.run("short", node("n"))
    world.handle(TicketJoined(ticket_id="long.n", run_id="short", node_id="n"))
    world.drain()
    assert started(world) == ["first", "long", "middle"]


def test_a_shared_ticket_is_cancelled_when_the_last_leaves() -> None:
    world = World()
    world.capacity("llm", 1)
    world.single("a")
    world.run("b", node("n"))
    world.handle(TicketJoined(ticket_id="a.n", run_id="b", node_id="n"))
    assert not world.handle(TicketLeft(ticket_id="a.n", run_id="a", node_id="n"))
    commands = world.handle(TicketLeft(ticket_id="a.n", run_id="b", node_id="n"))
    assert commands == [Abort(dispatch_id=world.dispatch_of("a.n").id)]


def test_the_end_of_the_leader_hands_over() -> None:
    world = World()
    world.capacity("llm", 1)
    world.single("a", tenant="x")
    world.run("b", node("n"), tenant="y")
    world.handle(TicketJoined(ticket_id="a.n", run_id="b", node_id="n"))
    world.end("a")
    assert world.running
    world.finish_ticket("a.n")
    assert world.scheduler.remaining_service_s("b") == 0.0


def test_a_follower_is_charged_only_with_what_was_left_when_it_came() -> None:
    world = World()
    world.capacity("llm", 1)
    world.run("leader", node("n", 10.0), node("rest", 10.0))
    world.ready("leader", "n", 10.0)
    dispatch = world.dispatch_of("leader.n")
    world.handle(DispatchProgressed(dispatch_id=dispatch.id, service_s=18.0, done=0.9))
    world.run("follower", node("n", 10.0), node("rest", 10.0))
    world.handle(TicketJoined(ticket_id="leader.n", run_id="follower", node_id="n"))
    world.finish(dispatch, 20.0)
    leader, follower = (world.scheduler._book.runs[name] for name in ("leader", "follower"))
    assert leader.attained_s == pytest.approx(20.0)
    assert follower.attained_s == pytest.approx(2.0)


def test_a_shared_ticket_expires_at_the_latest_deadline() -> None:
    world = World()
    world.capacity("llm", 1)
    world.single("running")
    world.single("a", deadline_s=5.0)
    world.run("b", node("n"), deadline_s=8.0)
    world.handle(TicketJoined(ticket_id="a.n", run_id="b", node_id="n"))
    wake_s = world.scheduler.next_wake_s
    assert wake_s is not None
    assert wake_s <= 8.0
    world.now_s = 7.0
    assert world.handle(Tick()) == []
    world.now_s = 8.0
    (command,) = world.handle(Tick())
    assert isinstance(command, Expire)
    assert command.ticket.id == "a.n"
    assert world.scheduler.next_wake_s is None


# Batches and splits --------------------------------------------------------------------------

EMBED = FixedCosts({"embed": Cost(overhead_s=0.1, per_output_s=0.1)})


def test_items_of_several_runs_go_in_one_batch() -> None:
    world = World(costs=EMBED)
    world.capacity("embed", 1, max_batch=16)
    for name in "abcd":
        world.run(name, node("e", 4.0, resource="embed"))
        world.ready(name, "e", 4.0, resource="embed", num_items=4)
    world.finish_ticket("a.e")
    (batch,) = world.running.values()
    assert [part.ticket.run_id for part in batch.parts] == ["b", "c", "d"]


def test_only_tickets_of_one_profile_share_a_batch() -> None:
    world = World(costs=EMBED)
    world.capacity("embed", 1, max_batch=16)
    for name, profile in (("a", "small"), ("b", "small"), ("c", "large"), ("d", "small")):
        world.run(name, node("e", resource="embed"))
        world.ready(name, "e", resource="embed", profile=profile)
    world.finish_ticket("a.e")
    (batch,) = world.running.values()
    assert [part.ticket.run_id for part in batch.parts] == ["b", "d"]


def test_an_idle_resource_splits_and_a_busy_one_does_not() -> None:
    world = World(costs=EMBED)
    world.capacity("embed", 3, max_batch=64)
    for name in "abcdefgh":
        world.run(name, node("e", 48.0, resource="embed"))
        world.ready(name, "e", 48.0, resource="embed", num_items=48, max_split=4)
    parts = [part.num_items for dispatch in world.running.values() for part in dispatch.parts]
    assert parts == [16, 16, 16]
    world.finish(world.running[min(world.running)])
    assert [part.num_items for part in world.dispatches[-1].parts] == [48, 16]


def test_what_may_not_be_split_is_cut_only_where_it_exceeds_a_batch() -> None:
    world = World(costs=EMBED)
    world.capacity("embed", 3, max_batch=16)
    world.run("a", node("e", 12.0, resource="embed"))
    world.ready("a", "e", 12.0, resource="embed", num_items=12)
    world.run("b", node("e", 40.0, resource="embed"))
    world.ready("b", "e", 40.0, resource="embed", num_items=40)
    world.drain()
    sizes = [part.num_items for dispatch in world.dispatches for part in dispatch.parts]
    assert sizes == [12, 16, 16, 8]


def test_a_split_that_fails_in_one_part_fails_as_one() -> None:
    world = World(costs=EMBED)
    world.capacity("embed", 3, max_batch=64)
    world.run("a", node("e", 48.0, resource="embed"))
    world.ready("a", "e", 48.0, resource="embed", num_items=48, max_split=4)
    first, *others = world.running.values()
    world.finish(first, outcome="failed")
    assert world.aborted == {dispatch.id for dispatch in others}
    world.drain()
    assert not world.running


def test_a_batch_that_is_not_full_waits_only_under_load_and_only_so_long() -> None:
    world = World(costs=EMBED)
    world.capacity("embed", 1, max_batch=4, max_wait_s=0.5)
    names = iter("abcdefghijklmnop")

    def item() -> None:
        name = next(names)
        world.run(name, node("e", resource="embed"))
        world.ready(name, "e", resource="embed")

    item()
    assert len(world.running) == 1
    for _ in range(12):
        item()
    for _ in range(3):
        world.now_s += 5.0
        world.finish(world.running[min(world.running)])
        assert len(world.dispatches[-1].parts) == 4
    world.finish(world.running[min(world.running)])
    item()
    item()
    assert not world.running
    wake_s = world.scheduler.next_wake_s
    assert wake_s is not None
    assert 0.0 < wake_s <= world.now_s + 0.5
    world.now_s = wake_s
    world.handle(Tick())
    assert len(world.dispatches[-1].parts) == 2


# Estimates and engines -----------------------------------------------------------------------


def test_what_takes_longer_than_predicted_raises_the_estimate() -> None:
    world = World()
    world.capacity("llm", 1)
    world.run("a", node("x", 10.0), node("y", 10.0))
    assert world.scheduler.remaining_service_s("a") == 20.0
    world.ready("a", "x", 10.0)
    world.finish_ticket("a.x", 30.0)
    # (30 + κ) / (10 + κ) · 10, κ a quarter of the median run of 20 s
    assert world.scheduler.remaining_service_s("a") == pytest.approx(10 * 35 / 15)


def test_skipped_and_added_nodes_count() -> None:
    world = World()
    world.run("a", node("x", 10.0), node("y", 10.0))
    world.handle(NodeEnded(run_id="a", node_id="y"))
    assert world.scheduler.remaining_service_s("a") == 10.0
    world.handle(NodesAdded(run_id="a", nodes=(node("z", 5.0),)))
    assert world.scheduler.remaining_service_s("a") == 15.0


def test_a_failed_try_leaves_all_of_the_node_to_do() -> None:
    world = World()
    world.capacity("llm", 1)
    world.single("a", 10.0)
    dispatch = world.dispatch_of("a.n")
    world.handle(DispatchProgressed(dispatch_id=dispatch.id, service_s=5.0, done=0.5))
    assert world.scheduler.remaining_service_s("a") == pytest.approx(5.0)
    world.finish(dispatch, 5.0, outcome="failed")
    assert world.scheduler._book.runs["a"].remaining_s == pytest.approx(10.0)


def test_a_node_that_goes_on_and_on_is_never_nearly_done() -> None:
    world = World()
    world.capacity("llm", 1)
    world.single("a", 10.0)
    dispatch = world.dispatch_of("a.n")
    for step in range(1, 20):
        event = DispatchProgressed(dispatch_id=dispatch.id, service_s=5.0 * step, done=0.5 * step)
        world.handle(event)
    assert world.scheduler.remaining_service_s("a") >= 1.0


def test_running_work_is_told_its_new_priority_where_the_engine_can_change_it() -> None:
    world = World(SHORT_FIRST)
    world.capacity("llm", 1, is_preemptible=True)
    world.run("a", node("x", 10.0), node("y", 10.0))
    world.ready("a", "x", 10.0)
    dispatch = world.dispatch_of("a.x")
    commands = world.handle(DispatchProgressed(dispatch_id=dispatch.id, service_s=100.0, done=0.1))
    assert any(isinstance(command, Reprioritise) for command in commands)
    assert world.priorities[dispatch.id] > dispatch.priority


def test_events_about_what_is_over_are_ignored_and_unknown_runs_refused() -> None:
    world = World()
    world.capacity("llm", 1)
    world.single("a")
    dispatch = world.dispatch_of("a.n")
    world.finish(dispatch)
    world.handle(DispatchProgressed(dispatch_id=dispatch.id, service_s=1.0, done=1.0))
    world.handle(TicketLeft(ticket_id="a.n", run_id="a", node_id="n"))
    world.end("a")
    with pytest.raises(UnknownRun):
        world.end("a")


def test_a_ticket_says_where_it_stands() -> None:
    world = World()
    world.capacity("llm", 1)
    world.single("running")
    world.single("a", 3.0)
    standing = world.scheduler.standing("a.n")
    assert standing is not None
    assert standing.is_queued
    assert standing.remaining_s == 3.0
    assert 0 < standing.score <= world.parameters.max_score
    assert world.scheduler.standing("b.n") is None


def test_a_failed_try_does_not_count_as_fast() -> None:
    world = World()
    world.capacity("llm", 1)
    world.run("a", node("x", 10.0), node("y", 10.0))
    world.ready("a", "x", 10.0)
    world.finish(world.dispatch_of("a.x"), 0.01, outcome="failed")
    assert world.scheduler.remaining_service_s("a") == pytest.approx(20.0)


def test_less_capacity_lets_what_runs_end() -> None:
    world = World()
    world.capacity("llm", 3)
    for name in "abcd":
        world.single(name)
    world.capacity("llm", 1)
    world.finish_ticket("a.n")
    world.finish_ticket("b.n")
    assert len(world.running) == 1
    world.finish_ticket("c.n")
    assert started(world) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("name", ["balanced", "short-first", "throughput", "tail-fairness"])
def test_presets_are_within_their_ranges(name: str) -> None:
    assert preset(name, policy="hera").max_score > 0  # type: ignore[arg-type]


def test_a_parameter_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="reserved_share is 2"):
        SchedulerParameters(reserved_share=2.0)


def test_parts_of_a_run_come_and_go_without_a_trace() -> None:
    world = World()
    world.capacity("llm", 1)
    world.run("r", node("outer"))
    before_s = world.scheduler.remaining_service_s("r")
    for number in range(50):
        names = (f"{number}/a", f"{number}/b")
        world.handle(NodesAdded(run_id="r", nodes=tuple(node(name, 3.0) for name in names)))
        assert world.scheduler.remaining_service_s("r") == pytest.approx(before_s + 6.0)
        world.ready("r", names[0], 3.0)
        world.finish_ticket(f"r.{names[0]}", 3.0)
        world.handle(NodesRemoved(run_id="r", node_ids=names))
        assert world.scheduler.remaining_service_s("r") == pytest.approx(before_s)
    world.end("r")
    assert world.scheduler.is_empty


def test_of_several_events_of_one_moment_the_best_gets_the_slot() -> None:
    world = World()
    world.capacity("llm", 1)
    world.run("r", node("a"), node("b"))
    tickets = [
        Ticket(id=name, run_id="r", node_id=name, resource="llm", profile="llm", priority=priority)
        for name, priority in (("a", 3), ("b", -3))
    ]
    commands = world.scheduler.handle_all(
        [TicketReady(ticket=ticket) for ticket in tickets], now_s=0.0
    )
    (dispatch,) = [one for one in commands if isinstance(one, Dispatch)]
    assert dispatch.parts[0].ticket.id == "b"


def test_a_run_is_as_long_as_its_nodes_turn_out_when_they_are_ready() -> None:
    world = World()
    world.capacity("llm", 0)
    world.run("r", node("a", 1.0))
    world.ready("r", "a", 40.0)
    assert world.scheduler.remaining_service_s("r") == pytest.approx(40.0)
