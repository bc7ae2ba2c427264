"""Our plan and others' on ShuntServe's cluster, judged by the iteration-level simulator.

The planners: ours (most throughput, and most throughput per dollar), the paper's dynamic program,
and three after the systems that it compares with (`benchmarks.placement_baselines`). Every fleet is
simulated by the same engine: up to as many requests in flight as its memory holds on average,
shared out by weighted round robin.

- saturated: requests drawn from the trace, eight times as many as the fleet has in flight, all
  there at once: the rate while each pipeline has requests waiting. This is what estimates are of.
- offline: the trace's first 5 minutes (70B, 1,309 requests) or 20 (32B, 5,299), all there at once,
  as in section 7.1.2: requests over the time until the last one ends. These are longer than the
  trace's mean (answers by 18 %), and the fleet fills up and runs empty within.
- online: the first 3 minutes (70B) or 9 (32B) stretched to 15, as in section 7.1.3.

    python -m benchmarks.placement_plans
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.paper_setup import (
    CLUSTER,
    ENGINE,
    MODELS,
    at_once,
    drawn,
    estimator,
    first_minutes,
    offers,
)
from benchmarks.placement_baselines import (
    Placement,
    alpaserve_like,
    hexgen_like,
    paper_estimator,
    vllm_like,
)
from benchmarks.record import percentile, save, table
from placement.estimator import Estimator, Stage
from placement.hardware import Offer
from placement.optimizer import solve, solve_paper
from placement.plan import Goal, Objective, Plan, PlannedPipeline
from placement.simulator.fleet import simulate_fleet
from placement.simulator.run import RequestTimes, SimulatedRequest

OFFLINE_MINUTES = {"70B": 5.0, "32B": 20.0}
ONLINE_MINUTES = {"70B": 3.0, "32B": 9.0}
ONLINE_WINDOW_MINUTES = 15.0
# Figure 9: requests per second, and ours over theirs.
PAPER_RPS = {
    "70B": {"paper": 1.53, "HexGen-like": 1.31, "AlpaServe-like": 1.08, "vLLM-like": 1.07},
    "32B": {"paper": 4.59, "HexGen-like": 3.39, "AlpaServe-like": 4.14, "vLLM-like": 4.39},
}


# The placement for a cluster. The estimator is the judge's; who plans by another makes it of that.
Planner = Callable[[Sequence[Offer], Estimator], Placement]


def _solved(objective: Objective) -> Planner:
    def make(offers: Sequence[Offer], estimator: Estimator) -> Placement:
        goal = Goal(objective=objective)
        plan = solve(offers, estimator, goal, time_limit_s=600)
        assert plan.gap < 1e-6, "the machine is too busy: the optimum is not proven"
        return _placement(plan)

    return make


def _by_paper(beam: int) -> Planner:
    goal = Goal(objective="throughput-per-dollar")
    return lambda offers, judge: _placement(
        solve_paper(offers, paper_estimator(judge), goal, beam=beam)
    )


def _placement(plan: Plan) -> Placement:
    return Placement(pipelines=tuple(one.stages for one in plan.pipelines))


PLANNERS = {
    "ours": _solved("throughput"),
    "ours per dollar": _solved("throughput-per-dollar"),
    "paper": _by_paper(8),
    "HexGen-like": hexgen_like,
    "AlpaServe-like": lambda offers, judge: alpaserve_like(offers, paper_estimator(judge)),
    "vLLM-like": lambda offers, judge: vllm_like(offers, paper_estimator(judge)),
}


def planned(
    placement: Placement, estimator: Estimator, offers: Sequence[Offer]
) -> list[PlannedPipeline]:
    """A placement's pipelines as those of a plan, each with as many requests as fit."""
    by_shape = {offer.shape.name: offer for offer in offers}
    return [
        PlannedPipeline(
            stages=stages,
            offers=tuple(
                by_shape[shape] for _, shape in sorted({(s.node, s.shape.name) for s in stages})
            ),
            estimate=estimator.evaluate(stages),
        )
        for stages in placement.pipelines
    ]


