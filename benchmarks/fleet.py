"""What sub-nodes, routing and migration cost and save, on real vLLM engines.

    python -m benchmarks.fleet            all parts, about ten minutes
    python -m benchmarks.fleet --quick    every part once, to see that it works

Parts, each comparing two ways on the same engines in turns:

    preemption  time to first token of an urgent generation while longer ones hold all seats: with
                boundaries between sub-nodes, and with none
    seam        from the loss of a pipeline to the next token, against the bare prefill of prompt
                and output on the pipeline that takes over: lost by SIGKILL, and by an error
    overhead    tokens/s of one pipeline under a backlog: through the fleet, and without it
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

import anyio
import msgspec

from benchmarks.record import median, percentile, save, table
from server.demo_model import ensure_demo_model
from spot.engines.base import DeltaSink, PipelineEngine
from spot.engines.hosted import HostConfig, HostedEngine
from spot.errors import EngineFailed, ShuntyardError
from spot.failover_policy import FailoverPolicy
from spot.fleet import Fleet, PipelineSpec
from spot.generation import Generation, SamplingParams, TokenDelta

_NUM_SEATS = 4
_SUBNODE_TOKENS = 16
_NEVER = 10**9
_SEEDED = SamplingParams(max_tokens=96, temperature=0.8, seed=3, ignore_eos=True)


@dataclass(slots=True)
class Timed:
    """A sink that notes when tokens came."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    error: ShuntyardError | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)
    on_token: Callable[[Timed], None] | None = None

    def on_delta(self, delta: TokenDelta) -> None:
        self.token_ids += delta.token_ids
        self.times_s += [anyio.current_time()] * len(delta.token_ids)
        if delta.finish_reason is not None:
            self.ended.set()
        if self.on_token is not None:
            self.on_token(self)

    def on_error(self, error: ShuntyardError) -> None:
        self.error = error
        self.ended.set()

    async def output(self) -> list[int]:
        with anyio.fail_after(300):
            await self.ended.wait()
        if self.error is not None:
            raise self.error
        return self.token_ids


