"""What one core of gateway can do when the engine costs nothing.

    python -m benchmarks.ceiling            all parts, about four minutes
    python -m benchmarks.ceiling --quick    every part for a moment, to see that it works

The gateway runs on one core, the load generator and the engine's own process on another. Parts:

    requests  answers that are not streamed, 16 tokens in one engine step: requests/s
    streams   128 tokens a stream, one token per engine step: tokens/s and SSE events/s
    latency   200 requests/s at Poisson times: what the gateway adds to the engine's own time
    memory    1,000 streams that wait after their first token: growth of resident memory

Two engines: `in_loop` is the scripted engine on the gateway's own event loop, so that its cost
counts against the gateway; `hosted` has it behind the engine host's protocol, as a real engine is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks.client import Outcome, Spec
from benchmarks.gateway import GatewaySpec
from benchmarks.processes import (
    BenchmarkError,
    RunningGateway,
    gateway,
    holding_client,
    run_client,
)
from benchmarks.record import percentile, save, table
from server.demo_model import ensure_demo_model

_PATH = "/v1/chat/completions"
_ANSWER_TOKENS = 16
_STREAM_TOKENS = 128
_RATE_PER_S = 200.0
_MAX_KEPT_REQUESTS = 500
_PROMPT = "What does a shunting yard do, and why is there a hump in the middle of it?"
EngineKind = Literal["in_loop", "hosted"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how wide to measure. step_budget: tokens/s that a paced engine offers."""

    model: str
    seconds: float
    request_levels: tuple[int, ...]
    stream_levels: tuple[int, ...]
    num_idle_streams: int
    gateway_core: int
    other_core: int
    offered_tokens_per_s: float = 60_000.0


def body(*, stream: bool, max_tokens: int, seeded: bool = False) -> str:
    """One request's JSON."""
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if seeded:
        fields["seed"] = 1111111111
    return json.dumps(fields, separators=(",", ":"))


def spec_of(plan: Plan, engine: EngineKind, **changes: Any) -> GatewaySpec:
    return GatewaySpec(
        model=plan.model,
        engine=engine,
        core=plan.gateway_core,
        engine_core=plan.other_core,
        **changes,
    )


def measure_requests(plan: Plan, engine: EngineKind) -> list[dict[str, Any]]:
    """Closed loop of answers that are not streamed."""
    with gateway(spec_of(plan, engine, tokens_per_step=_ANSWER_TOKENS)) as server:
        load = Spec(
            port=server.port,
            path=_PATH,
            bodies=[body(stream=False, max_tokens=_ANSWER_TOKENS)],
            mode="closed",
            core=plan.other_core,
        )
        _warm_up(load)
        return [
            _measure(server, load, level, plan.seconds, engine) for level in plan.request_levels
        ]


def measure_streams(plan: Plan, engine: EngineKind) -> list[dict[str, Any]]:
    """Closed loop of streams. The hosted engine is paced to offer a little more than the goal."""
    results = []
    for level in plan.stream_levels:
        step_s = level / plan.offered_tokens_per_s if engine == "hosted" else 0.0
        with gateway(spec_of(plan, engine, step_time_s=step_s)) as server:
            load = Spec(
                port=server.port,
                path=_PATH,
                bodies=[body(stream=True, max_tokens=_STREAM_TOKENS)],
                mode="closed",
                core=plan.other_core,
            )
            _warm_up(load)
            result = _measure(server, load, level, plan.seconds, engine)
            results.append(result | {"step_time_s": step_s})
    return results


def _warm_up(load: Spec) -> None:
    run_client(msgspec.structs.replace(load, concurrency=8, num_requests=64))


def _measure(
    server: RunningGateway, load: Spec, level: int, seconds: float, engine: EngineKind
) -> dict[str, Any]:
    cpu_s = server.cpu_s
    outcome = run_client(msgspec.structs.replace(load, concurrency=level, duration_s=seconds))
    cpu_s = server.cpu_s - cpu_s
    expected = _STREAM_TOKENS if '"stream":true' in load.bodies[0] else _ANSWER_TOKENS
    _check_tokens(outcome, expected)
    return {
        "engine": engine,
        "concurrency": level,
        "elapsed_s": outcome.elapsed_s,
        "gateway_cpu_s": cpu_s,
        "client_cpu_s": outcome.cpu_s,
        "num_requests": len(outcome.requests),
        "num_tokens": sum(request.num_tokens for request in outcome.requests),
        "num_events": sum(request.num_events for request in outcome.requests),
        "num_bytes": outcome.num_bytes,
        "first_ms": _percentiles([r.first_s - r.start_s for r in outcome.requests]),
        "end_ms": _percentiles([r.end_s - r.start_s for r in outcome.requests]),
        "requests": _times(outcome),
    }