def judge(name: str, planner: str, minutes: float) -> dict[str, Any]:
    """One planner's fleet for one model. minutes: of the trace, as a share of the paper's."""
    judge_, cluster = estimator(name), offers()
    started = time.perf_counter()
    placement = PLANNERS[planner](cluster, judge_)
    solve_s = time.perf_counter() - started
    fleet = planned(placement, judge_, cluster)
    paced = [
        one.estimate.batch / judge_.paced_batch_s(one.stages, one.estimate.batch) for one in fleet
    ]
    backlog = drawn(8 * sum(one.estimate.batch for one in fleet), random.Random(1))
    saturated = simulate_fleet(judge_, fleet, backlog, weights=paced)
    offline = simulate_fleet(
        judge_, fleet, at_once(first_minutes(minutes * OFFLINE_MINUTES[name])), weights=paced
    )
    online = simulate_fleet(judge_, fleet, _online(name, minutes), weights=paced)
    price = sum(one.price_usd_per_hour for one in fleet)
    return {
        "model": name,
        "planner": planner,
        "solve_s": solve_s,
        "skipped": list(placement.skipped),
        "price_usd_per_hour": price,
        "estimated_rps": sum(one.estimate.throughput_rps for one in fleet),
        "paced_rps": sum(paced),
        "offline_rps": offline.throughput_rps,
        "saturated_rps": saturated.saturated_rps(),
        "requests_per_usd": 3600 * offline.throughput_rps / price,
        "online": latencies(online.requests),
        "pipelines": [
            {
                "stages": [_told(stage) for stage in one.stages],
                "batch": one.estimate.batch,
                "estimated_rps": one.estimate.throughput_rps,
                "paced_rps": rps,
                "saturated_rps": simulation.saturated_rps(),
                "busy_shares": list(simulation.busy_shares),
                "makespan_s": simulation.makespan_s,
                "num_preemptions": simulation.num_preemptions,
            }
            for one, rps, simulation in zip(fleet, paced, saturated.pipelines, strict=True)
        ],
    }


def _told(stage: Stage) -> str:
    return f"{stage.shape.gpu.name}×{stage.tp}:{stage.num_layers}"


def _online(name: str, minutes: float) -> list[SimulatedRequest]:
    replayed = minutes * ONLINE_MINUTES[name]
    stretch = ONLINE_WINDOW_MINUTES / ONLINE_MINUTES[name]
    return [
        SimulatedRequest(stretch * one.arrival_s, one.input_tokens, one.output_tokens)
        for one in first_minutes(replayed)
    ]


def latencies(requests: Sequence[RequestTimes]) -> dict[str, dict[str, float]]:
    """Mean and percentiles of each, in seconds."""
    tpots = [times.tpot_s for times in requests if times.tpot_s is not None]
    values = {
        "ttft_s": [times.ttft_s for times in requests],
        "tpot_s": tpots,
        "latency_s": [times.latency_s for times in requests],
    }
    return {
        name: {
            "mean": sum(of) / len(of),
            **{f"p{share}": percentile(of, share / 100) for share in (50, 90, 99)},
        }
        for name, of in values.items()
    }


def report(results: Sequence[dict[str, Any]]) -> str:
    parts = []
    for name in MODELS:
        rows = [one for one in results if one["model"] == name]
        if not rows:
            continue
        parts.append(
            table(
                [name, "estimated", "paced", "saturated", "ours / it", "offline", "ours / it",
                 "in the paper", "USD/h", "requests/USD"],
                [
                    [
                        one["planner"],
                        *(f"{one[key]:.2f}" for key in ("estimated_rps", "paced_rps")),
                        *(
                            f"{value:.2f}"
                            for key in ("saturated_rps", "offline_rps")
                            for value in (one[key], rows[0][key] / one[key])
                        ),
                        _in_paper(name, one["planner"]),
                        f"{one['price_usd_per_hour']:.2f}",
                        f"{one['requests_per_usd']:.0f}",
                    ]
                    for one in rows
                ],
            )
        )  # fmt: skip
        parts.append(
            table(
                [f"{name} online", "TTFT p50 s", "p90", "p99", "TPOT p50 s", "p90", "p99",
                 "latency mean s", "p50", "p90", "p99"],
                [
                    [
                        one["planner"],
                        *(
                            f"{one['online'][key][share]:.2f}"
                            for key, shares in (
                                ("ttft_s", ("p50", "p90", "p99")),
                                ("tpot_s", ("p50", "p90", "p99")),
                                ("latency_s", ("mean", "p50", "p90", "p99")),
                            )
                            for share in shares
                        ),
                    ]
                    for one in rows
                ],
            )
        )  # fmt: skip
        parts.append(
            table(
                [name, "pipelines"],
                [[one["planner"], "; ".join(_picture(one))] for one in rows],
            )
        )
    return "\n\n".join(parts)


def _in_paper(model: str, planner: str) -> str:
    rps = PAPER_RPS[model].get(planner)
    return "" if rps is None else f"{PAPER_RPS[model]['paper'] / rps:.2f} ({rps:.2f})"


def _picture(one: dict[str, Any]) -> list[str]:
    lines = [f"{' '.join(p['stages'])} (B {p['batch']})" for p in one["pipelines"]]
    return [*lines, *one["skipped"]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--only", help="planners whose name holds this")
    arguments = parser.parse_args(argv)
    share = 0.1 if arguments.quick else 1.0
    results = []
    for name in MODELS:
        for planner in PLANNERS:
            if arguments.only is None or arguments.only in planner:
                results.append(judge(name, planner, share))
                print(f"{name} {planner}", file=sys.stderr, flush=True)
    print(report(results))
    if not arguments.quick:
        parameters = {"cluster": CLUSTER, "fidelity": ENGINE.name}
        print(save("placement_plans", parameters=parameters, results=results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
