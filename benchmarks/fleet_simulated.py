"""Routing and failover of the fleet over simulated pipelines, in virtual time.

    python -m benchmarks.fleet_simulated            both parts, about a minute
    python -m benchmarks.fleet_simulated --quick    both for a moment, to see that they work

Parts:

    fairness   three pipelines of speeds 5:3:1 under a backlog: tokens/s of the fleet against the
               sum of the three alone; and again after the fastest has slowed to half
    chaos      three equal pipelines, of which one is lost every 20 s or so and back after 30 s:
               exact resume, against starting again from the beginning as a proxy with retries
               does. Tokens that were generated twice, and the time until the last token

The fleet is the code that serves; only its engines and its clock are simulated.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import anyio.lowlevel

from benchmarks.record import median, percentile, save, table
from placement.simulator.step_time import LinearStepTime
from spot.engines.hash_model import RollingModel
from spot.engines.simulated import SimulatedEngine
from spot.errors import EngineUnavailable, ShuntyardError
from spot.fleet import Fleet, PipelineSpec
from spot.generation import Generation, SamplingParams, TokenDelta
from spot.routing import SmoothWeightedRoundRobin
from spot.virtual_time import run_virtual

_SPEEDS = {"fast": 5.0, "middle": 3.0, "slow": 1.0}
_NUM_SEATS = 32
Way = Literal["resume", "restart"]


def new_engine(speed: float = 1.0) -> SimulatedEngine:
    """About 1,000 tokens/s at full seats and speed 1, in 30 ms steps."""
    step = LinearStepTime(base_s=0.02, per_prefill_token_s=5e-5, per_decode_seq_s=3e-4)
    engine = SimulatedEngine(
        [step],
        RollingModel(32_000, 2),
        num_kv_blocks=4096,
        max_num_seqs=_NUM_SEATS,
        enable_prefix_caching=True,
    )
    engine.speed = speed
    return engine


@dataclass(slots=True)
class Stream:
    """One request: when it began, what it got, when it ended."""

    generation: Generation
    start_s: float
    num_tokens: int = 0
    num_wasted: int = 0
    end_s: float | None = None
    error: str = ""
    ended: anyio.Event = field(default_factory=anyio.Event)

    def on_delta(self, delta: TokenDelta) -> None:
        self.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.end_s = anyio.current_time()
            self.ended.set()

    def on_error(self, error: ShuntyardError) -> None:
        self.error = error.message
        self.ended.set()


class Work:
    """Requests with lengths like a chat's: log-normal prompts and outputs."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._num_made = 0

    def next(self) -> Generation:
        self._num_made += 1
        rng = self._rng
        num_prompt = min(2000, int(rng.lognormvariate(5.5, 0.8)) + 1)
        num_output = min(1000, int(rng.lognormvariate(5.0, 0.6)) + 1)
        prompt = [rng.randrange(3, 32_000) for _ in range(num_prompt)]
        sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        return Generation(f"g{self._num_made}", prompt, sampling)

    def pause_s(self, rate_per_s: float) -> float:
        return self._rng.expovariate(rate_per_s)


async def backlog(fleet: Fleet, work: Work, *, depth: int) -> None:
    """Keep so many generations in the fleet."""

    async def client() -> None:
        while True:
            generation = work.next()
            stream = Stream(generation, anyio.current_time())
            fleet.submit(generation, stream)
            await stream.ended.wait()

    async with anyio.create_task_group() as tasks:
        for _ in range(depth):
            tasks.start_soon(client)


async def measure_fairness(seed: int, seconds: float) -> list[dict[str, Any]]:
    """Tokens/s of each alone, of all in one fleet, and of all after a slow-down."""
    results = []
    for slowed in (False, True):
        speeds = dict(_SPEEDS)
        if slowed:
            speeds["fast"] /= 2
        alone = [
            await _throughput({name: speed}, None, seed, seconds) for name, speed in speeds.items()
        ]
        together = await _throughput(_SPEEDS, speeds if slowed else None, seed, seconds)
        sum_alone = sum(sum(rates.values()) for rates in alone)
        results.append(
            {
                "fast_slowed_to_half": slowed,
                "alone_tokens_per_s": {k: v for rates in alone for k, v in rates.items()},
                "fleet_tokens_per_s": together,
                "ratio": sum(together.values()) / sum_alone,
            }
        )
    return results


async def _throughput(
    speeds: dict[str, float], later: dict[str, float] | None, seed: int, seconds: float
) -> dict[str, float]:
    """Tokens/s by pipeline after a warm-up. later: speeds that hold from half of it on."""
    engines = {name: new_engine(speed) for name, speed in speeds.items()}
    specs = [PipelineSpec(name, engine, speeds[name]) for name, engine in engines.items()]
    async with Fleet(specs) as fleet, anyio.create_task_group() as tasks:
        await fleet.wait_ready()
        await anyio.sleep(1.0)  # until the fleet has seen all of them ready
        tasks.start_soon(lambda: backlog(fleet, Work(seed), depth=4 * _NUM_SEATS * len(engines)))
        await anyio.sleep(seconds / 4)
        for name, speed in (later or {}).items():
            engines[name].speed = speed
        await anyio.sleep(seconds / 4)
        before = {p.id: p.num_tokens for p in fleet.state.pipelines.values()}
        await anyio.sleep(seconds)
        rates = {
            p.id: (p.num_tokens - before[p.id]) / seconds for p in fleet.state.pipelines.values()
        }
        tasks.cancel_scope.cancel()
    return rates


