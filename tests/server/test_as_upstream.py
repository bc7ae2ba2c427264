"""This server is an upstream as good as vLLM: one Shuntyard may stand before another."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from spot.engines.scripted import Faults, ScriptedEngine
from spot.engines.upstream import UpstreamConfig, UpstreamEngine
from spot.errors import EngineFailed, InvalidRequest
from spot.fleet import Fleet, PipelineSpec
from spot.generation import Generation, SamplingParams
from tests.harness import Server, serving
from tests.sink import Sink

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7]


def in_front_of(server: Server) -> UpstreamEngine:
    return UpstreamEngine(UpstreamConfig(server.url))


def generation(name: str = "g", **sampling: Any) -> Generation:
    return Generation(name, PROMPT, SamplingParams(**{"max_tokens": 12, **sampling}))


async def run(engine: UpstreamEngine | ScriptedEngine, given: Generation) -> Sink:
    sink = Sink()
    engine.submit(given, sink)
    return await sink.ended()


async def test_it_tells_what_it_is() -> None:
    with serving(max_model_len=777) as server:
        async with in_front_of(server) as engine:
            card = await engine.wait_ready()
            assert card.max_model_len == 777
            assert card.vocab_size == server.engine.card.vocab_size
            assert card.max_logprobs == 20
            assert card.engine.startswith("shuntyard ")
            assert "Shuntyard" in engine.status.detail


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"seed": 3},
        {"seed": 3, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 0.0, "logprobs": 4},
        {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 1},
        {"temperature": 0.0, "logit_bias": {77: 30.0}, "stop_token_ids": [77]},
        {"temperature": 0.0, "allowed_token_ids": [30, 31, 32], "ignore_eos": True},
        {"seed": 3, "min_tokens": 12, "max_tokens": 12},
    ],
)
async def test_its_tokens_go_through_unchanged(sampling: dict[str, Any]) -> None:
    with serving() as server:
        card = server.engine.card
        alone = ScriptedEngine(
            vocab_size=card.vocab_size,
            eos_token_id=server.engine.eos_token_id,
            max_model_len=card.max_model_len,
        )
        async with in_front_of(server) as engine, alone:
            await engine.wait_ready()
            wanted = await (await run(alone, generation(**sampling))).output()
            through = await (await run(engine, generation(**sampling))).output()
            assert through.token_ids == wanted.token_ids
            assert through.finish_reason == wanted.finish_reason
            assert through.stop_token_id == wanted.stop_token_id
            if sampling.get("logprobs") is not None:
                assert through.logprobs is not None
                assert wanted.logprobs is not None
                for got, entry in zip(through.logprobs, wanted.logprobs, strict=True):
                    assert got.token_ids == entry.token_ids
                    assert got.logprobs == pytest.approx(entry.logprobs)
            if sampling.get("prompt_logprobs") is not None:
                assert through.prompt_logprobs is not None
                assert wanted.prompt_logprobs is not None
                for figures, own in zip(
                    through.prompt_logprobs, wanted.prompt_logprobs, strict=True
                ):
                    assert (figures and figures.token_ids) == (own and own.token_ids)


async def test_its_refusals_name_the_field() -> None:
    with serving() as server:
        async with in_front_of(server) as engine:
            await engine.wait_ready()
            sink = await run(engine, generation(top_p=7.0))
            assert isinstance(sink.error, InvalidRequest)
            assert sink.error.param == "top_p"


async def test_an_abort_reaches_its_engine() -> None:
    with serving(step_time_s=0.01) as server:
        async with in_front_of(server) as engine:
            await engine.wait_ready()
            sink = Sink()
            engine.submit(generation(max_tokens=2000, ignore_eos=True), sink)
            await sink.started.wait()
            engine.abort("g")
            with anyio.fail_after(5):
                while server.engine.stats.running:  # noqa: ASYNC110 - it is in another thread
                    await anyio.sleep(0.01)


async def test_its_engines_death_is_a_failure() -> None:
    with serving(step_time_s=0.01) as server:
        async with in_front_of(server) as engine:
            await engine.wait_ready()
            sink = Sink()
            engine.submit(generation(max_tokens=2000, ignore_eos=True), sink)
            await sink.started.wait()
            server.call(server.engine.die)
            assert isinstance((await sink.ended()).error, EngineFailed)
            server.call(server.engine.revive)


async def test_a_fleet_of_upstreams_survives_the_loss_of_one() -> None:
    """Whichever takes it first: the one that dies is tried, and the output stays the same."""
    with serving() as healthy, serving(faults=Faults(die_at_token=5)) as dying:
        specs = [
            PipelineSpec("dying", in_front_of(dying), weight=1000.0),
            PipelineSpec("healthy", in_front_of(healthy), weight=1.0),
        ]
        async with Fleet(specs) as fleet:
            given = generation(temperature=0.0, ignore_eos=True)
            with anyio.fail_after(10):
                while any(p["state"] != "serving" for p in fleet.describe()):  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            sink = Sink()
            fleet.submit(given, sink)
            through = await sink.output()
            assert through.num_migrations == 1
            healthy_sink = Sink()
            fleet.submit(generation("again", temperature=0.0, ignore_eos=True), healthy_sink)
            wanted = await healthy_sink.output()
            assert wanted.num_migrations == 0
            assert through.token_ids == wanted.token_ids
        dying.call(dying.engine.revive)