class Borrowed:
    """An engine that somebody else enters and leaves."""

    def __init__(self, engine: HostedEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return None


class Bench:
    """Two engines of the demo model, and unique prompts."""

    def __init__(self, engines: dict[str, HostedEngine], *, seed: int) -> None:
        self.engines = engines
        self._rng = random.Random(seed)
        self._num_made = 0

    def generation(
        self, num_prompt_tokens: int, sampling: SamplingParams, **more: Any
    ) -> Generation:
        """One with a prompt that no cache knows."""
        self._num_made += 1
        prompt = [self._rng.randrange(1000, 40_000) for _ in range(num_prompt_tokens)]
        return Generation(f"bench-{self._num_made}", prompt, sampling, **more)

    def fleet(self, *names: str, policy: FailoverPolicy | None = None) -> Fleet:
        specs = [PipelineSpec(name, _borrowed(self.engines[name])) for name in names]
        return Fleet(specs, policy=policy)


def _borrowed(engine: HostedEngine) -> PipelineEngine:
    borrowed: Any = Borrowed(engine)
    return borrowed  # type: ignore[no-any-return]


def submit(engine: Any, generation: Generation) -> Timed:
    sink = Timed()
    checked: DeltaSink = sink
    engine.submit(generation, checked)
    return sink


async def measure_preemption(bench: Bench, num_trials: int) -> list[dict[str, Any]]:
    results = []
    async with bench.fleet("a") as fleet:
        await fleet.wait_ready()
        for trial in range(2 * num_trials):
            subnode_tokens = _SUBNODE_TOKENS if trial % 2 else _NEVER
            fleet.state.policy = replace(fleet.state.policy, subnode_tokens=subnode_tokens)
            before = fleet.num_preemptions
            long = [bench.generation(32, _SEEDED, priority=10) for _ in range(_NUM_SEATS)]
            sinks = [submit(fleet, generation) for generation in long]
            await anyio.sleep(1.0)
            start_s = anyio.current_time()
            urgent = submit(
                fleet, bench.generation(32, msgspec.structs.replace(_SEEDED, max_tokens=8))
            )
            await urgent.output()
            outputs = [await sink.output() for sink in sinks]
            num_preempted = fleet.num_preemptions - before
            wholes = [submit(fleet, msgspec.structs.replace(g, id=g.id + "-again")) for g in long]
            equal = [await whole.output() for whole in wholes] == outputs
            results.append(
                {
                    "subnode_tokens": subnode_tokens if subnode_tokens != _NEVER else None,
                    "ttft_s": urgent.times_s[0] - start_s,
                    "num_preempted": num_preempted,
                    "preempted_equal": equal,
                }
            )
    return results


async def measure_seam(bench: Bench, num_errors: int, num_kills: int) -> list[dict[str, Any]]:
    results = []
    async with bench.fleet("a", "b") as fleet:
        await fleet.wait_ready()
        for trial in range(num_errors + num_kills):
            how = "SIGKILL" if trial >= num_errors else "error"
            await _all_serve(fleet)
            results.append(await _one_seam(bench, fleet, how))
    return results


async def _all_serve(fleet: Fleet) -> None:
    with anyio.fail_after(300):
        while any(p["state"] != "serving" for p in fleet.describe()):  # noqa: ASYNC110
            await anyio.sleep(0.1)
    await anyio.sleep(0.5)


async def _one_seam(bench: Bench, fleet: Fleet, how: str) -> dict[str, Any]:
    """Lose a pipeline after 64 tokens, and prefill the same on the other afterwards."""
    num_before = 64
    generation = bench.generation(256, _SEEDED)
    lost_at_s: list[float] = []

    def lose(sink: Timed) -> None:
        if lost_at_s or len(sink.token_ids) < num_before:
            return
        lost_at_s.append(anyio.current_time())
        live = fleet.state.lives[generation.id]
        assert live.pipeline_id is not None
        if how == "error":
            fleet.engine(live.pipeline_id).abort(generation.id)
            fleet.on_leg_error(live, EngineFailed("lost for the benchmark"))
            return
        for pid in fleet.engine(live.pipeline_id).status.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    sink = Timed(on_token=lose)
    fleet.submit(generation, sink)
    output = await sink.output()
    # Tokens that were on their way when the pipeline was killed still count as its own.
    num_carried = sum(time_s <= lost_at_s[0] + 1e-9 for time_s in sink.times_s)
    gaps = [b - a for a, b in zip(sink.times_s, sink.times_s[1:], strict=False)]
    seam_s = max(gaps[num_carried - 1 :])
    target = next(p["id"] for p in fleet.describe() if p["state"] == "serving" and p["migrated_in"])
    bare = msgspec.structs.replace(
        generation,
        id=generation.id + "-bare",
        cache_salt="bare",
        output_token_ids=output[:num_carried],
    )
    start_s = anyio.current_time()
    again = submit(fleet.engine(target), bare)
    rest = await again.output()
    return {
        "how": how,
        "seam_s": seam_s,
        "bare_prefill_s": again.times_s[0] - start_s,
        "equal": rest == output[num_carried:],
    }


async def measure_overhead(bench: Bench, num_rounds: int) -> list[dict[str, Any]]:
    sampling = msgspec.structs.replace(_SEEDED, max_tokens=64)
    results = []
    async with bench.fleet("a") as fleet:
        await fleet.wait_ready()
        for turn in range(2 * num_rounds):
            way = "fleet" if turn % 4 in (0, 3) else "engine"
            generations = [bench.generation(64, sampling) for _ in range(6 * _NUM_SEATS)]
            target = fleet if way == "fleet" else bench.engines["a"]
            start_s = anyio.current_time()
            sinks = [submit(target, generation) for generation in generations]
            for sink in sinks:
                await sink.output()
            elapsed_s = anyio.current_time() - start_s
            num_tokens = sum(len(sink.token_ids) for sink in sinks)
            results.append({"way": way, "tokens_per_s": num_tokens / elapsed_s})
    return results


def report(results: dict[str, Any]) -> str:
    lines = []
    for with_boundaries in (False, True):
        trials = [
            trial
            for trial in results.get("preemption", [])
            if (trial["subnode_tokens"] is not None) == with_boundaries
        ]
        if trials:
            ttft = [trial["ttft_s"] for trial in trials]
            lines.append(
                [
                    f"urgent TTFT, {'16-token sub-nodes' if with_boundaries else 'no boundaries'}",
                    f"p50 {median(ttft):.2f} s, p90 {percentile(ttft, 0.9):.2f} s",
                    f"equal: {all(trial['preempted_equal'] for trial in trials)}",
                ]
            )
    for how in ("error", "SIGKILL"):
        trials = [trial for trial in results.get("seam", []) if trial["how"] == how]
        if trials:
            ratios = [trial["seam_s"] / trial["bare_prefill_s"] for trial in trials]
            lines.append(
                [
                    f"seam after {how}",
                    f"median {median([t['seam_s'] for t in trials]):.3f} s",
                    f"{median(ratios):.2f} of bare prefill; "
                    f"equal: {all(trial['equal'] for trial in trials)}",
                ]
            )
    rates = {
        way: median([r["tokens_per_s"] for r in results.get("overhead", []) if r["way"] == way])
        for way in ("fleet", "engine")
        if results.get("overhead")
    }
    if rates:
        lines.append(
            [
                "throughput of one pipeline",
                f"{rates['fleet']:.1f} tokens/s through the fleet",
                f"{rates['fleet'] / rates['engine']:.3f} of {rates['engine']:.1f} without",
            ]
        )
    return table(["what", "result", ""], lines)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    config = HostConfig(
        {
            "model": str(ensure_demo_model()),
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": _NUM_SEATS,
        },
        min_backoff_s=0.1,
    )
    quick = arguments.quick
    quiet: dict[str, Any] = {"on_line": lambda line: None}
    results: dict[str, Any] = {}
    async with HostedEngine(config, **quiet) as a, HostedEngine(config, **quiet) as b:
        await a.wait_ready()
        await b.wait_ready()
        bench = Bench({"a": a, "b": b}, seed=arguments.seed)
        if "overhead" in arguments.parts:
            results["overhead"] = await measure_overhead(bench, 1 if quick else 3)
        if "preemption" in arguments.parts:
            results["preemption"] = await measure_preemption(bench, 1 if quick else 6)
        if "seam" in arguments.parts:
            results["seam"] = await measure_seam(bench, 1 if quick else 10, 1 if quick else 3)
    return results


PARTS = ("overhead", "preemption", "seam")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="every part once")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    results = anyio.run(run, arguments, backend_options={"use_uvloop": True})
    print(report(results))
    if not arguments.quick:
        parameters = {"seed": arguments.seed, "num_seats": _NUM_SEATS, "dtype": "float32"}
        print(save("fleet", parameters=parameters, results=results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
