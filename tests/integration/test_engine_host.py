"""The real vLLM engine behind its host. One start serves the whole file; the last test kills it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from spot.engines.hosted import HostConfig, HostedEngine
from spot.errors import EngineFailed, InvalidRequest
from spot.generation import Generation, SamplingParams, StructuredOutput
from spot.kept_outputs import KeptOutputs
from spot.shared_generations import SharedGenerations
from tests.sink import Sink

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(300)]

MAX_MODEL_LEN = 2048
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
def model_path() -> Path:
    if path := os.environ.get("SHUNTYARD_TEST_MODEL"):
        return Path(path)
    from server.demo_model import ensure_demo_model

    return ensure_demo_model()


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model_path))


@pytest.fixture(scope="module")
async def engine(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[HostedEngine]:
    """On a machine without a compiler, and without what one left behind: nothing may need it."""
    config = HostConfig(
        {
            "model": str(model_path),
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": MAX_MODEL_LEN,
            "max_num_seqs": 8,
        },
        env={
            "CXX": "/nonexistent/c++",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor")),
        },
        start_timeout_s=250,
    )
    async with HostedEngine(config, on_line=print) as hosted:
        await hosted.wait_ready()
        yield hosted


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> list[int]:
    messages = [{"role": "user", "content": "Tell me about the sea in one sentence."}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


class Submitter:
    """Submits generations under fresh ids."""

    def __init__(self, engine: HostedEngine) -> None:
        self._engine = engine
        self._number = 0

    def __call__(self, prompt: list[int], sampling: SamplingParams, **options: Any) -> Sink:
        self._number += 1
        sink = Sink()
        self.last_id = f"test-{id(self)}-{self._number}"
        self._engine.submit(Generation(self.last_id, prompt, sampling, **options), sink)
        return sink


@pytest.fixture
def submit(engine: HostedEngine) -> Submitter:
    return Submitter(engine)


def with_changes(sampling: SamplingParams, **changes: Any) -> SamplingParams:
    return msgspec.structs.replace(sampling, **changes)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    with anyio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.02)


async def test_the_card_tells_the_engines_limits(engine: HostedEngine) -> None:
    card = engine.card
    assert card is not None
    assert (card.max_model_len, card.engine, card.max_num_seqs) == (MAX_MODEL_LEN, "vllm", 8)
    assert card.vocab_size > 1000
    assert card.num_kv_blocks * card.block_size >= MAX_MODEL_LEN
    assert len(engine.status.pids) >= 2


async def test_greedy_output_is_repeatable_and_streams(
    submit: Submitter, prompt: list[int]
) -> None:
    first, second = submit(prompt, GREEDY), submit(prompt, GREEDY)
    output = await first.output()
    assert len(output.token_ids) == 24
    assert output.finish_reason == "length"
    assert first.num_deltas > 12
    assert (await second.output()).token_ids == output.token_ids


async def test_the_models_own_end_is_a_stop(
    submit: Submitter, prompt: list[int], tokenizer: Any
) -> None:
    output = await submit(prompt, SamplingParams(max_tokens=200, temperature=0.0)).output()
    assert output.finish_reason == "stop"
    assert output.stop_token_id is None
    assert output.token_ids[-1] == tokenizer.eos_token_id
    assert "sea" in tokenizer.decode(output.token_ids)


async def test_a_stop_token_ends_the_output_and_is_named(
    submit: Submitter, prompt: list[int]
) -> None:
    whole = (await submit(prompt, GREEDY).output()).token_ids
    stop = whole[7]
    output = await submit(prompt, with_changes(GREEDY, stop_token_ids=[stop])).output()
    assert output.finish_reason == "stop"
    assert output.stop_token_id == stop
    assert output.token_ids == whole[: whole.index(stop) + 1]


async def test_a_prefix_that_was_seen_is_cached(
    submit: Submitter, prompt: list[int], engine: HostedEngine
) -> None:
    assert engine.card is not None
    long_prompt = prompt * 3
    await submit(long_prompt, with_changes(GREEDY, max_tokens=1)).output()
    output = await submit(long_prompt, with_changes(GREEDY, max_tokens=1)).output()
    whole_blocks = len(long_prompt) // engine.card.block_size
    assert output.num_cached_tokens == whole_blocks * engine.card.block_size
    assert engine.stats.prefix_cache_hits >= output.num_cached_tokens


async def test_a_replay_is_what_the_engine_would_say_again(
    engine: HostedEngine, submit: Submitter, prompt: list[int]
) -> None:
    sampling = SamplingParams(max_tokens=200, temperature=0.0, logprobs=2, prompt_logprobs=1)
    shared = SharedGenerations(engine, KeptOutputs(ttl_s=600, max_bytes=2**20))
    first, replayed = Sink(), Sink()
    assert shared.submit(Generation("replay-1", prompt, sampling), first) is None
    said = await first.output()
    assert said.finish_reason == "stop"
    assert shared.submit(Generation("replay-2", prompt, sampling), replayed) == "cache"
    output, again = await replayed.output(), await submit(prompt, sampling).output()
    assert output.token_ids == said.token_ids == again.token_ids
    assert (output.logprobs, output.prompt_logprobs) == (said.logprobs, said.prompt_logprobs)
    assert len(output.logprobs or ()) == len(output.token_ids)
    assert (output.stop_token_id, output.finish_reason) == (None, "stop")


async def test_a_cache_salt_keeps_prefixes_apart(submit: Submitter, prompt: list[int]) -> None:
    once = with_changes(GREEDY, max_tokens=1)
    await submit(prompt * 3, once, cache_salt="one").output()
    output = await submit(prompt * 3, once, cache_salt="two").output()
    assert output.num_cached_tokens == 0


async def test_logprobs_begin_with_the_sampled_token(submit: Submitter, prompt: list[int]) -> None:
    plain, three, none = (
        submit(prompt, GREEDY),
        submit(prompt, with_changes(GREEDY, logprobs=3)),
        submit(prompt, with_changes(GREEDY, logprobs=0)),
    )
    output = await three.output()
    assert output.logprobs is not None
    assert [entry.token_ids[0] for entry in output.logprobs] == output.token_ids
    for entry in output.logprobs:
        assert len(entry.token_ids) == len(entry.logprobs) == 4
        assert entry.rank == 1
        assert entry.token_ids[0] == entry.token_ids[1]
        assert entry.logprobs[1:] == sorted(entry.logprobs[1:], reverse=True)
    only = (await none.output()).logprobs
    assert only is not None
    assert [len(entry.token_ids) for entry in only] == [1] * 24
    assert (await plain.output()).logprobs is None


async def test_prompt_logprobs_agree_with_those_of_the_output(
    submit: Submitter, prompt: list[int]
) -> None:
    output = await submit(prompt, with_changes(GREEDY, logprobs=0)).output()
    again = prompt + output.token_ids
    scored = await submit(again, with_changes(GREEDY, max_tokens=1, prompt_logprobs=2)).output()
    entries = scored.prompt_logprobs
    assert entries is not None
    assert output.logprobs is not None
    assert len(entries) == len(again)
    assert entries[0] is None
    for entry, token_id in zip(entries[1:], again[1:], strict=True):
        assert entry is not None
        assert entry.token_ids[0] == token_id
        assert len(entry.token_ids) == 3
    for entry, sampled in zip(entries[len(prompt) :], output.logprobs, strict=True):
        assert entry is not None
        assert entry.logprobs[0] == pytest.approx(sampled.logprobs[0], abs=0.15)


async def test_a_prompt_of_one_token_has_one_empty_prompt_logprob(submit: Submitter) -> None:
    output = await submit([1], with_changes(GREEDY, max_tokens=1, prompt_logprobs=1)).output()
    assert output.prompt_logprobs == [None]


async def test_an_abort_frees_within_a_second(
    submit: Submitter, prompt: list[int], engine: HostedEngine
) -> None:
    sinks = [submit(prompt, with_changes(GREEDY, max_tokens=1500)) for _ in range(2)]
    ids = [submit.last_id[:-1] + str(number) for number in (1, 2)]
    for sink in sinks:
        await sink.started.wait()
    assert engine.stats.running == 2
    for generation_id in ids:
        engine.abort(generation_id)
    await until(lambda: engine.stats.running == 0, 1.0)
    seen = [sink.num_deltas for sink in sinks]
    await submit(prompt, GREEDY).output()
    assert [sink.num_deltas for sink in sinks] == seen
    assert engine.stats.kv_cache_usage < 0.01


async def test_seeded_prompts_beyond_the_steps_budget_do_not_kill_the_engine(
    submit: Submitter, prompt: list[int], engine: HostedEngine
) -> None:
    seeded = SamplingParams(max_tokens=8, seed=7, ignore_eos=True)
    long_prompt = (prompt * 60)[:1500]
    sinks = [submit(long_prompt[offset:], seeded) for offset in (0, 1, 2)]
    again = submit(long_prompt, seeded)
    outputs = [(await sink.output()).token_ids for sink in sinks]
    assert [len(output) for output in outputs] == [8, 8, 8]
    assert (await again.output()).token_ids == outputs[0]
    assert engine.status.num_restarts == 0


async def test_the_longest_prompt_is_served(submit: Submitter, prompt: list[int]) -> None:
    longest = (prompt * 60)[: MAX_MODEL_LEN - 1]
    output = await submit(longest, SamplingParams(max_tokens=50, seed=1)).output()
    assert len(output.token_ids) == 1
    assert output.finish_reason in ("length", "stop")


async def test_output_follows_a_json_schema(
    submit: Submitter, prompt: list[int], tokenizer: Any
) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["sea", "lake"]}, "deep": {"type": "boolean"}},
        "required": ["name", "deep"],
        "additionalProperties": False,
    }
    sampling = SamplingParams(
        max_tokens=64, temperature=0.0, structured=StructuredOutput(json_schema=schema)
    )
    output = await submit(prompt, sampling).output()
    parsed = json.loads(tokenizer.decode(output.token_ids, skip_special_tokens=True))
    assert parsed["name"] in ("sea", "lake")
    assert isinstance(parsed["deep"], bool)


@pytest.mark.parametrize(
    "constraint",
    [
        StructuredOutput(regex="(yes|no)!"),
        StructuredOutput(regex="(yes!|no!|yes!)"),
        StructuredOutput(choice=["yes!", "no!"]),
        StructuredOutput(grammar='root ::= ("yes" | "no") "!"'),
    ],
    ids=["regex", "alternatives", "choice", "grammar"],
)
async def test_output_follows_other_constraints(
    submit: Submitter, prompt: list[int], tokenizer: Any, constraint: StructuredOutput
) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=0.0, structured=constraint)
    output = await submit(prompt, sampling).output()
    text = tokenizer.decode(output.token_ids, skip_special_tokens=True)
    assert text in ("yes!", "no!")


@pytest.mark.parametrize(
    "constraint",
    [
        StructuredOutput(regex="foo**"),
        StructuredOutput(regex="(" * 5000 + ")" * 5000),
        StructuredOutput(regex="[z-a]"),
        StructuredOutput(grammar="root ::= undefined_rule"),
        StructuredOutput(grammar="root ::= root"),
        StructuredOutput(json_schema="{not json"),
        StructuredOutput(json_schema={"type": "no such type"}),
        StructuredOutput(json_schema={"$ref": "#/nowhere"}),
        StructuredOutput(structural_tag="{}"),
        StructuredOutput(choice=[]),
    ],
    ids=lambda constraint: str(constraint)[17:60],
)
async def test_an_impossible_constraint_is_refused_and_the_engine_lives(
    submit: Submitter, prompt: list[int], engine: HostedEngine, constraint: StructuredOutput
) -> None:
    sampling = SamplingParams(max_tokens=4, structured=constraint)
    error = (await submit(prompt, sampling).ended()).error
    assert isinstance(error, InvalidRequest), error
    assert len(error.message) < 1000
    assert str(Path.cwd()) not in error.message
    assert len((await submit(prompt, GREEDY).output()).token_ids) == 24
    assert engine.status.num_restarts == 0


def _hostile_constraints() -> list[StructuredOutput]:
    """Each of these would keep the engine's only compiling thread busy, or its loop."""
    optional = {f"property_{index}": {"type": "string"} for index in range(5000)}
    repeated = "(.{1,1000}){1,1000}"
    return [
        StructuredOutput(
            json_schema={"type": "object", "properties": optional, "additionalProperties": False}
        ),
        StructuredOutput(choice=[f"{index * 7919:032}" for index in range(5000)]),
        StructuredOutput(json_schema={"enum": [f"{index * 7919:032}" for index in range(8000)]}),
        StructuredOutput(json_schema={"type": "string", "pattern": repeated}),
        StructuredOutput(regex=repeated),
        StructuredOutput(regex="((a{0,26}){0,26}){0,26}"),
        StructuredOutput(grammar='root ::= x\nx ::= x x | [a-z] | ""'),
    ]


