"""CPU time of everything but the engine core: Shuntyard's front end beside vLLM's own.

    python -m benchmarks.frontend_cost            three rounds each, about a quarter of an hour
    python -m benchmarks.frontend_cost --quick    one short round, to see that it works

Both servers run the same vLLM engine with the same settings on the same model and answer the same
streaming chat completions. What is counted is the CPU time (user and system, all threads):

    shuntyard  the gateway process and the engine host process
    vllm       the process of `vllm.entrypoints.openai.api_server`

Never counted: vLLM's engine core and workers, and the load generator. One server is up at a time
and they take turns, (ours, vLLM), (vLLM, ours), ...: two engines would share the machine's memory
and cores, and one that idles still takes part of both. Each turn is a fresh start, so that luck of
one process (memory layout, page cache) is averaged too. Log output is each server's default, to a
file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]

from benchmarks import processes
from benchmarks.client import Outcome, Spec
from benchmarks.processes import BenchmarkError, cpu_seconds, free_port, run_client
from benchmarks.record import median, percentile, save, table
from server.demo_model import ensure_demo_model
from spot.engines.vllm_compat.environment import apply_default_environment

Kind = Literal["shuntyard", "vllm"]
KINDS: tuple[Kind, Kind] = ("shuntyard", "vllm")

_ENGINE_FLAGS = (
    "--dtype=bfloat16",
    "--max-model-len=2048",
    "--max-num-seqs=64",
    "--max-num-batched-tokens=4096",
    "--enforce-eager",
    "--block-size=32",
    "--no-enable-chunked-prefill",
    "--scheduling-policy=priority",
)
_TEXT = """
    wagon track signal yard hump engine brake coupling switch platform tunnel bridge freight
    driver whistle schedule station rail junction lamp crossing depot gauge buffer cargo
"""
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. levels: concurrency and number of requests of each level."""

    model: str
    num_rounds: int
    levels: tuple[tuple[int, int], ...]
    max_tokens: int
    random_seed: int
    idle_s: float


