"""An upstream's load is read from its metrics, and nothing else."""

from __future__ import annotations

from spot.engines.base import EngineStats
from spot.engines.upstream_metrics import parse_load

METRICS = b"""\
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a}b"} 3.0
vllm:num_requests_waiting{engine="1",model_name="a}b"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 100.0
vllm:num_requests_running{engine="0"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75 1700000000
vllm:prefix_cache_queries_total{engine="0"} 1.2e3
vllm:prefix_cache_hits_total{engine="0"} 600.0
vllm:num_preemptions_total{engine="0"} NaN
"""


def test_engines_are_added_up() -> None:
    assert parse_load(METRICS) == EngineStats(
        waiting=7, kv_cache_usage=0.75, prefix_cache_queries=1200, prefix_cache_hits=600
    )


def test_other_texts_say_nothing() -> None:
    for text in (b"", b"<html>{}", b"vllm:num_requests_waiting{} x\n\xff\n", b"{"):
        assert parse_load(text) == EngineStats()