async def test_costly_constraints_are_refused_and_others_are_answered_promptly(
    submit: Submitter, prompt: list[int]
) -> None:
    costly = [
        submit(prompt, with_changes(GREEDY, structured=constraint))
        for constraint in _hostile_constraints()
    ]
    innocent = with_changes(GREEDY, structured=StructuredOutput(json_object=True))
    with anyio.fail_after(20):
        output = await submit(prompt, innocent).output()
    assert output.token_ids
    for sink in costly:
        error = (await sink.ended()).error
        assert isinstance(error, InvalidRequest), error
        assert error.param == "structured"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"logprobs": 1000}, "logprobs"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs"),
        ({"logit_bias": {10**7: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stop_token_ids": [10**7]}, "stop_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3.0}, "temperature"),
        ({"min_tokens": 100}, None),
    ],
    ids=str,
)
async def test_a_wrong_parameter_is_refused_by_name(
    submit: Submitter, prompt: list[int], changes: dict[str, Any], param: str | None
) -> None:
    error = (await submit(prompt, with_changes(GREEDY, **changes)).ended()).error
    assert isinstance(error, InvalidRequest)
    assert error.param == param


@pytest.mark.parametrize("tokens", [[], [10**7], [1] * MAX_MODEL_LEN], ids=["0", "id", "len"])
async def test_a_wrong_prompt_is_refused(submit: Submitter, tokens: list[int]) -> None:
    assert isinstance((await submit(tokens, GREEDY).ended()).error, InvalidRequest)


