"""Traces: one span per request that reached the engine, under the client's own trace."""

from __future__ import annotations

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from server.record import RequestRecord
from server.tracing import RequestTracer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def record(**fields: object) -> RequestRecord:
    made = RequestRecord("req_1", "POST", "/v1/chat/completions", arrived_s=10.0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def spans_of(made: RequestRecord, headers: list[tuple[bytes, bytes]] | None = None) -> tuple:  # type: ignore[type-arg]
    exporter = InMemorySpanExporter()
    with RequestTracer("http://127.0.0.1:9/v1/traces", exporter=exporter) as tracer:
        tracer.record({"headers": headers or []}, made, end_s=12.5)
    return exporter.get_finished_spans()


def test_a_span_carries_times_tokens_and_outcome() -> None:
    [span] = spans_of(
        record(
            submitted_s=10.1,
            first_token_s=10.5,
            model="demo",
            num_prompt_tokens=7,
            num_output_tokens=3,
            tenant="alice",
            finish_reasons=["stop"],
        )
    )
    assert span.name == "llm_request"
    assert abs((span.end_time - span.start_time) / 1e9 - 2.5) < 0.01
    assert span.attributes["gen_ai.usage.completion_tokens"] == 3
    assert span.attributes["gen_ai.latency.time_to_first_token"] == 0.5
    assert span.attributes["shuntyard.tenant"] == "alice"
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)


def test_the_clients_trace_becomes_the_parent() -> None:
    [span] = spans_of(record(submitted_s=10.1), [(b"traceparent", PARENT.encode())])
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]


def test_a_failure_is_marked() -> None:
    [span] = spans_of(record(submitted_s=10.1, outcome="failed", error="the engine died"))
    assert span.status.status_code is StatusCode.ERROR


def test_requests_that_never_reached_the_engine_leave_no_span() -> None:
    assert spans_of(record()) == ()