def bodies(plan: Plan) -> list[str]:
    """Sixty-four requests, no two alike, the same at every call with the same seed."""
    rng = random.Random(plan.random_seed)
    texts = [" ".join(rng.choices(_WORDS, k=rng.randint(20, 60))) for _ in range(64)]
    return [
        json.dumps(
            {
                "model": "bench",
                "messages": [{"role": "user", "content": f"Tell a story with these words: {text}"}],
                "max_tokens": plan.max_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        for text in texts
    ]


class RunningServer:
    """A server under test: where it listens, and which of its processes count."""

    def __init__(self, kind: Kind, port: int, pid: int) -> None:
        self.kind = kind
        self.port = port
        self._pid = pid
        self.counted = self._counted()

    def _counted(self) -> dict[str, int]:
        """Pids of the front end by what they are."""
        if self.kind == "vllm":
            return {"api server": self._pid}
        hosts = [
            child.pid
            for child in psutil.Process(self._pid).children(recursive=True)
            if "spot.engines.host" in child.cmdline()
        ]
        if len(hosts) != 1:
            raise BenchmarkError(f"expected one engine host, found {len(hosts)}")
        return {"gateway": self._pid, "engine host": hosts[0]}

    def cpu_by_part(self) -> dict[str, float]:
        """CPU seconds so far: each counted process, and all others together as `engine`."""
        family = psutil.Process(self._pid).children(recursive=True)
        others = [child.pid for child in family if child.pid not in self.counted.values()]
        parts = {name: cpu_seconds([pid]) for name, pid in self.counted.items()}
        return parts | {"engine": cpu_seconds(others)}


def command_of(kind: Kind, model: str, port: int) -> list[str]:
    """How each server is started."""
    shared = ["--host=127.0.0.1", f"--port={port}", "--served-model-name", "bench", *_ENGINE_FLAGS]
    if kind == "shuntyard":
        # The other server answers each request by itself, and keeps nothing.
        alone = ["--no-share-equal-requests", "--no-workflow-journal"]
        return [sys.executable, "-m", "server", "serve", "--model", model, *shared, *alone]
    module = "vllm.entrypoints.openai.api_server"
    return [sys.executable, "-m", module, "--model", model, *shared]


@contextmanager
def serving(kind: Kind, model: str) -> Iterator[RunningServer]:
    """A server for the time of the block, with an environment that both share."""
    environment = dict(os.environ)
    apply_default_environment(environment)
    port = free_port()
    with processes.serving(command_of(kind, model, port), port, environment=environment) as process:
        yield RunningServer(kind, port, process.pid)


def measure(plan: Plan, kind: Kind) -> list[dict[str, Any]]:
    """One turn of one server: a row per level."""
    rows = []
    with serving(kind, plan.model) as server:
        load = Spec(
            port=server.port, path="/v1/chat/completions", bodies=bodies(plan), mode="closed"
        )
        run_client(_sized(load, concurrency=8, num_requests=16))
        idle = _spent(server, lambda: time.sleep(plan.idle_s))[1]
        for concurrency, num_requests in plan.levels:
            spec = _sized(load, concurrency=concurrency, num_requests=num_requests)
            outcome, cpu_s = _spent(server, lambda spec=spec: run_client(spec))
            wrong = {request.num_tokens for request in outcome.requests} - {plan.max_tokens}
            if wrong:
                raise BenchmarkError(f"answers of {sorted(wrong)} tokens")
            rows.append(
                _row(kind, concurrency, outcome, cpu_s)
                | {"idle_cpu_s_per_s": {k: v / plan.idle_s for k, v in idle.items()}}
            )
    return rows


def _sized(load: Spec, *, concurrency: int, num_requests: int) -> Spec:
    return Spec(
        port=load.port,
        path=load.path,
        bodies=load.bodies,
        mode=load.mode,
        concurrency=concurrency,
        num_requests=num_requests,
    )


def _spent(server: RunningServer, work: Any) -> tuple[Any, dict[str, float]]:
    """What `work` returns, and the CPU time that each part of the server took meanwhile."""
    before = server.cpu_by_part()
    result = work()
    after = server.cpu_by_part()
    return result, {name: after[name] - before[name] for name in after}


def _row(kind: Kind, concurrency: int, outcome: Outcome, cpu_s: dict[str, float]) -> dict[str, Any]:
    origin_s = min(request.start_s for request in outcome.requests)
    return {
        "server": kind,
        "concurrency": concurrency,
        "elapsed_s": outcome.elapsed_s,
        "cpu_s": cpu_s,
        "client_cpu_s": outcome.cpu_s,
        "num_tokens": sum(request.num_tokens for request in outcome.requests),
        "num_events": sum(request.num_events for request in outcome.requests),
        "requests": [
            [
                request.start_s - origin_s,
                request.first_s - origin_s,
                request.end_s - origin_s,
                request.num_events,
                request.num_tokens,
            ]
            for request in outcome.requests
        ],
    }


def _front_end_cpu_s(row: dict[str, Any]) -> float:
    return float(sum(value for name, value in row["cpu_s"].items() if name != "engine"))


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Medians over the rounds, one table of costs with their ratio and one of latencies."""
    costs, latencies, parts = [], [], []
    for concurrency in sorted({row["concurrency"] for row in rows}):
        per_token: dict[str, list[float]] = {kind: [] for kind in KINDS}
        per_request: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for row in rows:
            if row["concurrency"] == concurrency:
                cpu_us = 1e6 * _front_end_cpu_s(row)
                per_token[row["server"]].append(cpu_us / row["num_tokens"])
                per_request[row["server"]].append(cpu_us / len(row["requests"]))
        if not all(per_token.values()):
            continue
        ours, theirs = (median(per_token[kind]) for kind in KINDS)
        ratios = [b / a for a, b in zip(*(per_token[kind] for kind in KINDS), strict=False)]
        costs.append(
            [
                str(concurrency),
                *(f"{median(per_request[kind]) / 1000:.1f}" for kind in KINDS),
                f"{ours:.0f}",
                f"{theirs:.0f}",
                f"{theirs / ours:.2f}",
                f"{min(ratios):.2f}-{max(ratios):.2f}",
            ]
        )
        for kind in KINDS:
            mine = [r for r in rows if r["concurrency"] == concurrency and r["server"] == kind]
            latencies.append([str(concurrency), kind, *_latencies(mine)])
            parts.append([str(concurrency), kind, *_parts(mine)])
    head = ["concurrency", "ours ms/request", "vLLM ms/request", "ours us/token", "vLLM us/token"]
    return "\n\n".join(
        [
            table([*head, "vLLM / ours", "over rounds"], costs),
            table(
                ["concurrency", "server", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "tokens/s"],
                latencies,
            ),
            table(
                ["concurrency", "server", "CPU us/token by process", "engine", "events/request"],
                parts,
            ),
        ]
    )


def _latencies(rows: Sequence[dict[str, Any]]) -> list[str]:
    ttft_s = [first - start for row in rows for start, first, *_ in row["requests"]]
    tpot_s = [
        (end_s - first) / (num_tokens - 1)
        for row in rows
        for _, first, end_s, _, num_tokens in row["requests"]
    ]
    rate = median([row["num_tokens"] / row["elapsed_s"] for row in rows])
    figures = [percentile(values, p) for values in (ttft_s, tpot_s) for p in (0.5, 0.99)]
    return [*(f"{1000 * figure:.1f}" for figure in figures), f"{rate:.0f}"]


def _parts(rows: Sequence[dict[str, Any]]) -> list[str]:
    shares = {
        name: median([1e6 * row["cpu_s"][name] / row["num_tokens"] for row in rows])
        for name in rows[0]["cpu_s"]
    }
    engine = shares.pop("engine")
    named = ", ".join(f"{name} {value:.0f}" for name, value in shares.items())
    events = median([row["num_events"] / len(row["requests"]) for row in rows])
    return [named, f"{engine:.0f}", f"{events:.1f}"]


def _plan(args: argparse.Namespace) -> Plan:
    quick = args.quick
    return Plan(
        model=args.model or str(ensure_demo_model()),
        num_rounds=1 if quick else args.rounds,
        levels=((1, 1), (16, 16)) if quick else ((1, 6), (16, 64), (64, 192)),
        max_tokens=16 if quick else 64,
        random_seed=args.seed,
        idle_s=1.0 if quick else 5.0,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.frontend_cost")
    parser.add_argument("--model", help="folder of a model; the demo model without one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=7, help="of the prompts")
    parser.add_argument("--quick", action="store_true", help="see that it works; measures nothing")
    parser.add_argument("--show", metavar="FILE", help="print the tables of a result file")
    args = parser.parse_args()
    if args.show:
        print(report(json.loads(Path(args.show).read_text())["results"]))
        return 0
    plan = _plan(args)
    rows: list[dict[str, Any]] = []
    path: Path | None = None
    try:
        for number in range(plan.num_rounds):
            for kind in KINDS if number % 2 == 0 else reversed(KINDS):
                print(f"round {number + 1} of {plan.num_rounds}: {kind}", file=sys.stderr)
                rows += [row | {"round": number} for row in measure(plan, kind)]
            if not args.quick:
                path = _save(plan, rows)
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1
    print(report(rows))
    if path is not None:
        print(f"\nraw results: {path}")
    return 0


def _save(plan: Plan, rows: list[dict[str, Any]]) -> Path:
    """Keep the rounds so far: a run that is broken off is worth what it has measured."""
    parameters = {name: getattr(plan, name) for name in Plan.__slots__ if name != "model"}
    parameters["engine_flags"] = list(_ENGINE_FLAGS)
    return save("frontend_cost", parameters=parameters, results=rows)


if __name__ == "__main__":
    sys.exit(main())
