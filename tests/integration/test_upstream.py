"""A real vLLM server as an upstream, in float32: the tokens are those that it gives itself."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import pytest

from server.demo_model import ensure_demo_model
from server.text.tokenizer import ChatTokenizer
from spot.engines.process_group import kill_session
from spot.engines.upstream import UpstreamConfig, UpstreamEngine
from spot.engines.upstream_answers import AnswerReader
from spot.engines.upstream_http import exchange, open_session
from spot.engines.upstream_protocol import Endpoint, build_request
from spot.engines.vllm_compat.environment import apply_default_environment
from spot.errors import EngineFailed, InvalidRequest
from spot.generation import Generation, SamplingParams, StructuredOutput, TokenDelta
from tests.sink import Sink

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(400)]

NUM_TOKENS = 16
NUM_SEATS = 4
START_TIMEOUT_S = 300.0
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON = StructuredOutput(json_schema=SCHEMA, disable_any_whitespace=True)


def vary(**changes: Any) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, **changes)


CASES = {
    "greedy": GREEDY,
    "seed": vary(seed=1234, temperature=0.9, top_p=0.95),
    "seed+min_p+top_k": vary(seed=5, temperature=1.0, min_p=0.05, top_k=40),
    "penalties": vary(presence_penalty=1.2, frequency_penalty=0.8, repetition_penalty=1.1),
    "json": vary(structured=JSON, ignore_eos=False, max_tokens=60),
    "json+seed": vary(structured=JSON, ignore_eos=False, max_tokens=60, seed=3, temperature=1.0),
    "regex": vary(structured=StructuredOutput(regex="[ab]{4}"), ignore_eos=False),
    "choice": vary(structured=StructuredOutput(choice=["yes", "no"]), ignore_eos=False),
    "min_tokens": vary(min_tokens=10, ignore_eos=False, stop_token_ids=[28, 30, 198]),
    "bad_words": vary(bad_words=["the", " a", "."]),
    "logit_bias": vary(logit_bias={28: 4.0, 30: -150.0}),
    "allowed": vary(allowed_token_ids=list(range(200, 400))),
    "logprobs 0": vary(logprobs=0),
    "logprobs 3": vary(logprobs=3, seed=9, temperature=1.5),
    "logprobs 20": vary(logprobs=20, seed=9, temperature=1.5),
    "prompt_logprobs": vary(prompt_logprobs=2, logprobs=1),
}


@dataclass(slots=True)
class VllmServer:
    """A vLLM API server in a session of its own."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=10).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))

    def own_answer(self, prompt: list[int], sampling: SamplingParams) -> dict[str, Any]:
        """The choice that the server gives by itself, asked plainly and in one piece."""
        asked = msgspec.to_builtins(sampling)
        if structured := asked.pop("structured", None):
            if "json_schema" in structured:
                structured["json"] = structured.pop("json_schema")
            asked["structured_outputs"] = structured
        asked |= {
            "prompt": prompt,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        answer = httpx.post(f"{self.url}/v1/completions", json=asked, trust_env=False, timeout=120)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["choices"][0])