async def test_bad_words_do_not_appear(
    submit: Submitter, prompt: list[int], tokenizer: Any
) -> None:
    assert "sea" in tokenizer.decode((await submit(prompt, GREEDY).output()).token_ids)
    output = await submit(prompt, with_changes(GREEDY, bad_words=["sea"])).output()
    assert " sea" not in tokenizer.decode(output.token_ids)


async def test_an_abort_right_after_a_constrained_submit_wins(
    submit: Submitter, prompt: list[int], engine: HostedEngine
) -> None:
    regex = StructuredOutput(regex="(a|b|c){1,40}x{3,30}")
    sink = submit(prompt, with_changes(GREEDY, structured=regex, max_tokens=500))
    engine.abort(submit.last_id)
    await submit(prompt, with_changes(GREEDY, structured=regex)).output()
    assert sink.num_deltas == 0
    assert sink.error is None
    await until(lambda: engine.stats.running == 0, 1.0)


async def test_a_killed_engine_core_fails_its_generations_and_is_replaced(
    submit: Submitter, prompt: list[int], engine: HostedEngine
) -> None:
    expected = (await submit(prompt, GREEDY).output()).token_ids
    running = submit(prompt, with_changes(GREEDY, max_tokens=1500))
    await running.started.wait()
    pids = list(engine.status.pids)
    os.kill(engine_core_pid(pids), signal.SIGKILL)
    with anyio.fail_after(10):
        assert isinstance((await running.ended()).error, EngineFailed)
    await until(lambda: not any(map(is_alive, pids)), 10.0)
    await until(lambda: engine.status.state == "ready", 200.0)
    assert engine.status.num_restarts == 1
    assert (await submit(prompt, GREEDY).output()).token_ids == expected


def engine_core_pid(pids: list[int]) -> int:
    """The engine core among a host's processes, by the name that it gives itself."""
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
    return next(pid for pid, name in names.items() if b"EngineCore" in name)