class RestartingProxy:
    """Weighted round robin over engines; a request whose engine fails starts again elsewhere."""

    def __init__(self, engines: dict[str, SimulatedEngine]) -> None:
        self._engines = engines
        self._turns = SmoothWeightedRoundRobin()

    async def serve(self, stream: Stream) -> None:
        attempt = 0
        while stream.end_s is None:
            up = {name: 1.0 for name, e in self._engines.items() if e.status.state == "ready"}
            if not up:
                await anyio.sleep(0.1)
                continue
            attempt += 1
            stream.num_tokens, stream.error, stream.ended = 0, "", anyio.Event()
            name = self._turns.pick(up)
            try:
                self._engines[name].submit(stream.generation, stream)
            except EngineUnavailable:
                continue
            await stream.ended.wait()
            if stream.error:
                stream.num_wasted += stream.num_tokens


async def measure_chaos(seed: int, seconds: float, way: Way) -> dict[str, Any]:
    engines = {name: new_engine() for name in ("a", "b", "c")}
    work, trouble = Work(seed), random.Random(seed)
    streams: list[Stream] = []
    num_losses = 0

    async def lose() -> None:
        nonlocal num_losses
        while True:
            # The same losses at the same times, whatever the load does.
            await anyio.sleep(trouble.expovariate(1 / 20))
            victim = engines[trouble.choice(list(engines))]
            num_up = sum(engine.status.state == "ready" for engine in engines.values())
            if num_up > 1 and victim.status.state == "ready":
                num_losses += 1
                tasks.start_soon(_lose_one, victim)

    async def arrive(fleet: Fleet | None, proxy: RestartingProxy) -> None:
        end_s = anyio.current_time() + seconds
        async with anyio.create_task_group() as open_streams:
            while anyio.current_time() < end_s:
                await anyio.sleep(work.pause_s(7.0))
                generation = work.next()
                stream = Stream(generation, anyio.current_time())
                streams.append(stream)
                if fleet is None:
                    open_streams.start_soon(proxy.serve, stream)
                else:
                    fleet.submit(generation, stream)
            for stream in streams:
                while stream.end_s is None and not (fleet is not None and stream.error):
                    await stream.ended.wait()
                    await anyio.lowlevel.checkpoint()

    specs = [PipelineSpec(name, engine) for name, engine in engines.items()]
    async with anyio.create_task_group() as tasks, Fleet(specs) as fleet:
        await fleet.wait_ready()
        tasks.start_soon(lose)
        await arrive(fleet if way == "resume" else None, RestartingProxy(engines))
        tasks.cancel_scope.cancel()
    latencies = [stream.end_s - stream.start_s for stream in streams if stream.end_s is not None]
    return {
        "way": way,
        "num_streams": len(streams),
        "num_losses": num_losses,
        "num_failed": sum(stream.end_s is None for stream in streams),
        "num_migrations": fleet.num_migrations,
        "wasted_tokens": sum(stream.num_wasted for stream in streams),
        "output_tokens": sum(stream.num_tokens for stream in streams),
        "latency_s": {
            "p50": median(latencies),
            "p90": percentile(latencies, 0.9),
            "p99": percentile(latencies, 0.99),
        },
    }


async def _lose_one(engine: SimulatedEngine) -> None:
    engine.die("taken away")
    await anyio.sleep(30)
    engine.revive()


def report(results: dict[str, Any]) -> str:
    lines = []
    for item in results.get("fairness", []):
        shares = ", ".join(f"{k} {v:,.0f}" for k, v in item["fleet_tokens_per_s"].items())
        lines.append(
            [
                "fastest slowed to half" if item["fast_slowed_to_half"] else "speeds 5:3:1",
                f"{item['ratio']:.3f} of the sum alone",
                f"tokens/s: {shares}",
            ]
        )
    for item in results.get("chaos", []):
        latency: dict[str, float] = item["latency_s"]
        lines.append(
            [
                f"{item['num_losses']} losses, {item['way']}",
                ", ".join(f"{share} {value:.1f} s" for share, value in latency.items()),
                f"{item['wasted_tokens']:,} of {item['output_tokens']:,} tokens wasted, "
                f"{item['num_failed']} of {item['num_streams']} streams failed",
            ]
        )
    return table(["what", "result", ""], lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="both for a moment")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    seconds = 20.0 if arguments.quick else 300.0
    ways: tuple[Way, Way] = ("resume", "restart")
    results = {
        "fairness": run_virtual(measure_fairness, arguments.seed, seconds),
        "chaos": [run_virtual(measure_chaos, arguments.seed, 4 * seconds, way) for way in ways],
    }
    print(report(results))
    if not arguments.quick:
        parameters = {"seed": arguments.seed, "seconds": seconds, "num_seats": _NUM_SEATS}
        print(save("fleet_simulated", parameters=parameters, results=results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
