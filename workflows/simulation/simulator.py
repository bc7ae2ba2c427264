"""Clients in a closed loop, a system that serves them, and what they saw."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from workflows.profiler import Profiler
from workflows.scheduling.costs import CostsOfModels, FixedCosts
from workflows.scheduling.messages import (
    CapacityChanged,
    Command,
    Dispatch,
    DispatchEnded,
    DispatchProgressed,
    Event,
    NodeEnded,
    PlannedNode,
    RunArrived,
    RunEnded,
    Size,
    Tick,
    Ticket,
    TicketJoined,
    TicketReady,
)
from workflows.scheduling.scheduler import Scheduler
from workflows.simulation.graph import GraphBuilder, SimulatedNode
from workflows.simulation.machines import Machines, Usage
from workflows.simulation.system import System
from workflows.simulation.testbed import Testbed
from workflows.simulation.timeline import Timeline
from workflows.simulation.workload import Queries, Query


@dataclass(slots=True, eq=False)
class _Run:
    id: str
    query: Query
    nodes: dict[str, SimulatedNode]
    started_s: float
    num_missing: dict[str, int]
    open_in_level: Counter[int]
    done: set[str] = field(default_factory=set)
    held: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Open:
    """A ticket on its way: who wants it, and what is left."""

    ticket: Ticket
    node: SimulatedNode
    num_left: int
    sharers: list[tuple[_Run, str]]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """latencies_s: of runs in order of their end, after the warm-up. kinds: of the same runs.

    num_in_time, elapsed_s: runs that ended between the warm-up and the time when clients ran out of
    queries, and how long that was. num_parts: executed, with
    sub-nodes of decoding. num_nodes: logical ones. num_shared: of these, not executed.
    """

    latencies_s: list[float]
    kinds: list[str]
    elapsed_s: float
    num_in_time: int
    num_runs: int
    num_parts: int
    num_nodes: int
    num_shared: int
    total_s: float
    usage: dict[str, Usage]


class Simulation:
    """One system, one workload, and its clients.

    concurrency: clients that send their next query when they have the answer. rate_per_s: in place
    of these, queries that come at random at this rate, whatever happens (a Poisson stream).
    """

    def __init__(
        self,
        system: System,
        testbed: Testbed,
        queries: Queries,
        *,
        concurrency: int,
        num_queries: int,
        seed: int,
        rate_per_s: float | None = None,
    ) -> None:
        self._system = system
        self._testbed = testbed
        self._queries = queries
        self._concurrency = concurrency
        self._num_queries = num_queries
        self._rate_per_s = rate_per_s
        self._arrivals = random.Random(seed + 1)
        self._timeline = Timeline()
        self._machines = Machines(testbed, self._timeline, seed)
        costs = Profiler() if system.learns else FixedCosts(testbed.costs())
        self._scheduler = Scheduler(CostsOfModels(costs), system.parameters)
        self._open: dict[str, _Open] = {}
        self._by_signature: dict[str, str] = {}
        self._known: dict[str, float] = {}
        self._num_sent = 0
        self._num_ended = 0
        self._num_warm = min(concurrency, num_queries // 4)
        self._warm_s = 0.0
        self._wake_s: float | None = None
        self._outcome = Outcome(
            latencies_s=[],
            kinds=[],
            elapsed_s=0.0,
            num_in_time=0,
            num_runs=0,
            num_parts=0,
            num_nodes=0,
            num_shared=0,
            total_s=0.0,
            usage=self._machines.usage,
        )

    def run(self) -> Outcome:
        """Send `num_queries` queries and wait for all answers."""
        for name, num_slots in self._testbed.slots.items():
            batch = 1 if self._system.batching == "single" else self._testbed.batches[name]
            event = CapacityChanged(
                resource=name,
                num_slots=num_slots,
                max_batch=batch,
                is_preemptible=name == "llm",
            )
            self._handle(event)
        if self._rate_per_s is None:
            for client in range(self._concurrency):
                # Clients start within a moment, not at once.
                self._timeline.at(0.01 * client, self._send)
        else:
            self._arrive()
        while self._timeline.step():
            pass
        assert self._num_ended == self._num_queries
        self._outcome.total_s = self._timeline.now_s
        return self._outcome

    # Clients -------------------------------------------------------------------------------

    def _arrive(self) -> None:
        """A query of the open loop, and the next one after it."""
        self._send()
        if self._num_sent < self._num_queries:
            assert self._rate_per_s is not None
            self._timeline.after(self._arrivals.expovariate(self._rate_per_s), self._arrive)

    def _send(self) -> None:
        if self._num_sent == self._num_queries:
            return
        self._num_sent += 1
        query = self._queries.next()
        builder = GraphBuilder(
            query,
            num_pipelines=self._system.num_pipelines,
            max_split=self._system.max_split,
        )
        nodes = builder.build()
        run = _Run(
            id=f"run{self._num_sent}",
            query=query,
            nodes=nodes,
            started_s=self._timeline.now_s,
            num_missing={name: len(node.parents) for name, node in nodes.items()},
            open_in_level=Counter(node.level for node in nodes.values()),
        )
        planned = tuple(
            PlannedNode(
                id=node.id,
                profile=node.profile,
                size=node.expected,
                children=tuple(node.children),
                resource=node.resource,
            )
            for node in nodes.values()
        )
        self._handle(RunArrived(run_id=run.id, nodes=planned))
        self._outcome.num_nodes += len(nodes)
        for name in [name for name, missing in run.num_missing.items() if not missing]:
            self._ready(run, name)

    def _end(self, run: _Run) -> None:
        now_s = self._timeline.now_s
        self._num_ended += 1
        outcome = self._outcome
        outcome.num_runs += 1
        if self._num_ended == self._num_warm:
            self._warm_s = now_s
        elif self._num_ended > self._num_warm:
            outcome.latencies_s.append(now_s - run.started_s)
            outcome.kinds.append(run.query.kind)
            if self._num_sent < self._num_queries:
                outcome.num_in_time += 1
                outcome.elapsed_s = now_s - self._warm_s
        self._handle(RunEnded(run_id=run.id))
        if self._rate_per_s is None:
            self._send()

    # Nodes ---------------------------------------------------------------------------------

    def _ready(self, run: _Run, name: str) -> None:
        """A node whose parents have ended: shared, or a ticket."""
        node = run.nodes[name]
        if self._system.has_barrier and self._is_held(run, node):
            run.held.append(name)
            return
        if self._system.shares and self._share(run, node):
            return
        ticket = Ticket(
            id=f"{run.id}/{name}",
            run_id=run.id,
            node_id=name,
            resource=node.resource,
            profile=self._profile(run, node),
            size=node.expected,
            num_items=node.num_items,
            max_split=node.max_split,
        )
        self._open[ticket.id] = _Open(ticket, node, node.num_items, [(run, name)])
        self._by_signature[node.signature] = ticket.id
        self._handle(TicketReady(ticket=ticket))

    def _profile(self, run: _Run, node: SimulatedNode) -> str:
        if self._system.batching == "within-run":
            return f"{node.profile}#{run.id}"
        return node.profile

    def _share(self, run: _Run, node: SimulatedNode) -> bool:
        """Take the result of an equal node, or wait for one that is queued or runs."""
        ended_s = self._known.get(node.signature)
        if ended_s is not None and self._timeline.now_s - ended_s <= self._system.cache_ttl_s:
            self._outcome.num_shared += 1
            self._handle(NodeEnded(run_id=run.id, node_id=node.id))
            self._timeline.after(0.0, lambda: self._done(run, node.id))
            return True
        open_ = self._open.get(self._by_signature.get(node.signature, ""))
        if open_ is None:
            return False
        self._outcome.num_shared += 1
        open_.sharers.append((run, node.id))
        event = TicketJoined(ticket_id=open_.ticket.id, run_id=run.id, node_id=node.id)
        self._handle(event)
        return True

    def _is_held(self, run: _Run, node: SimulatedNode) -> bool:
        return any(run.open_in_level[level] for level in range(node.level))

    def _done(self, run: _Run, name: str) -> None:
        node = run.nodes[name]
        run.done.add(name)
        run.open_in_level[node.level] -= 1
        ready = list(run.held)
        run.held.clear()
        for child in node.children:
            run.num_missing[child] -= 1
            if not run.num_missing[child]:
                ready.append(child)
        for child in ready:
            self._ready(run, child)
        if len(run.done) == len(run.nodes):
            self._end(run)

    # Commands ------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        commands = self._scheduler.handle(event, now_s=self._timeline.now_s)
        self._carry_out(commands)
        wake_s = self._scheduler.next_wake_s
        if wake_s is not None and (self._wake_s is None or wake_s < self._wake_s):
            self._wake_s = wake_s
            self._timeline.at(wake_s, self._tick)

    def _tick(self) -> None:
        self._wake_s = None
        self._handle(Tick())

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Dispatch):
                self._start(command)

    def _start(self, dispatch: Dispatch) -> None:
        size, expected = Size(0.0, 0.0), Size(0.0, 0.0)
        for part in dispatch.parts:
            node = self._open[part.ticket.id].node
            share = part.num_items / part.ticket.num_items
            size += node.actual.share(share)
            expected += node.expected.share(share)
        self._outcome.num_parts += len(dispatch.parts)
        profile = dispatch.parts[0].ticket.profile.partition("#")[0]

        def progressed(service_s: float, made: float) -> None:
            self._outcome.num_parts += 1
            event = DispatchProgressed(
                dispatch_id=dispatch.id, service_s=service_s, done=made / expected.outputs
            )
            self._handle(event)

        def ended(service_s: float) -> None:
            event = DispatchEnded(dispatch_id=dispatch.id, service_s=service_s, size=size)
            self._handle(event)
            for part in dispatch.parts:
                self._part_ended(part.ticket.id, part.num_items)

        self._machines.run(dispatch, profile, size, progressed, ended)

    def _part_ended(self, ticket_id: str, num_items: int) -> None:
        open_ = self._open[ticket_id]
        open_.num_left -= num_items
        if open_.num_left:
            return
        del self._open[ticket_id]
        signature = open_.node.signature
        if self._system.shares:
            self._known[signature] = self._timeline.now_s
        for run, name in open_.sharers:
            self._done(run, name)
