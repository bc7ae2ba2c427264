"""A run of one `llm` node beside the same plain chat completion, on one server with a real engine.

    python -m benchmarks.run_overhead                300 pairs of 32 tokens, about five minutes
    python -m benchmarks.run_overhead --pairs 20     to see that it works

One request is under way at a time, over one kept connection: what is measured is the way of a
request, not a queue. The two of a pair take turns in being first, no two prompts are alike, all are
equally long, and all answers have the same number of tokens. Goal: at most 3 % more latency.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Literal

from benchmarks.frontend_cost import serving
from benchmarks.processes import BenchmarkError
from benchmarks.record import median, percentile, save, table
from server.demo_model import ensure_demo_model

Kind = Literal["chat", "run"]
KINDS: tuple[Kind, Kind] = ("chat", "run")

_NUM_RESAMPLED = 2000


def main() -> None:
    """Measure, print, keep the raw times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--warm-up", type=int, default=10, help="pairs that are not counted")
    args = parser.parse_args()
    model = str(ensure_demo_model())
    with tempfile.TemporaryDirectory() as data:
        os.environ["SHUNTYARD_WORKFLOW_DATA"] = data
        with serving("shuntyard", model) as server:
            times = measure(server.port, args.pairs, args.warm_up, args.max_tokens)
    summary = summarise(times)
    path = save(
        "run_overhead",
        parameters={"model": os.path.basename(model), **vars(args)},
        results={"summary": summary, "latency_s": times},
    )
    rows = [
        [kind, *(f"{1000 * summary[kind][name]:.2f}" for name in ("p50_s", "p90_s"))]
        for kind in KINDS
    ]
    print(table(["", "median, ms", "90th percentile, ms"], rows))
    low, high = summary["ratio_95"]
    print(f"ratio of the medians: {summary['ratio']:.4f} (95 %: {low:.4f} to {high:.4f})")
    print(f"median of the differences of pairs: {1000 * summary['difference_s']:.3f} ms")
    print(f"raw times: {path}")


def measure(port: int, num_pairs: int, num_warm: int, max_tokens: int) -> dict[str, list[float]]:
    """Seconds from sending to the whole answer, by kind, pair by pair."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for pair in range(-num_warm, num_pairs):
        for place, kind in enumerate(KINDS if pair % 2 else KINDS[::-1]):
            elapsed_s = _ask(connection, kind, 2 * (pair + num_warm) + place, max_tokens)
            if pair >= 0:
                times[kind].append(elapsed_s)
    connection.close()
    return times


def summarise(times: dict[str, list[float]]) -> dict[str, Any]:
    """Percentiles, the ratio of the medians, and where it lies in resampled pairs."""
    pairs = list(zip(times["chat"], times["run"], strict=True))
    rng = random.Random(1)
    resampled = [_ratio(rng.choices(pairs, k=len(pairs))) for _ in range(_NUM_RESAMPLED)]
    return {
        **{
            kind: {"p50_s": median(times[kind]), "p90_s": percentile(times[kind], 0.9)}
            for kind in KINDS
        },
        "ratio": _ratio(pairs),
        "ratio_95": [percentile(resampled, 0.025), percentile(resampled, 0.975)],
        "difference_s": median([run_s - chat_s for chat_s, run_s in pairs]),
    }


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return median([run_s for _, run_s in pairs]) / median([chat_s for chat_s, _ in pairs])


def _ask(connection: http.client.HTTPConnection, kind: Kind, number: int, max_tokens: int) -> float:
    """Send one request and read its answer. Raises BenchmarkError for another answer."""
    params = {
        "messages": [{"role": "user", "content": f"{number:05d}: what is on this train?"}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    path, body = "/v1/chat/completions", json.dumps(params)
    if kind == "run":
        node = {"id": "a", "op": "llm", "params": params}
        path, body = "/v1/workflows", json.dumps({"nodes": [node]})
    started_s = time.perf_counter()
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    elapsed_s = time.perf_counter() - started_s
    usage = json.loads(content).get("usage", {})
    if response.status != 200 or usage.get("completion_tokens") != max_tokens:
        raise BenchmarkError(f"{path}: {response.status} {content[:500]!r}")
    return elapsed_s


if __name__ == "__main__":
    main()
