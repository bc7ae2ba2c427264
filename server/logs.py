"""Logs: one line a request, as JSON or pretty; standard loggers in the same form."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, BinaryIO, Literal

import orjson
import structlog

from server.record import RequestRecord

_LOGGER = "shuntyard.requests"

LogFormat = Literal["auto", "json", "pretty"]


def is_json(form: LogFormat) -> bool:
    """Whether lines are JSON: asked for, or left open where stderr is no terminal."""
    return form == "json" or (form == "auto" and not sys.stderr.isatty())


def configure_logging(*, form: LogFormat, level: str) -> None:
    """Send everything to stderr, structlog and standard loggers alike. Called once, at start."""
    as_json = is_json(form)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
        shared.append(structlog.processors.format_exc_info)
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class RequestLog:
    """Writes one line per request.

    json_stream: where lines go as JSON, without the way through the loggers, which takes ten times
        as long; None sends them through the loggers.
    quiet_paths: requests to these are logged only if they failed (probes, scrapes).
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        quiet_paths: tuple[str, ...] = (),
        only_failures: bool = False,
        json_stream: BinaryIO | None = None,
    ) -> None:
        self._enabled = enabled
        self._only_failures = only_failures
        self._json_stream = json_stream
        self._quiet_paths = frozenset(quiet_paths)
        self._log: Any = structlog.get_logger(_LOGGER)

    def write(self, record: RequestRecord, end_s: float) -> None:
        if not self._enabled or (self._only_failures and record.outcome != "failed"):
            return
        if record.path in self._quiet_paths and record.outcome != "failed":
            return
        fields = describe_record(record, end_s)
        if self._json_stream is not None:
            level = "error" if record.outcome == "failed" else "info"
            now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
            fields |= {"event": "request", "level": level, "logger": _LOGGER, "timestamp": now}
            self._json_stream.write(_json_line(fields))
            self._json_stream.flush()
            return
        if record.outcome == "failed":
            self._log.error("request", **fields)
        else:
            self._log.info("request", **fields)


def describe_record(record: RequestRecord, end_s: float) -> dict[str, Any]:
    """The fields of a request's line; times in milliseconds."""
    fields: dict[str, Any] = {
        "id": record.request_id,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "outcome": record.outcome,
        "duration_ms": _ms(end_s - record.arrived_s),
    }
    if record.tenant:
        fields["tenant"] = record.tenant
    if record.num_prompt_tokens:
        fields |= {"model": record.model, "prompt_tokens": record.num_prompt_tokens}
    if record.submitted_s is not None:
        fields |= {
            "stream": record.stream,
            "cached_tokens": record.num_cached_tokens,
            "output_tokens": record.num_output_tokens,
            "finish": ",".join(record.finish_reasons),
            "queue_ms": _ms(record.queue_s),
            "ttft_ms": _ms(record.ttft_s),
            "tpot_ms": _ms(record.tpot_s),
        }
    if record.num_shared:
        fields["shared"] = record.num_shared
    if record.num_from_cache:
        fields["from_cache"] = record.num_from_cache
    if record.num_migrations:
        fields["migrations"] = record.num_migrations
    if record.error:
        fields["error"] = record.error
    return fields


def _json_line(fields: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # text that no UTF-8 can hold
        return json.dumps(fields).encode() + b"\n"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)
