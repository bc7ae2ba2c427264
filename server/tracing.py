"""OpenTelemetry traces, one span a request, sent by OTLP over HTTP; off without an endpoint.

Attributes follow OpenTelemetry's conventions for generative AI, as vLLM's spans do.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from starlette.types import Scope

from server.asgi import header
from server.record import RequestRecord
from spot.errors import ShuntyardError

_NS = 1_000_000_000


class TracingUnavailable(ShuntyardError):
    """Traces were asked for, but OpenTelemetry is not installed."""


class RequestTracer:
    """Records finished requests as spans. A context manager: leaving sends what is left."""

    def __init__(self, endpoint: str, *, exporter: Any = None) -> None:
        """exporter: another span exporter than OTLP's, for tests."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import (
                TraceContextTextMapPropagator,
            )
        except ImportError:
            raise TracingUnavailable(
                "--otlp-traces-endpoint needs OpenTelemetry: pip install 'shuntyard[otel]'"
            ) from None
        self._provider = TracerProvider(resource=Resource.create({"service.name": "shuntyard"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _otlp(endpoint)))
        self._tracer = self._provider.get_tracer("shuntyard")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, scope: Scope, record: RequestRecord, end_s: float) -> None:
        """One span, from arrival to `end_s`. A `traceparent` of the client becomes its parent."""
        if record.submitted_s is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        now_ns = time.time_ns()
        carrier = {
            name: value.decode("latin-1")
            for name in ("traceparent", "tracestate")
            if (value := header(scope, name.encode())) is not None
        }
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=now_ns - int((end_s - record.arrived_s) * _NS),
            attributes=_attributes(record, end_s),
        )
        if record.outcome == "failed":
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(end_time=now_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._provider.shutdown()


def _otlp(endpoint: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint)


def _attributes(record: RequestRecord, end_s: float) -> dict[str, str | int | float | list[str]]:
    attributes: dict[str, str | int | float | list[str]] = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.response.model": record.model,
        "gen_ai.request.n": record.num_choices,
        "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": record.num_output_tokens,
        "gen_ai.latency.e2e": end_s - record.arrived_s,
        "gen_ai.response.finish_reasons": record.finish_reasons,
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "url.path": record.path,
        "shuntyard.outcome": record.outcome,
    }
    if record.tenant:
        attributes["shuntyard.tenant"] = record.tenant
    if record.ttft_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = record.ttft_s
    return attributes
