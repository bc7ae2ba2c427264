"""One line a request, in either form."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from server.logs import RequestLog, configure_logging, describe_record
from server.record import RequestRecord


def record(**fields: Any) -> RequestRecord:
    made = RequestRecord("req_1", "POST", "/v1/completions", 10.0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


GENERATED = {
    "status": 200,
    "model": "demo",
    "stream": True,
    "tenant": "alice",
    "submitted_s": 10.0,
    "queue_s": 0.125,
    "first_token_s": 10.25,
    "last_token_s": 10.75,
    "num_prompt_tokens": 7,
    "num_output_tokens": 3,
    "num_choices": 1,
    "finish_reasons": ["stop"],
}


def test_a_generation_is_described_with_its_figures() -> None:
    assert describe_record(record(**GENERATED), 11.0) == {
        "id": "req_1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "outcome": "completed",
        "duration_ms": 1000.0,
        "tenant": "alice",
        "model": "demo",
        "stream": True,
        "prompt_tokens": 7,
        "cached_tokens": 0,
        "output_tokens": 3,
        "finish": "stop",
        "queue_ms": 125.0,
        "ttft_ms": 250.0,
        "tpot_ms": 250.0,
    }


def test_an_error_is_described_without_figures() -> None:
    fields = describe_record(record(status=404, outcome="client_error", error="no"), 10.001)
    assert fields["error"] == "no"
    assert fields["duration_ms"] == 1.0
    assert "prompt_tokens" not in fields
    assert "tenant" not in fields


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], _ = before
    root.setLevel(before[1])
    structlog.reset_defaults()


def test_our_failures_are_errors_and_the_rest_is_information() -> None:
    with capture_logs() as lines:
        log = RequestLog()
        log.write(record(status=200), 10.0)
        log.write(record(status=400, outcome="client_error"), 10.0)
        log.write(record(status=500, outcome="failed"), 10.0)
    assert [line["log_level"] for line in lines] == ["info", "info", "error"]


def test_quiet_paths_are_quiet_unless_we_fail() -> None:
    with capture_logs() as lines:
        log = RequestLog(quiet_paths=("/v1/completions",))
        log.write(record(status=200), 10.0)
        log.write(record(status=503, outcome="rejected"), 10.0)
        log.write(record(status=500, outcome="failed"), 10.0)
        RequestLog(enabled=False).write(record(outcome="failed"), 10.0)
    assert [line["outcome"] for line in lines] == ["failed"]


def test_json_lines_of_both_kinds_of_loggers(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(form="json", level="info")
    RequestLog().write(record(**GENERATED), 11.0)
    logging.getLogger("some.library").warning("words %d", 7)
    logging.getLogger("some.library").debug("not this")
    try:
        raise ValueError("inside")
    except ValueError:
        logging.getLogger("some.library").exception("it broke")
    request, library, broken = map(json.loads, capsys.readouterr().err.splitlines())
    assert (request["event"], request["id"], request["level"]) == ("request", "req_1", "info")
    assert (library["event"], library["logger"]) == ("words 7", "some.library")
    assert library["timestamp"].endswith("Z")
    assert broken["event"] == "it broke"
    assert "ValueError: inside" in broken["exception"]


def test_pretty_lines_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(form="pretty", level="warning")
    RequestLog().write(record(status=500, outcome="failed"), 10.0)
    RequestLog().write(record(status=200), 10.0)
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "outcome=failed" in text


def test_json_lines_are_written_whole_and_say_what_the_loggers_would() -> None:
    stream = io.BytesIO()
    log = RequestLog(json_stream=stream)
    log.write(record(**GENERATED), 11.0)
    log.write(record(outcome="failed", error="lone \udcff surrogate"), 11.0)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["event"] == "request"
    assert (first["level"], second["level"]) == ("info", "error")
    assert first.items() >= describe_record(record(**GENERATED), 11.0).items()
    assert first["timestamp"].endswith("Z")


def test_only_failures_are_written_when_asked() -> None:
    stream = io.BytesIO()
    log = RequestLog(json_stream=stream, only_failures=True)
    log.write(record(**GENERATED), 11.0)
    assert stream.getvalue() == b""
    log.write(record(outcome="failed"), 11.0)
    assert json.loads(stream.getvalue())["level"] == "error"
