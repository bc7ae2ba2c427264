"""An upstream engine keeps the engines' contract over real sockets, whatever the server does."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import msgspec
import pytest

from spot.engines.base import EngineStats
from spot.engines.upstream import UpstreamConfig, UpstreamEngine
from spot.errors import (
    EngineFailed,
    EngineMisconfigured,
    EngineUnavailable,
    InvalidRequest,
    ShuntyardError,
)
from spot.generation import Generation, SamplingParams, StructuredOutput, TokenDelta, TokenLogprobs
from tests.sink import Sink
from tests.spot.engines.fake_upstream import (
    MAX_LOGPROBS,
    MODEL,
    VOCAB_SIZE,
    FakeUpstream,
    serving,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]


def config(url: str, **options: Any) -> UpstreamConfig:
    quick: dict[str, Any] = {"health_interval_s": 0.05, "health_timeout_s": 0.5}
    return UpstreamConfig(url, **{**quick, **options})


@contextlib.asynccontextmanager
async def engine(fake: FakeUpstream, **options: Any) -> AsyncIterator[UpstreamEngine]:
    """An engine before the fake, ready."""
    async with serving(fake), UpstreamEngine(config(fake.url, **options)) as running:
        with anyio.fail_after(5):
            await running.wait_ready()
        yield running


def generation(name: str = "g", **sampling: Any) -> Generation:
    return Generation(name, [1, 2], SamplingParams(**{"max_tokens": 8, **sampling}))


async def run(running: UpstreamEngine, given: Generation | None = None) -> Sink:
    sink = Sink()
    running.submit(given or generation(), sink)
    return await sink.ended()


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.005)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Probing


async def test_the_card_comes_from_what_the_upstream_says() -> None:
    async with engine(FakeUpstream(), max_num_seqs=7) as running:
        card = running.card
        assert card is not None
        assert (card.max_model_len, card.vocab_size) == (64, VOCAB_SIZE)
        assert (card.max_logprobs, card.max_num_seqs) == (MAX_LOGPROBS, 7)
        assert card.resume == "prompt"
        assert card.engine == "vllm 0.32.0 (upstream)"
        status = running.status
        assert (status.state, status.num_restarts, status.pids) == ("ready", 0, [])
        assert "vLLM 0.32.0, model m" in status.detail
        assert "/inference/v1/generate" in status.detail


async def test_an_upstream_that_tells_no_limits_gets_the_usual_ones() -> None:
    async with engine(FakeUpstream(tells_limits=False)) as running:
        assert running.card is not None
        assert (running.card.max_logprobs, running.card.vocab_size) == (20, 1_000_000)


async def test_the_configs_vocabulary_counts() -> None:
    async with engine(FakeUpstream(), vocab_size=17) as running:
        assert running.card is not None
        assert running.card.vocab_size == 17


async def test_other_names_and_adapters_are_not_other_models() -> None:
    models: list[dict[str, Any]] = [
        {"id": "a", "root": "r", "max_model_len": 64},
        {"id": "b", "root": "r", "max_model_len": 64},
        {"id": "lora", "root": "x", "parent": "a"},
    ]
    async with engine(FakeUpstream(models=models)) as running:
        assert (await run(running)).error is None


async def test_the_named_model_is_asked_for() -> None:
    models: list[dict[str, Any]] = [
        {"id": name, "root": name, "max_model_len": 64} for name in "ab"
    ]
    fake = FakeUpstream(models=models)
    async with engine(fake, model="b") as running:
        await run(running)
        assert fake.asked[0][1]["model"] == "b"


@pytest.mark.parametrize(
    ("fake", "options", "message"),
    [
        (FakeUpstream(), {"model": "other"}, "no model other; it has: m"),
        (FakeUpstream(models=[]), {}, "it has: none"),
        (
            FakeUpstream(models=[{"id": i, "max_model_len": 1} for i in "ab"]),
            {},
            "it has: a, b",
        ),
        (FakeUpstream(models=[{"id": MODEL}]), {}, "max_model_len"),
        (FakeUpstream(sends_token_ids=False), {}, "sends no token ids"),
        (FakeUpstream(api_key="right"), {"api_key": "wrong"}, "wrong URL or API key"),
    ],
)
async def test_an_unsuitable_upstream_says_why_and_may_still_change(
    fake: FakeUpstream, options: dict[str, Any], message: str
) -> None:
    async with serving(fake), UpstreamEngine(config(fake.url, **options)) as running:
        with anyio.fail_after(5), pytest.raises(EngineMisconfigured, match=message):
            await running.wait_ready()
        assert running.status.state == "dead"
        assert running.status.is_misconfigured
        assert running.card is None
        with pytest.raises(EngineUnavailable, match="dead"):
            running.submit(generation(), Sink())
        fake.models = [{"id": options.get("model", MODEL), "max_model_len": 64}]
        fake.sends_token_ids, fake.api_key = True, options.get("api_key")
        await until(lambda: running.status.state == "ready")
        assert not running.status.is_misconfigured


async def test_a_server_is_no_upstream_of_its_own_upstream() -> None:
    fake = FakeUpstream()
    async with serving(fake), UpstreamEngine(config(fake.url, own_instance="behind")) as running:
        with anyio.fail_after(5), pytest.raises(EngineMisconfigured, match="passes requests on"):
            await running.wait_ready()


async def test_a_request_says_where_it_has_been() -> None:
    fake = FakeUpstream()
    async with engine(fake, own_instance="me") as running:
        assert running.card is not None
        assert running.card.instances == ["fake", "behind"]
        await run(running, msgspec.structs.replace(generation(), via=["first", "second"]))
        assert fake.headers["X-Shuntyard-Via"] == "first, second, me"
    async with engine(fake) as running:
        await run(running)
        assert "X-Shuntyard-Via" not in fake.headers


async def test_a_server_is_not_its_own_upstream() -> None:
    fake = FakeUpstream()
    async with serving(fake), UpstreamEngine(config(fake.url, own_instance="fake")) as running:
        with anyio.fail_after(5), pytest.raises(EngineMisconfigured, match="this very server"):
            await running.wait_ready()


async def test_an_upstream_that_is_not_there_yet_is_waited_for() -> None:
    port = free_port()
    fake = FakeUpstream()
    async with UpstreamEngine(config(f"http://127.0.0.1:{port}/v1/")) as running:
        await until(lambda: "waiting for the upstream: " in running.status.detail)
        assert running.status.state == "starting"
        with pytest.raises(EngineUnavailable, match="starting"):
            running.submit(generation(), Sink())
        async with serving(fake, port):
            with anyio.fail_after(5):
                await running.wait_ready()
            assert (await run(running)).error is None


async def test_key_and_headers_go_along() -> None:
    fake = FakeUpstream(api_key="k")
    async with engine(fake, api_key="k", headers={"X-Team": "t"}) as running:
        assert (await run(running)).error is None
        assert fake.headers["X-Team"] == "t"
        assert "k" not in repr(config("http://a", api_key="kkk")).split("'")


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "ftp://a"},
        {"url": "a:8000"},
        {"url": "http://"},
        {"url": "http://a:99999"},
        {"url": "http://a:x"},
        {"url": "http://u:p@a"},
        {"url": "http://a?x=1"},
        {"url": "http://a\nb:1"},
        {"url": "http://a", "max_health_failures": 0},
        {"url": "http://a", "connect_timeout_s": -1},
    ],
)
def test_a_wrong_config_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"URL|must be greater|[Pp]ort"):
        UpstreamConfig(**wrong)


# Generations


async def test_tokens_arrive_one_by_one_then_the_finish() -> None:
    fake = FakeUpstream(finish_reason="stop", stop_reason=13, token_s=0.001)
    async with engine(fake) as running:
        sink = await run(running)
        assert sink.total == TokenDelta([11, 12, 13], "stop", 13, num_cached_tokens=1)
        assert sink.num_deltas == 3
        assert running.stats == EngineStats()
        ((path, body),) = fake.asked
        assert path == "/inference/v1/generate"
        assert body["token_ids"] == [1, 2]


async def test_completions_where_there_is_no_generate() -> None:
    fake = FakeUpstream(has_generate=False)
    async with engine(fake) as running:
        assert "/v1/completions" in running.status.detail
        sink = await run(running)
        assert sink.total is not None
        assert sink.total.token_ids == [11, 12, 13]
        assert fake.asked[0][0] == "/v1/completions"


async def test_a_costly_constraint_is_not_passed_on() -> None:
    fake = FakeUpstream()
    hostile = StructuredOutput(regex="((a{0,26}){0,26}){0,26}")
    async with engine(fake) as running:
        sink = await run(running, generation(structured=hostile))
        assert isinstance(sink.error, InvalidRequest)
        assert sink.error.param == "structured"
        assert not fake.asked


async def test_prompt_logprobs_come_in_one_piece() -> None:
    async with engine(FakeUpstream()) as running:
        sink = await run(running, generation(prompt_logprobs=0))
        assert sink.num_deltas == 1
        assert sink.total is not None
        assert sink.total.token_ids == [11, 12, 13]
        assert sink.total.prompt_logprobs == [None, TokenLogprobs([2], [-1.0], 1)]


async def test_output_from_elsewhere_is_sent_as_prompt() -> None:
    fake = FakeUpstream()
    async with engine(fake) as running:
        begun = Generation("g", [1, 2], SamplingParams(8, temperature=0.0), output_token_ids=[5, 6])
        sink = await run(running, begun)
        assert sink.total is not None
        assert sink.total.token_ids == [11, 12, 13]
        body = fake.asked[0][1]
        assert body["token_ids"] == [1, 2, 5, 6]
        assert body["sampling_params"]["max_tokens"] == 6


@pytest.mark.parametrize(
    "sampling",
    [{"seed": 1}, {"presence_penalty": 1.0}, {"structured": StructuredOutput(regex="a")}],
)
async def test_what_cannot_be_continued_exactly_is_not_taken(sampling: dict[str, Any]) -> None:
    async with engine(FakeUpstream()) as running:
        begun = Generation("g", [1], SamplingParams(8, **sampling), output_token_ids=[5])
        with pytest.raises(EngineUnavailable, match="go on exactly"):
            running.submit(begun, Sink())
        assert running.stats.running == 0


async def test_more_connections_than_any_default_limit() -> None:
    fake = FakeUpstream(stall_at=1)
    async with engine(fake) as running:
        for number in range(150):
            running.submit(generation(str(number)), Sink())
        await until(lambda: fake.num_running == 150)
        assert running.stats.running == 150


async def test_connections_are_used_again() -> None:
    fake = FakeUpstream()
    async with engine(fake) as running:
        for _ in range(5):
            await run(running)
            await anyio.sleep(0.02)
        assert len(fake.ports) <= 2


# Errors of single generations

ENVELOPE = {"error": {"message": "because", "type": "T", "param": "sampling_params.top_p"}}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, InvalidRequest),
        (429, EngineUnavailable),
        (503, EngineUnavailable),
        (500, EngineFailed),
        (302, EngineFailed),
    ],
)
async def test_a_status_ends_one_generation(status: int, expected: type[ShuntyardError]) -> None:
    fake = FakeUpstream(status=status, error_body=ENVELOPE)
    async with engine(fake) as running:
        sink = await run(running)
        assert type(sink.error) is expected
        assert "because" in sink.error.message
        if isinstance(sink.error, InvalidRequest):
            assert sink.error.param == "top_p"
        await anyio.sleep(0.1)
        assert running.status.state == "ready"
        fake.status = 200
        assert (await run(running)).error is None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"cut_at": 1}, "lost"),
        ({"malformed_at": 1}, "something else than tokens"),
        ({"no_finish_at": 1}, "without a finish"),
        ({"error_at": 1, "error_body": {"message": "boom", "code": 500}}, "boom"),
        ({"finish_reason": "abort"}, "abort"),
    ],
)
async def test_a_broken_stream_fails_one_generation(fault: dict[str, Any], message: str) -> None:
    fake = FakeUpstream(**fault)
    async with engine(fake) as running:
        sink = await run(running)
        assert type(sink.error) is EngineFailed
        assert message in sink.error.message
        assert sink.total is not None
        assert sink.total.token_ids[:1] == [11]
        assert running.stats.running == 0
        for name in ("cut_at", "malformed_at", "no_finish_at", "error_at"):
            setattr(fake, name, None)
        fake.finish_reason = "stop"
        assert (await run(running)).error is None


async def test_an_answer_that_is_too_large_is_not_kept() -> None:
    async with engine(FakeUpstream(), max_answer_bytes=150) as running:
        sink = await run(running, generation(prompt_logprobs=0))
        assert isinstance(sink.error, EngineFailed)
        assert "too large" in sink.error.message


async def test_an_answer_that_does_not_begin_fails() -> None:
    fake = FakeUpstream(header_s=10)
    async with engine(fake, response_timeout_s=0.2) as running:
        sink = await run(running)
        assert isinstance(sink.error, EngineFailed)
        assert "in time" in sink.error.message
        await until(lambda: fake.num_running == 0)


async def test_what_cannot_be_encoded_is_the_requests_fault() -> None:
    async with engine(FakeUpstream()) as running:
        sink = await run(running, generation(seed=2**70))
        assert isinstance(sink.error, InvalidRequest)


class BrokenSink(Sink):
    def on_delta(self, delta: TokenDelta) -> None:
        super().on_delta(delta)
        raise RuntimeError("a bug in a sink")

    def on_error(self, error: ShuntyardError) -> None:
        super().on_error(error)
        raise RuntimeError("a bug in a sink")


async def test_a_broken_sink_ends_its_own_generation_only() -> None:
    fake = FakeUpstream(token_s=0.02)
    async with engine(fake) as running:
        other, broken = Sink(), BrokenSink()
        running.submit(generation("other"), other)
        running.submit(generation("broken"), broken)
        assert (await other.output()).token_ids == [11, 12, 13]
        assert broken.num_deltas == 1
        fake.status = 500
        assert isinstance((await run(running)).error, EngineFailed)
        refused = BrokenSink()
        running.submit(generation("refused"), refused)
        await refused.ended()
        fake.status = 200
        assert (await run(running)).error is None


# Aborts, draining, the end


async def test_an_abort_closes_the_connection_at_once() -> None:
    fake = FakeUpstream(stall_at=1)
    async with engine(fake) as running:
        sink = Sink()
        running.submit(generation(), sink)
        await sink.started.wait()
        assert running.stats.running == 1
        running.abort("g")
        running.abort("g")
        running.abort("never seen")
        assert running.stats.running == 0
        await until(lambda: fake.num_running == 0)
        assert fake.num_disconnected == 1
        assert (sink.num_deltas, sink.error) == (1, None)


async def test_an_abort_before_the_request_is_sent() -> None:
    fake = FakeUpstream()
    async with engine(fake) as running:
        running.submit(generation(), Sink())
        running.abort("g")
        await anyio.sleep(0.05)
        assert fake.asked == []


async def test_a_generation_may_come_again_after_its_abort() -> None:
    fake = FakeUpstream(stall_at=1)
    async with engine(fake) as running:
        first, second = Sink(), Sink()
        running.submit(generation(), first)
        await first.started.wait()
        running.abort("g")
        fake.stall_at = None
        running.submit(generation(), second)
        assert (await second.output()).token_ids == [11, 12, 13]
        assert first.num_deltas == 1


async def test_draining_finishes_what_runs_and_takes_no_more() -> None:
    async with engine(FakeUpstream(token_s=0.02)) as running:
        sink = Sink()
        running.submit(generation(), sink)
        with anyio.fail_after(5):
            await running.drain()
        assert (await sink.output()).token_ids == [11, 12, 13]
        assert running.status.state == "draining"
        with pytest.raises(EngineUnavailable, match="draining"):
            running.submit(generation(), Sink())


async def test_leaving_ends_what_runs_with_an_error() -> None:
    fake = FakeUpstream(stall_at=1)
    async with serving(fake):
        async with UpstreamEngine(config(fake.url)) as running:
            await running.wait_ready()
            sink = Sink()
            running.submit(generation(), sink)
            await sink.started.wait()
        assert isinstance(sink.error, EngineFailed)
        assert running.status.state == "stopped"
        await until(lambda: fake.num_running == 0)
        with pytest.raises(EngineUnavailable, match="stopped"):
            running.submit(generation(), Sink())


# Health and load


async def test_a_dead_upstream_fails_what_runs_and_comes_back() -> None:
    port = free_port()
    fake = FakeUpstream(stall_at=1)
    async with UpstreamEngine(config(f"http://127.0.0.1:{port}")) as running:
        sink = Sink()
        async with serving(fake, port):
            await running.wait_ready()
            running.submit(generation(), sink)
            await sink.started.wait()
        assert isinstance((await sink.ended()).error, EngineFailed)
        await until(lambda: running.status.state == "dead")
        with pytest.raises(EngineUnavailable, match="dead"):
            running.submit(generation(), Sink())
        longer = FakeUpstream(models=[{"id": MODEL, "max_model_len": 128}])
        async with serving(longer, port):
            await until(lambda: running.status.state == "ready")
            assert running.card is not None
            assert running.card.max_model_len == 128
            assert (await run(running)).error is None


async def test_an_upstream_that_says_that_it_is_ill_is_dead() -> None:
    fake = FakeUpstream(stall_at=1)
    async with engine(fake) as running:
        sink = Sink()
        running.submit(generation(), sink)
        await sink.started.wait()
        fake.health_status = 503
        error = (await sink.ended()).error
        assert isinstance(error, EngineFailed)
        assert "503" in error.message
        assert running.status.state == "dead"
        fake.health_status, fake.stall_at = 200, None
        await until(lambda: running.status.state == "ready")


async def test_a_killed_one_fails_what_runs_and_is_asked_for_a_token_before_it_serves() -> None:
    fake = FakeUpstream(stall_at=1)
    async with engine(fake, health_interval_s=30) as running:
        sink = Sink()
        running.submit(generation(), sink)
        await sink.started.wait()
        num_probes = len(fake.requests) - len(fake.asked)
        running.kill("no token for 15 s")
        error = (await sink.ended()).error
        assert isinstance(error, EngineFailed)
        assert "no token for 15 s" in error.message
        assert running.status.state == "dead"
        fake.stall_at = None
        await until(lambda: running.status.state == "ready")
        assert len(fake.requests) - len(fake.asked) > num_probes
        assert (await run(running)).error is None


async def test_what_allows_it_is_continued_as_well_as_it_can() -> None:
    fake = FakeUpstream()
    async with engine(fake) as running:
        begun = Generation(
            "g", [1], SamplingParams(8, seed=1), output_token_ids=[5], allow_inexact_resume=True
        )
        assert (await run(running, begun)).error is None
        assert fake.asked[0][1]["token_ids"] == [1, 5]


async def test_a_single_failed_check_kills_nothing() -> None:
    fake = FakeUpstream(token_s=0.05)
    async with engine(fake, max_health_failures=1000) as running:
        fake.health_status = 500
        assert (await run(running)).error is None
        assert running.status.state == "ready"


async def test_an_upstream_that_is_too_busy_for_checks_but_sends_tokens_lives() -> None:
    fake = FakeUpstream(tokens=[11] * 40, token_s=0.02)
    async with engine(fake, health_timeout_s=0.1, max_health_failures=1) as running:
        sink = Sink()
        running.submit(generation(), sink)
        await sink.started.wait()
        fake.health_s = 10
        assert (await sink.output()).token_ids == [11] * 40
        await until(lambda: running.status.state == "dead")


async def test_a_refused_connection_is_no_fault_of_the_generation() -> None:
    port = free_port()
    fake = FakeUpstream()
    options = {"health_interval_s": 60, "max_health_failures": 2}
    async with UpstreamEngine(config(f"http://127.0.0.1:{port}", **options)) as running:
        async with serving(fake, port):
            running._check_soon.set()
            await running.wait_ready()
        sink = await run(running)
        assert isinstance(sink.error, EngineUnavailable)


async def test_load_is_read_from_the_metrics() -> None:
    fake = FakeUpstream(metrics='vllm:num_requests_waiting{engine="0"} 3.0\n', stall_at=1)
    async with engine(fake, stats_interval_s=0.02) as running:
        running.submit(generation(), Sink())
        await until(lambda: running.stats == EngineStats(running=1, waiting=3))
        fake.metrics = None
        await until(lambda: running.stats == EngineStats(running=1))
