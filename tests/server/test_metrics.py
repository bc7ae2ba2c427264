"""Metrics: what is counted when a request ends, and the engine's figures."""

from __future__ import annotations

from typing import Any

import pytest

from server.metrics import Metrics
from server.record import RequestRecord
from spot.engines.base import EngineCard, EngineStats, EngineStatus

ENGINE = {"model_name": "demo", "engine": "0"}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("demo")


def record(**fields: Any) -> RequestRecord:
    made = RequestRecord("r", "POST", "/v1/completions", 10.0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def generated(**fields: Any) -> RequestRecord:
    return record(
        **{
            "status": 200,
            "submitted_s": 10.1,
            "queue_s": 0.25,
            "first_token_s": 10.5,
            "last_token_s": 11.5,
            "num_prompt_tokens": 7,
            "num_output_tokens": 11,
            "num_choices": 1,
            "finish_reasons": ["stop"],
            **fields,
        }
    )


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_completed_request_is_counted_by_its_finish_reasons(metrics: Metrics) -> None:
    metrics.observe(generated(finish_reasons=["stop", "length", "tool_calls"]), "/x", 12.0)
    for reason, count in (("stop", 2), ("length", 1)):
        labels = {**ENGINE, "finished_reason": reason}
        assert value(metrics, "vllm:request_success_total", **labels) == count
    assert value(metrics, "vllm:prompt_tokens_total", **ENGINE) == 7
    assert value(metrics, "vllm:generation_tokens_total", **ENGINE) == 11
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum", **ENGINE) == 2.0
    assert value(metrics, "vllm:request_queue_time_seconds_sum", **ENGINE) == 0.25
    tpot = value(metrics, "vllm:request_time_per_output_token_seconds_sum", **ENGINE)
    assert tpot == pytest.approx(0.1)


@pytest.mark.parametrize(("outcome", "reason"), [("aborted", "abort"), ("failed", "error")])
def test_an_unfinished_request_is_counted_once(metrics: Metrics, outcome: str, reason: str) -> None:
    metrics.observe(generated(outcome=outcome, finish_reasons=["stop"]), "/x", 12.0)
    labels = {**ENGINE, "finished_reason": reason}
    assert value(metrics, "vllm:request_success_total", **labels) == 1
    assert value(metrics, "shuntyard_requests_total", endpoint="/x", outcome=outcome) == 1


def test_a_request_that_never_ran_has_no_tokens(metrics: Metrics) -> None:
    metrics.observe(record(status=400, outcome="client_error"), "/x", 12.0)
    assert value(metrics, "shuntyard_http_responses_total", endpoint="/x", status="400") == 1
    assert value(metrics, "vllm:request_prompt_tokens_count", **ENGINE) == 0


def test_one_token_has_no_time_per_token(metrics: Metrics) -> None:
    metrics.observe(generated(num_output_tokens=1), "/x", 12.0)
    assert value(metrics, "vllm:request_time_per_output_token_seconds_count", **ENGINE) == 0


def test_the_phases_of_a_request_are_observed(metrics: Metrics) -> None:
    metrics.observe(generated(n=2, max_tokens=40), "/x", 12.0)
    for phase, seconds in (("prefill", 0.15), ("decode", 1.0), ("inference", 1.15)):
        name = f"vllm:request_{phase}_time_seconds_sum"
        assert value(metrics, name, **ENGINE) == pytest.approx(seconds)
    assert value(metrics, "vllm:request_params_n_sum", **ENGINE) == 2
    assert value(metrics, "vllm:request_params_max_tokens_sum", **ENGINE) == 40


def test_tokens_are_counted_while_they_come_and_once(metrics: Metrics) -> None:
    def counted() -> tuple[float | None, float | None]:
        metrics.render(EngineStats(), EngineStatus("ready"), 1)
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        first, second = (value(metrics, name, **ENGINE) for name in names)
        return first, second

    running = generated(first_token_s=None, num_output_tokens=0)
    metrics.begin(running)
    assert counted() == (0, 0)
    running.first_token_s, running.num_output_tokens = 10.5, 4
    assert counted() == (7, 4)
    running.num_output_tokens = 9
    assert counted() == (7, 9)
    running.num_output_tokens = 11
    metrics.observe(running, "/x", 12.0)
    assert counted() == (7, 11)


def test_steps_are_observed_by_their_tokens(metrics: Metrics) -> None:
    for num_tokens in (1, 3, 300):
        metrics.observe_step(num_tokens)
    assert value(metrics, "vllm:iteration_tokens_total_sum", **ENGINE) == 304
    assert value(metrics, "vllm:iteration_tokens_total_bucket", **ENGINE, le="4.0") == 2


def test_the_cache_is_described_as_the_engine_last_told(metrics: Metrics) -> None:
    for num_blocks in ("8", "8", "9"):
        cache = {"block_size": "32", "num_gpu_blocks": num_blocks}
        card = EngineCard(64, 100, cache=cache)
        text = metrics.render(EngineStats(), EngineStatus("ready"), 0, card).decode()
    (line,) = (line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    assert 'block_size="32"' in line
    assert 'num_gpu_blocks="9"' in line


def test_times_of_a_record() -> None:
    made = generated(num_choices=2, num_output_tokens=12)
    assert made.ttft_s == 0.5
    assert made.tpot_s == pytest.approx(1.0 / 5)
    assert record().ttft_s is None
    assert record().tpot_s is None


def test_counters_of_the_engine_never_fall(metrics: Metrics) -> None:
    ready = EngineStatus("ready", num_restarts=2)
    for hits in (10, 30, 5, 6):
        metrics.render(EngineStats(prefix_cache_hits=hits), ready, 3)
    assert value(metrics, "vllm:prefix_cache_hits_total", **ENGINE) == 31
    assert value(metrics, "shuntyard_requests_in_flight") == 3
    assert value(metrics, "shuntyard_engine_restarts") == 2


def test_the_moment_of_the_engine_is_shown(metrics: Metrics) -> None:
    stats = EngineStats(running=2, waiting=5, kv_cache_usage=0.25)
    text = metrics.render(stats, EngineStatus("dead"), 0).decode()
    assert 'vllm:num_requests_running{engine="0",model_name="demo"} 2.0' in text
    assert 'vllm:num_requests_waiting{engine="0",model_name="demo"} 5.0' in text
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="demo"} 0.25' in text
    assert "shuntyard_engine_up 0.0" in text


def test_two_servers_in_one_process_do_not_meet() -> None:
    first, second = Metrics("a"), Metrics("b")
    first.observe(generated(), "/x", 12.0)
    assert value(second, "shuntyard_requests_total", endpoint="/x", outcome="completed") is None


def test_a_refusal_by_the_engine_is_no_success(metrics: Metrics) -> None:
    metrics.observe(generated(outcome="client_error"), "/x", 12.0)
    labels = {**ENGINE, "finished_reason": "client_error"}
    assert value(metrics, "vllm:request_success_total", **labels) is None
    assert value(metrics, "shuntyard_requests_total", endpoint="/x", outcome="client_error") == 1


def test_shared_generations_are_counted_by_how(metrics: Metrics) -> None:
    metrics.begin(generated(num_shared=3, num_from_cache=2))
    metrics.begin(generated(num_shared=1))
    name = "shuntyard_shared_generations_total"
    assert [value(metrics, name, how=how) for how in ("inflight", "cache")] == [2, 2]
