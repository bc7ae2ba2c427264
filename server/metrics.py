"""Prometheus metrics: vLLM's names, so that public dashboards work, and ours as `shuntyard_*`.

Names, units and formulas: docs/metrics.md.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from server.record import RequestRecord
from spot.engines.base import EngineCard, EngineStats, EngineStatus

_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_TIME_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_LATENCY_BUCKETS = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_LENGTH_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
_STEP_BUCKETS = tuple(float(2**e) for e in range(15))


class _Children(dict[tuple[str, ...], Counter]):
    """A counter's children by their label values, looked up in the library once."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __missing__(self, values: tuple[str, ...]) -> Counter:
        child = self[values] = self._counter.labels(*values)
        return child


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        labels = ["model_name", "engine"]

        def gauge(name: str, text: str) -> Gauge:
            metric = Gauge(name, text, labels, registry=self.registry)
            return metric.labels(model_name, "0")

        def counter(name: str, text: str) -> Counter:
            metric = Counter(name, text, labels, registry=self.registry)
            return metric.labels(model_name, "0")

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(name, text, labels, registry=self.registry, buckets=buckets)
            return metric.labels(model_name, "0")

        self._running = gauge("vllm:num_requests_running", "Generations that the engine runs.")
        self._waiting = gauge("vllm:num_requests_waiting", "Generations that wait for a seat.")
        self._kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.")
        self._queries = counter(
            "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."
        )
        self._hits = counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.")
        self._preemptions = counter("vllm:num_preemptions", "Preemptions by the engine.")
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of all requests.")
        self._output_tokens = counter("vllm:generation_tokens", "Output tokens of all requests.")
        self._ttft = histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token, s.", _TTFT_BUCKETS
        )
        self.inter_token = histogram(
            "vllm:inter_token_latency_seconds", "Time between tokens, s.", _TOKEN_TIME_BUCKETS
        )
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per output token after the first, s.",
            _TOKEN_TIME_BUCKETS,
        )
        self._e2e = histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to end, s.", _LATENCY_BUCKETS
        )
        self._queue_time = histogram(
            "vllm:request_queue_time_seconds", "Time in the engine's queue, s.", _LATENCY_BUCKETS
        )
        self._prompt_length = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", _LENGTH_BUCKETS
        )
        self._output_length = histogram(
            "vllm:request_generation_tokens", "Output tokens of a request.", _LENGTH_BUCKETS
        )
        self._prefill_time = histogram(
            "vllm:request_prefill_time_seconds", "Scheduled to first token, s.", _LATENCY_BUCKETS
        )
        self._decode_time = histogram(
            "vllm:request_decode_time_seconds", "First to last token, s.", _LATENCY_BUCKETS
        )
        self._inference_time = histogram(
            "vllm:request_inference_time_seconds", "Scheduled to last token, s.", _LATENCY_BUCKETS
        )
        self._max_tokens = histogram(
            "vllm:request_params_max_tokens", "Output limit of a request.", _LENGTH_BUCKETS
        )
        self._n = histogram("vllm:request_params_n", "Choices of a request.", _CHOICE_BUCKETS)
        self._step_tokens = histogram(
            "vllm:iteration_tokens_total", "Tokens of one engine step.", _STEP_BUCKETS
        )
        self._cache_info: Gauge | None = None
        self._cache: dict[str, str] = {}

        def children(name: str, text: str, labels: list[str]) -> _Children:
            return _Children(Counter(name, text, labels, registry=self.registry))

        self._success = children(
            "vllm:request_success",
            "Finished requests by finish reason.",
            [*labels, "finished_reason"],
        )
        self._requests = children(
            "shuntyard_requests", "HTTP requests by endpoint and outcome.", ["endpoint", "outcome"]
        )
        self._responses = children(
            "shuntyard_http_responses",
            "HTTP responses by endpoint and status.",
            ["endpoint", "status"],
        )
        self.prefilled_ahead = Counter(
            "shuntyard_prefilled_ahead_tokens",
            "Tokens of workflows' prompts that the engine read before the rest was there.",
            registry=self.registry,
        )
        shared = Counter(
            "shuntyard_shared_generations",
            "Generations that were not run: an equal one ran, or its output was kept.",
            ["how"],
            registry=self.registry,
        )
        self._shared_inflight, self._shared_cache = map(shared.labels, ("inflight", "cache"))
        self._in_flight = Gauge(
            "shuntyard_requests_in_flight", "Requests being answered.", registry=self.registry
        )
        self._engine_up = Gauge(
            "shuntyard_engine_up", "1 while the engine takes work.", registry=self.registry
        )
        self._restarts = Gauge(
            "shuntyard_engine_restarts", "Times the engine was restarted.", registry=self.registry
        )
        self._seen = EngineStats()
        self._live: dict[int, RequestRecord] = {}

    def begin(self, record: RequestRecord) -> None:
        """A request has reached the engine. Its tokens count from now on, as they come."""
        self._live[id(record)] = record
        self._shared_inflight.inc(record.num_shared - record.num_from_cache)
        self._shared_cache.inc(record.num_from_cache)

    def observe(self, record: RequestRecord, endpoint: str, now_s: float) -> None:
        """Count a request that has ended, however it ended."""
        self._requests[endpoint, record.outcome].inc()
        self._responses[endpoint, str(record.status)].inc()
        if record.submitted_s is None:
            return
        self._live.pop(id(record), None)
        self._count_tokens(record)
        self._prompt_length.observe(record.num_prompt_tokens)
        self._output_length.observe(record.num_output_tokens)
        if record.queue_s is not None:
            self._queue_time.observe(record.queue_s)
        self._e2e.observe(now_s - record.arrived_s)
        if (tpot_s := record.tpot_s) is not None:
            self._tpot.observe(tpot_s)
        self._n.observe(record.n)
        self._max_tokens.observe(record.max_tokens)
        if record.first_token_s is not None and record.last_token_s is not None:
            scheduled_s = record.submitted_s + (record.queue_s or 0.0)
            self._prefill_time.observe(max(0.0, record.first_token_s - scheduled_s))
            self._decode_time.observe(record.last_token_s - record.first_token_s)
            self._inference_time.observe(max(0.0, record.last_token_s - scheduled_s))
        if record.outcome not in ("completed", "aborted", "failed"):
            return
        reasons = record.finish_reasons if record.outcome == "completed" else [record.outcome]
        for reason in reasons:
            name = {"aborted": "abort", "failed": "error", "tool_calls": "stop"}.get(reason, reason)
            self._success[self._model_name, "0", name].inc()

    def _count_tokens(self, record: RequestRecord) -> None:
        """Count what came since this was last done for the record; the prompt at first."""
        if not record.is_prompt_counted:
            record.is_prompt_counted = True
            self._prompt_tokens.inc(record.num_prompt_tokens)
        if (num_new := record.num_output_tokens - record.num_counted_tokens) > 0:
            record.num_counted_tokens += num_new
            self._output_tokens.inc(num_new)

    def observe_step(self, num_tokens: int) -> None:
        """An engine has made a step of so many tokens, prompts that it completed included."""
        self._step_tokens.observe(num_tokens)

    def observe_first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def _show_cache(self, cache: dict[str, str]) -> None:
        """A gauge that is 1, with what the engine says of its cache as labels."""
        if cache == self._cache:
            return
        self._cache = cache
        if self._cache_info is not None:
            self.registry.unregister(self._cache_info)
        names = ["model_name", "engine", *cache]
        text = "The KV cache's configuration."
        self._cache_info = Gauge("vllm:cache_config_info", text, names, registry=self.registry)
        self._cache_info.labels(self._model_name, "0", *cache.values()).set(1)

    def render(
        self,
        stats: EngineStats,
        status: EngineStatus,
        num_requests: int,
        card: EngineCard | None = None,
    ) -> bytes:
        """The exposition text, with the engine's state of this moment."""
        for record in self._live.values():
            if record.first_token_s is not None:
                self._count_tokens(record)
        if card is not None:
            self._show_cache(card.cache)
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._kv_usage.set(stats.kv_cache_usage)
        for counter, name in (
            (self._queries, "prefix_cache_queries"),
            (self._hits, "prefix_cache_hits"),
            (self._preemptions, "num_preemptions"),
        ):
            # A restarted engine counts from zero again; ours never fall.
            counter.inc(max(0, getattr(stats, name) - getattr(self._seen, name)))
        self._seen = stats
        self._in_flight.set(num_requests)
        self._engine_up.set(status.state == "ready")
        self._restarts.set(status.num_restarts)
        return generate_latest(self.registry)
