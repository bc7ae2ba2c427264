"""Exact resume on the real engine, in float32: cut anywhere, a generation ends as it would have."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import anyio
import msgspec
import pytest

from server.demo_model import ensure_demo_model
from server.text.tokenizer import ChatTokenizer
from spot.engines.hosted import HostConfig, HostedEngine
from spot.generation import Generation, SamplingParams, StructuredOutput, TokenDelta
from tests.sink import Sink

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(300)]

NUM_TOKENS = 40
NUM_CUTS = 4
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = StructuredOutput(json_schema=json.dumps(SCHEMA), disable_any_whitespace=True)


def vary(**changes: Any) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, **changes)


CASES = {
    "greedy": GREEDY,
    "presence": vary(presence_penalty=1.2),
    "frequency": vary(frequency_penalty=0.8),
    "repetition": vary(repetition_penalty=1.3),
    "seed": vary(seed=1234, temperature=0.9, top_p=0.95),
    "seed+penalty": vary(seed=7, temperature=1.0, top_k=50, frequency_penalty=0.5),
    "seed+min_p": vary(seed=5, temperature=1.0, min_p=0.05),
    "json": vary(structured=JSON, ignore_eos=False),
    "json+seed": vary(structured=JSON, ignore_eos=False, seed=3, temperature=1.0),
    "min_tokens": vary(min_tokens=30, ignore_eos=False, stop_token_ids=[28, 30, 198]),
    "bad_words": vary(bad_words=["the", " a", "."]),
    "logit_bias": vary(logit_bias={28: 4.0, 30: -8.0}),
    "logprobs": vary(logprobs=3),
    "prompt_logprobs": vary(prompt_logprobs=1, logprobs=0),
    "long": vary(seed=11, temperature=0.7, max_tokens=2 * NUM_TOKENS),
}


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[HostedEngine]:
    config = HostConfig(
        {
            "model": str(ensure_demo_model()),
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 8,
        },
        start_timeout_s=250,
    )
    async with HostedEngine(config, on_line=print) as hosted:
        await hosted.wait_ready()
        yield hosted


@pytest.fixture(scope="module")
def prompt_token_ids() -> list[int]:
    tokenizer = ChatTokenizer.load(ensure_demo_model())
    question = "Write a JSON record about a person: name, age, tags. Then tell a story."
    return tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": question}]))


class Runner:
    """Runs generations under fresh ids."""

    def __init__(self, engine: HostedEngine) -> None:
        self._engine = engine
        self._count = 0

    async def run(self, generation: Generation) -> TokenDelta:
        self._count += 1
        sink = Sink()
        self._engine.submit(
            msgspec.structs.replace(generation, id=f"{generation.id}-{self._count}"), sink
        )
        return await sink.output()


@pytest.fixture(scope="module")
def runner(engine: HostedEngine) -> Runner:
    return Runner(engine)


async def test_the_engine_says_that_it_resumes_exactly(engine: HostedEngine) -> None:
    assert engine.card is not None
    assert engine.card.resume == "exact"


@pytest.mark.parametrize("name", CASES)
async def test_resumed_equals_uninterrupted(
    name: str, runner: Runner, prompt_token_ids: list[int]
) -> None:
    sampling = CASES[name]
    whole = await runner.run(Generation(name, prompt_token_ids, sampling))
    num_output = len(whole.token_ids)
    rng = random.Random(name)
    cuts = sorted(rng.sample(range(1, num_output), min(NUM_CUTS, num_output - 1)))
    assert cuts

    async def resume_at(cut: int) -> None:
        generation = Generation(
            name, prompt_token_ids, sampling, output_token_ids=whole.token_ids[:cut]
        )
        rest = await runner.run(generation)
        assert rest.token_ids == whole.token_ids[cut:], f"cut at {cut}"
        assert rest.finish_reason == whole.finish_reason
        assert rest.stop_token_id == whole.stop_token_id
        assert rest.prompt_logprobs is None
        _assert_same_logprobs(rest, whole, cut)

    async with anyio.create_task_group() as tasks:
        for cut in cuts:
            tasks.start_soon(resume_at, cut)


def _assert_same_logprobs(rest: TokenDelta, whole: TokenDelta, cut: int) -> None:
    if whole.logprobs is None:
        assert rest.logprobs is None
        return
    assert rest.logprobs is not None
    for ours, theirs in zip(rest.logprobs, whole.logprobs[cut:], strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.rank == theirs.rank
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


async def test_aborting_a_resumed_generation_frees_it(
    engine: HostedEngine, prompt_token_ids: list[int]
) -> None:
    sink = Sink()
    sampling = vary(structured=JSON, ignore_eos=False)
    engine.submit(Generation("gone", prompt_token_ids, sampling, output_token_ids=[107]), sink)
    engine.abort("gone")
    with anyio.fail_after(20):
        while engine.stats.running or engine.stats.waiting:  # noqa: ASYNC110 - the engine's word
            await anyio.sleep(0.05)


async def test_output_that_the_grammar_forbids_is_an_error(
    engine: HostedEngine, prompt_token_ids: list[int]
) -> None:
    sink = Sink()
    sampling = vary(structured=JSON, ignore_eos=False)
    engine.submit(Generation("bad", prompt_token_ids, sampling, output_token_ids=[5, 6, 7]), sink)
    await sink.ended()
    assert sink.error is not None