@contextlib.contextmanager
def vllm_server() -> Iterator[VllmServer]:
    """Started with the demo model, in float32; killed at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = dict(os.environ)
    apply_default_environment(env)
    with tempfile.TemporaryDirectory(prefix="vllm-server-") as scratch:
        log = Path(scratch) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *_arguments(port)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = VllmServer(f"http://127.0.0.1:{port}", process, log)
        try:
            _wait_until_ready(server)
            yield server
        finally:
            anyio.run(kill_session, process.pid)
            process.wait()


def _arguments(port: int) -> list[str]:
    return [
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(ensure_demo_model())),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "512", "--max-num-seqs", str(NUM_SEATS)),
        *("--enforce-eager", "--dtype", "float32"),
        # A seeded request whose prefill is chunked ends vLLM 0.32's CPU engine.
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"),
        *("--enable-scale-out", "--enable-prompt-tokens-details"),
        *("--scheduling-policy", "priority"),
    ]


def _wait_until_ready(server: VllmServer) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        assert server.process.poll() is None, server.tail()
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", trust_env=False, timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"not ready within {START_TIMEOUT_S:.0f} s:\n{server.tail()}")


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
def server() -> Iterator[VllmServer]:
    with vllm_server() as running:
        yield running


@pytest.fixture(scope="module")
async def engine(server: VllmServer) -> AsyncIterator[UpstreamEngine]:
    async with UpstreamEngine(UpstreamConfig(server.url, stats_interval_s=0.5)) as running:
        with anyio.fail_after(60):
            await running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    tokenizer = ChatTokenizer.load(ensure_demo_model())
    question = "Write a JSON record about a person: name, age. Then tell a story."
    return tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": question}]))


@pytest.fixture(scope="module")
def own_answers() -> dict[str, dict[str, Any]]:
    """What the server gave by itself, by the name of the case."""
    return {}


async def run(engine: UpstreamEngine, generation: Generation) -> TokenDelta:
    sink = Sink()
    engine.submit(generation, sink)
    return await sink.output()


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    with anyio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.05)


async def test_what_is_found_out(engine: UpstreamEngine) -> None:
    card = engine.card
    assert card is not None
    assert (card.max_model_len, card.vocab_size, card.max_logprobs) == (512, 49152, 20)
    assert card.resume == "prompt"
    assert "through /inference/v1/generate" in engine.status.detail


@pytest.mark.parametrize("endpoint", ["generate", "completions"])
@pytest.mark.parametrize("name", CASES)
async def test_the_tokens_are_the_upstreams_own(
    name: str,
    endpoint: Endpoint,
    server: VllmServer,
    engine: UpstreamEngine,
    prompt: list[int],
    own_answers: dict[str, dict[str, Any]],
) -> None:
    sampling = CASES[name]
    assert engine.card is not None
    if endpoint == "generate" and sampling.logprobs == engine.card.max_logprobs:
        pytest.skip("these are asked of the other endpoint")
    if name not in own_answers:
        own_answers[name] = server.own_answer(prompt, sampling)
    own = own_answers[name]
    through = await _through(server, Generation(name, prompt, sampling), endpoint)
    assert through.token_ids == own["token_ids"]
    assert through.finish_reason == own["finish_reason"]
    assert through.stop_token_id == own["stop_reason"]
    if sampling.logprobs is not None:
        _check_logprobs(through, own["logprobs"], sampling.logprobs)
    if sampling.prompt_logprobs is not None:
        assert through.prompt_logprobs is not None
        assert len(through.prompt_logprobs) == len(prompt)
        for entry, figures in zip(through.prompt_logprobs, own["prompt_logprobs"], strict=True):
            told = {int(token): figure["logprob"] for token, figure in (figures or {}).items()}
            assert dict(zip(entry.token_ids, entry.logprobs, strict=True) if entry else ()) == told


async def _through(server: VllmServer, generation: Generation, endpoint: Endpoint) -> TokenDelta:
    """The whole answer through one of the endpoints."""
    config = UpstreamConfig(server.url)
    request = build_request(generation, endpoint, model=str(ensure_demo_model()))
    deltas: list[TokenDelta] = []
    async with open_session(config) as session:
        await exchange(session, config, request, AnswerReader(generation, endpoint), deltas.append)
    whole, *later = deltas
    for delta in later:
        whole.merge(delta)
    return whole


def _check_logprobs(delta: TokenDelta, own: dict[str, Any], num_top: int) -> None:
    assert delta.logprobs is not None
    assert [entry.logprobs[0] for entry in delta.logprobs] == own["token_logprobs"]
    for entry, told in zip(delta.logprobs, own["top_logprobs"], strict=True):
        named = {int(name.removeprefix("token_id:")): value for name, value in told.items()}
        assert dict(zip(entry.token_ids, entry.logprobs, strict=True)) == named
        assert len(entry.token_ids) == num_top + 1
        assert entry.logprobs[1:] == sorted(entry.logprobs[1:], reverse=True)
        if entry.rank <= num_top:
            assert entry.token_ids[entry.rank] == entry.token_ids[0]


async def test_many_at_once_are_as_each_alone(
    server: VllmServer, engine: UpstreamEngine, prompt: list[int]
) -> None:
    sampling = vary(seed=21, temperature=0.8)
    alone = server.own_answer(prompt, sampling)["token_ids"]
    sinks = [Sink() for _ in range(8)]
    for number, sink in enumerate(sinks):
        engine.submit(Generation(f"many-{number}", prompt, sampling, priority=-number), sink)
    for sink in sinks:
        assert (await sink.output()).token_ids == alone


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        vary(logprobs=2),
        vary(logit_bias={28: 4.0}),
        vary(repetition_penalty=1.3),
        vary(min_tokens=12, ignore_eos=False, stop_token_ids=[28, 30, 198]),
    ],
)
async def test_what_may_be_continued_ends_as_if_uninterrupted(
    sampling: SamplingParams, engine: UpstreamEngine, prompt: list[int]
) -> None:
    whole = await run(engine, Generation("whole", prompt, sampling))
    num_tokens = len(whole.token_ids)
    for cut in (1, num_tokens // 2, num_tokens - 1):
        emitted = whole.token_ids[:cut]
        rest = await run(
            engine, Generation(f"cut-{cut}", prompt, sampling, output_token_ids=emitted)
        )
        assert [*emitted, *rest.token_ids] == whole.token_ids
        assert rest.finish_reason == whole.finish_reason
        assert rest.stop_token_id == whole.stop_token_id
        if whole.logprobs is not None:
            assert rest.logprobs is not None
            wanted = whole.logprobs[cut:]
            assert [e.token_ids for e in rest.logprobs] == [e.token_ids for e in wanted]


async def test_cached_tokens_are_told(engine: UpstreamEngine, prompt: list[int]) -> None:
    long = [*prompt, *range(1000, 1200)]
    sampling = vary(max_tokens=2)
    first = await run(engine, Generation("c1", long, sampling, cache_salt="a"))
    again = await run(engine, Generation("c2", long, sampling, cache_salt="a"))
    salted = await run(engine, Generation("c3", long, sampling, cache_salt="b"))
    assert (first.num_cached_tokens, salted.num_cached_tokens) == (0, 0)
    assert again.num_cached_tokens is not None
    assert 0 < again.num_cached_tokens < len(long)


@pytest.mark.parametrize(
    ("sampling", "param", "message"),
    [
        (vary(logprobs=500), "logprobs", "greater than max allowed"),
        (vary(logit_bias={60_000: 1.0}), "logit_bias", "out-of-vocab"),
        (vary(top_p=7.0), "top_p", "top_p"),
        (vary(structured=StructuredOutput(regex="(((")), "structured", ""),
        (vary(structured=StructuredOutput(grammar="root ::= (")), "structured", ""),
        (vary(bad_words=[""]), None, "bad_words"),
        (vary(max_tokens=0), "max_tokens", "max_tokens"),
    ],
)
async def test_a_bad_request_is_refused_and_nothing_else_happens(
    sampling: SamplingParams,
    param: str | None,
    message: str,
    engine: UpstreamEngine,
    prompt: list[int],
) -> None:
    sink = Sink()
    engine.submit(Generation("bad", prompt, sampling), sink)
    error = (await sink.ended()).error
    assert isinstance(error, InvalidRequest)
    assert message in error.message
    assert len(error.message) < 1000
    assert error.param == param
    assert engine.status.state == "ready"


async def test_a_prompt_that_is_too_long_is_refused(engine: UpstreamEngine) -> None:
    sink = Sink()
    engine.submit(Generation("long", [5] * 600, GREEDY), sink)
    assert isinstance((await sink.ended()).error, InvalidRequest)


async def test_aborts_free_the_seats(
    server: VllmServer, engine: UpstreamEngine, prompt: list[int]
) -> None:
    """All seats are taken and given up; then a step of another generation brings new figures."""
    before = server.metric("vllm:generation_tokens_total")
    sinks = {f"abort-{number}": Sink() for number in range(NUM_SEATS)}
    for name, sink in sinks.items():
        engine.submit(Generation(name, prompt, vary(max_tokens=400)), sink)
    for sink in sinks.values():
        await sink.started.wait()
    for name in sinks:
        engine.abort(name)
    with anyio.fail_after(60):
        while True:
            await run(engine, Generation("next", prompt, vary(max_tokens=2)))
            if server.metric("vllm:num_requests_running") == 0:
                break
    assert server.metric("vllm:generation_tokens_total") - before < 400 * NUM_SEATS / 2
    assert all(sink.error is None for sink in sinks.values())


async def test_a_killed_upstream_fails_what_runs(
    server: VllmServer, engine: UpstreamEngine, prompt: list[int]
) -> None:
    """The last one: the server is gone afterwards."""
    sink = Sink()
    engine.submit(Generation("killed", prompt, vary(max_tokens=400)), sink)
    await sink.started.wait()
    await kill_session(server.process.pid)
    with anyio.fail_after(5):
        assert isinstance((await sink.ended()).error, EngineFailed)
    await until(lambda: engine.status.state == "dead")