def _check_tokens(outcome: Outcome, expected: int) -> None:
    wrong = {request.num_tokens for request in outcome.requests} - {expected}
    if wrong:
        raise BenchmarkError(f"answers of {sorted(wrong)} tokens instead of {expected}")


def _times(outcome: Outcome) -> list[list[float]]:
    """Start, first content and end of requests, in seconds from the first start.

    At most 500 of them, evenly spaced over the run, so that result files stay small.
    """
    origin_s = min((request.start_s for request in outcome.requests), default=0.0)
    stride = -(-len(outcome.requests) // _MAX_KEPT_REQUESTS) or 1
    return [
        [request.start_s - origin_s, request.first_s - origin_s, request.end_s - origin_s]
        for request in outcome.requests[::stride]
    ]


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds, over all requests; empty without any."""
    if not seconds:
        return {}
    return {f"p{p}": 1000 * percentile(seconds, p / 100) for p in (50, 99)}


def measure_latency(plan: Plan, *, stream: bool) -> dict[str, Any]:
    """Open loop. Added is the client's time less the engine host's time of the same request."""
    max_tokens = _ANSWER_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        spec = spec_of(
            plan,
            "hosted",
            step_time_s=0.005 if stream else 0.0,
            tokens_per_step=1 if stream else max_tokens,
            times_path=str(path),
        )
        with gateway(spec) as server:
            load = Spec(
                port=server.port,
                path=_PATH,
                bodies=[body(stream=stream, max_tokens=max_tokens, seeded=True)],
                mode="open",
                concurrency=64,
                rate_per_s=_RATE_PER_S,
                core=plan.other_core,
            )
            warm_up = msgspec.structs.replace(load, mode="closed", num_requests=256)
            run_client(msgspec.structs.replace(warm_up, first_seed=1_500_000_000))
            cpu_s = server.cpu_s
            outcome = run_client(msgspec.structs.replace(load, duration_s=2 * plan.seconds))
            cpu_s = server.cpu_s - cpu_s
        engine_times = {int(row[0]): row[1:] for row in msgspec.json.decode(path.read_bytes())}
    _check_tokens(outcome, max_tokens)
    added_s, added_first_s = [], []
    for request in outcome.requests:
        start_s, first_s, end_s = engine_times[request.number]
        added_s.append(request.end_s - request.start_s - (end_s - start_s))
        if stream:
            added_first_s.append(request.first_s - request.start_s - (first_s - start_s))
    return {
        "stream": stream,
        "rate_per_s": _RATE_PER_S,
        "elapsed_s": outcome.elapsed_s,
        "gateway_cpu_s": cpu_s,
        "client_cpu_s": outcome.cpu_s,
        "num_requests": len(outcome.requests),
        "largest_lag_s": outcome.lag_s,
        "added_ms": _percentiles(added_s),
        "added_first_ms": _percentiles(added_first_s),
        "added_s": added_s,
        "added_first_s": added_first_s,
    }


def measure_memory(plan: Plan) -> dict[str, Any]:
    """Resident memory of the gateway before and while streams wait."""
    with gateway(spec_of(plan, "hosted", stall_at_token=1)) as server:
        load = Spec(
            port=server.port,
            path=_PATH,
            bodies=[body(stream=True, max_tokens=_STREAM_TOKENS)],
            mode="hold",
            concurrency=8,
            core=plan.other_core,
        )
        with holding_client(load) as client:
            client.wait_held()
        before = server.rss_bytes
        wide = msgspec.structs.replace(load, concurrency=plan.num_idle_streams)
        with holding_client(wide) as client:
            client.wait_held()
            while_open = server.rss_bytes
    return {
        "num_streams": plan.num_idle_streams,
        "rss_before_bytes": before,
        "rss_open_bytes": while_open,
    }


def report(results: dict[str, Any]) -> str:
    """The results as Markdown tables."""
    parts = []
    if results.get("requests"):
        rows = [
            [
                row["engine"],
                str(row["concurrency"]),
                f"{row['num_requests'] / row['elapsed_s']:,.0f}",
                f"{1e6 * row['gateway_cpu_s'] / row['num_requests']:.0f}",
                f"{100 * row['gateway_cpu_s'] / row['elapsed_s']:.0f} %",
                *_cells(row["end_ms"]),
            ]
            for row in results["requests"]
        ]
        head = ["engine", "concurrency", "requests/s", "CPU us/request", "core used"]
        parts.append(table([*head, "p50 ms", "p99 ms"], rows))
    if results.get("streams"):
        rows = [
            [
                row["engine"],
                str(row["concurrency"]),
                f"{row['num_tokens'] / row['elapsed_s']:,.0f}",
                f"{row['num_events'] / row['elapsed_s']:,.0f}",
                f"{1e6 * row['gateway_cpu_s'] / row['num_tokens']:.1f}",
                f"{100 * row['gateway_cpu_s'] / row['elapsed_s']:.0f} %",
                *_cells(row["first_ms"]),
            ]
            for row in results["streams"]
        ]
        head = ["engine", "concurrency", "tokens/s", "events/s", "CPU us/token", "core used"]
        parts.append(table([*head, "TTFT p50 ms", "TTFT p99 ms"], rows))
    if results.get("latency"):
        rows = []
        for row in results["latency"]:
            kind = "stream" if row["stream"] else "whole answer"
            rows.append([f"{kind}: to the end", *_cells(row["added_ms"])])
            if row["added_first_ms"]:
                rows.append([f"{kind}: to the first token", *_cells(row["added_first_ms"])])
        parts.append(table(["added at 200 requests/s", "p50 ms", "p99 ms"], rows))
    if results.get("memory"):
        row = results["memory"]
        growth = row["rss_open_bytes"] - row["rss_before_bytes"]
        line = [
            str(row["num_streams"]),
            f"{growth / 1e6:.0f}",
            f"{growth / row['num_streams'] / 1e3:.0f}",
        ]
        parts.append(table(["idle streams", "RSS growth MB", "kB per stream"], [line]))
    return "\n\n".join(parts)


def _cells(percentiles: dict[str, float]) -> list[str]:
    return [f"{value:.2f}" for value in percentiles.values()]


def _plan(args: argparse.Namespace) -> Plan:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchmarkError("two cores are needed: one for the gateway, one for the load")
    quick = args.quick
    return Plan(
        model=args.model or str(ensure_demo_model()),
        seconds=1.0 if quick else args.seconds,
        request_levels=(1, 32) if quick else (1, 8, 32, 128, 256),
        stream_levels=(16,) if quick else (1, 16, 64, 256, 1000),
        num_idle_streams=100 if quick else 1000,
        gateway_core=cores[0],
        other_core=cores[1],
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.ceiling", description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder with a tokenizer; the demo model without one")
    parser.add_argument("--seconds", type=float, default=6.0, help="time per level")
    parser.add_argument("--engine", choices=["in_loop", "hosted"], help="only this one")
    parser.add_argument("--part", choices=["requests", "streams", "latency", "memory"])
    parser.add_argument("--quick", action="store_true", help="see that it works; measures nothing")
    parser.add_argument("--no-save", action="store_true", help="write no result file")
    parser.add_argument("--show", metavar="FILE", help="print the tables of a result file")
    args = parser.parse_args()
    if args.show:
        print(report(json.loads(Path(args.show).read_text())["results"]))
        return 0
    try:
        plan = _plan(args)
        results = _measure_all(plan, args)
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1
    print(report(results))
    if not (args.quick or args.no_save):
        parameters = {name: getattr(plan, name) for name in Plan.__slots__ if name != "model"}
        print(f"\nraw results: {save('ceiling', parameters=parameters, results=results)}")
    return 0


def _measure_all(plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    engines: list[EngineKind] = [args.engine] if args.engine else ["in_loop", "hosted"]
    results: dict[str, Any] = {}
    if args.part in (None, "requests"):
        results["requests"] = [row for engine in engines for row in measure_requests(plan, engine)]
    if args.part in (None, "streams"):
        results["streams"] = [row for engine in engines for row in measure_streams(plan, engine)]
    if args.part in (None, "latency"):
        results["latency"] = [measure_latency(plan, stream=stream) for stream in (False, True)]
    if args.part in (None, "memory"):
        results["memory"] = measure_memory(plan)
    return results


if __name__ == "__main__":
    sys.exit(main())
