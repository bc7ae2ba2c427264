"""What one event costs the workflow scheduler, by the number of runs and queued tickets.

    python -m benchmarks.scheduler_scale            the curve, about a minute
    python -m benchmarks.scheduler_scale --quick    its lower end, to see that it works

Each size has a standing crowd: so many active runs with ten queued tickets each, most of them for
busy resources. Then events come as in service: a run arrives with its nodes and first tickets, a
dispatch ends and the next starts, a sub-node is reported, a run ends. Each event is timed
alone, in CPU time: others use this machine too.
The cost of all events of one kind is held against c · log N through the smallest size.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import sys
from collections.abc import Sequence
from time import thread_time
from typing import Any

from benchmarks.record import median, percentile, save, table
from workflows.scheduling.costs import Cost, FixedCosts
from workflows.scheduling.messages import (
    CapacityChanged,
    Command,
    Dispatch,
    DispatchEnded,
    DispatchProgressed,
    Event,
    PlannedNode,
    RunArrived,
    RunEnded,
    Size,
    Ticket,
    TicketReady,
)
from workflows.scheduling.scheduler import Scheduler

_COSTS = FixedCosts(
    {
        "llm": Cost(overhead_s=0.05, per_output_s=0.02, per_input_s=2e-4),
        "embed": Cost(overhead_s=0.01, per_output_s=0.004),
    }
)
_WIDTH = 10
_NUM_TENANTS = 20


class Crowd:
    """A scheduler in the middle of its work, and a clock."""

    def __init__(self, num_runs: int, seed: int) -> None:
        self.scheduler = Scheduler(_COSTS)
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.num_runs = 0
        self.active: dict[str, int] = {}
        self.running: dict[int, Dispatch] = {}
        self.times: dict[str, list[float]] = {}
        for name, slots, batch in (("llm", 64, 1), ("embed", 3, 32)):
            event = CapacityChanged(
                resource=name, num_slots=slots, max_batch=batch, is_preemptible=name == "llm"
            )
            self.handle("capacity", event)
        while len(self.active) < num_runs:
            self.arrive()
        self.times.clear()

    def handle(self, kind: str, event: Event) -> None:
        self.now_s += self.random.expovariate(1000.0)
        start = thread_time()
        commands = self.scheduler.handle(event, now_s=self.now_s)
        self.times.setdefault(kind, []).append(thread_time() - start)
        self.carry_out(commands)

    def carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Dispatch):
                self.running[command.id] = command

    def arrive(self) -> None:
        """A run of ten nodes, all ready at once, and one that joins them."""
        self.num_runs += 1
        name = f"run{self.num_runs}"
        sizes = [self._size(index) for index in range(_WIDTH)]
        nodes = tuple(
            PlannedNode(id=f"n{index}", profile=kind, size=size, resource=kind, children=("last",))
            for index, (kind, size, _) in enumerate(sizes)
        )
        last = PlannedNode(id="last", profile="llm", size=Size(200.0, 1000.0), resource="llm")
        self.active[name] = _WIDTH
        tenant = f"tenant{self.random.randrange(_NUM_TENANTS)}"
        self.handle("run arrives", RunArrived(run_id=name, nodes=(*nodes, last), tenant=tenant))
        for node, (kind, size, count) in zip(nodes, sizes, strict=True):
            ticket = Ticket(
                id=f"{name}:{node.id}",
                run_id=name,
                node_id=node.id,
                resource=kind,
                profile=kind,
                size=size,
                num_items=count,
                max_split=4 if count > 1 else 1,
            )
            self.handle("ticket ready", TicketReady(ticket=ticket))

    def _size(self, index: int) -> tuple[str, Size, int]:
        if index % 2:
            return "llm", Size(self.random.lognormvariate(4.5, 1.0), 500.0), 1
        count = self.random.randint(1, 64)
        return "embed", Size(float(count)), count

    def step(self) -> None:
        """A random thing happens."""
        dispatch = self.random.choice(list(self.running.values()))
        if dispatch.resource == "llm" and self.random.random() < 0.5:
            done = self.random.random()
            event = DispatchProgressed(dispatch_id=dispatch.id, service_s=done, done=done)
            self.handle("sub-node ends", event)
            return
        del self.running[dispatch.id]
        self.handle("dispatch ends", DispatchEnded(dispatch_id=dispatch.id, service_s=1.0))
        if self.random.random() < 0.3:
            name = next(iter(self.active))
            del self.active[name]
            self.handle("run ends", RunEnded(run_id=name))
            self.arrive()


def measure(num_runs: int, num_steps: int, seed: int) -> dict[str, Any]:
    """Times in milliseconds, by kind of event."""
    crowd = Crowd(num_runs, seed)
    gc.collect()
    gc.freeze()
    for _ in range(num_steps):
        crowd.step()
    gc.unfreeze()
    num_queued = sum(pool.num_queued for pool in crowd.scheduler.statistics().values())
    kinds = {
        kind: {
            "count": len(times),
            "p50_ms": 1e3 * median(times),
            "p99_ms": 1e3 * percentile(times, 0.99),
            "mean_ms": 1e3 * sum(times) / len(times),
        }
        for kind, times in crowd.times.items()
    }
    every = [time for times in crowd.times.values() for time in times]
    return {
        "num_runs": num_runs,
        "num_queued": num_queued,
        "p50_ms": 1e3 * median(every),
        "p99_ms": 1e3 * percentile(every, 0.99),
        "max_ms": 1e3 * max(every),
        "mean_ms": 1e3 * sum(every) / len(every),
        "kinds": kinds,
    }


def report(curve: Sequence[dict[str, Any]]) -> str:
    first = curve[0]
    rows = []
    for one in curve:
        ratio = one["mean_ms"] / first["mean_ms"]
        allowed = math.log(one["num_queued"]) / math.log(first["num_queued"])
        slowest = max(one["kinds"].items(), key=lambda item: item[1]["p50_ms"])
        rows.append(
            [
                f"{one['num_runs']:,}",
                f"{one['num_queued']:,}",
                f"{one['p50_ms']:.3f}",
                f"{one['p99_ms']:.3f}",
                f"{one['max_ms']:.1f}",
                f"{one['mean_ms']:.3f}",
                f"{ratio:.2f}",
                f"{allowed:.2f}",
                f"{slowest[0]} {slowest[1]['p50_ms']:.3f}",
            ]
        )
    head = ["runs", "queued", "p50 ms", "p99 ms", "max ms", "mean ms", "× first", "log N × first"]
    return table([*head, "slowest kind, p50 ms"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    sizes = (30, 100) if arguments.quick else (100, 300, 1000, 3000, 10_000, 30_000)
    num_steps = 500 if arguments.quick else 4000
    curve = [measure(size, num_steps, arguments.seed) for size in sizes]
    print(report(curve))
    if not arguments.quick:
        parameters = {"seed": arguments.seed, "num_steps": num_steps, "width": _WIDTH}
        print(save("scheduler_scale", parameters=parameters, results=curve))
    return 0


if __name__ == "__main__":
    sys.exit(main())
