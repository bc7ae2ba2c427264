"""Locust users against an OpenAI-compatible server, sized like production traffic.

    locust -f loadtest/locustfile.py --headless -u 16 -r 4 -t 60s --host http://127.0.0.1:8000

Users: ChatUser (streaming chat), CompletionUser (whole text completions), AbortingUser (leaves
after some tokens, or before the first one). Names at the end of the command run only those.

ChatUser also reports, as requests of type `metric`: `TTFT` and `TPOT` in milliseconds, `tokens/s`
of each stream (a rate, in the columns of times) and `output tokens` (a count, there as well, from
the usage that the server reports). The exit code is 1 if anything failed or nothing was sent.
"""

# Locust brings no types that mypy may follow.
# mypy: disable-error-code="untyped-decorator,misc"

from __future__ import annotations

import http.client
import json
import os
import random
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from locust import User, constant, events, task
from locust.env import Environment

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loadtest.sse import StreamBroken, StreamTimes
from loadtest.trace import (
    CHAT_OVERHEAD_TOKENS,
    DEFAULT_TRACE,
    RequestSize,
    prompt_of,
    read_trace,
    sample,
)

_TIMEOUT_S = 300.0
_READ_BYTES = 65536


@events.init_command_line_parser.add_listener
def _add_options(parser: ArgumentParser) -> None:
    """Our options; each can be given as an environment variable `LOADTEST_*` too."""

    def add(flag: str, default: Any, text: str) -> None:
        kind = type(default)
        name = "LOADTEST_" + flag.strip("-").replace("-", "_").upper()
        value = kind(os.environ.get(name, default))
        parser.add_argument(flag, type=kind, default=value, help=f"{text} ({name})")

    add("--model", "", "model name to ask for; empty for the server's default")
    add("--bearer", "", "API key")
    add("--trace", str(DEFAULT_TRACE), "CSV file with request sizes")
    add("--sizes-seed", 1, "seed of sizes, prompts and the moments of leaving")
    add("--max-context", 2048, "prompt plus output never get longer than this, in tokens")
    add("--prompt-scale", 0.1, "factor on the trace's prompt tokens")
    add("--output-scale", 0.1, "factor on the trace's output tokens")


@events.quitting.add_listener
def _fail_on_failures(environment: Environment, **_: Any) -> None:
    total = environment.stats.total
    if total.num_failures or not total.num_requests:
        environment.process_exit_code = 1


class _SizedUser(User):
    """What all users share: sizes from the trace, a body to send, a way to report."""

    abstract = True
    wait_time = constant(0)
    _num_users = 0

    def on_start(self) -> None:
        _SizedUser._num_users += 1
        self._options = self.environment.parsed_options
        self._rng = random.Random(f"{self._options.sizes_seed} {_SizedUser._num_users}")
        self._sizes = sample(read_trace(Path(self._options.trace)), self._rng)

    def _next_size(self) -> RequestSize:
        # Twice the overhead: a prompt may turn out some tokens longer than it was meant to be.
        return next(self._sizes).scaled(
            prompt_scale=self._options.prompt_scale,
            output_scale=self._options.output_scale,
            limit=self._options.max_context - 2 * CHAT_OVERHEAD_TOKENS,
        )

    def _body(self, size: RequestSize, **fields: Any) -> dict[str, Any]:
        body = {"max_tokens": size.num_output_tokens, "ignore_eos": True, "temperature": 0}
        if self._options.model:
            body["model"] = self._options.model
        return body | fields

    def _chat_body(self, size: RequestSize) -> dict[str, Any]:
        content = prompt_of(size.num_prompt_tokens - CHAT_OVERHEAD_TOKENS, self._rng)
        return self._body(
            size,
            messages=[{"role": "user", "content": content}],
            stream=True,
            stream_options={"include_usage": True},
        )

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        """A connection of its own for each request, closed whatever happens."""
        address = urlsplit(self.host or "http://127.0.0.1:8000")
        is_tls = address.scheme == "https"
        kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        connection = kind(address.hostname or "", address.port, timeout=_TIMEOUT_S)
        try:
            yield connection
        finally:
            connection.close()

    def _send(
        self, connection: http.client.HTTPConnection, path: str, body: dict[str, Any]
    ) -> None:
        headers = {"Content-Type": "application/json"}
        if self._options.bearer:
            headers["Authorization"] = f"Bearer {self._options.bearer}"
        prefix = urlsplit(self.host or "").path.rstrip("/")
        connection.request("POST", prefix + path, json.dumps(body), headers)

    @contextmanager
    def _reported(self, name: str) -> Iterator[_Report]:
        """One row in Locust's table: the time of the block, and its error if it raises one."""
        report = _Report()
        started_s = time.perf_counter()
        error: Exception | None = None
        try:
            yield report
        except (OSError, http.client.HTTPException, StreamBroken, KeyError, ValueError) as caught:
            error = caught
        self.environment.events.request.fire(
            request_type="POST",
            name=name,
            response_time=1000 * (time.perf_counter() - started_s),
            response_length=report.num_bytes,
            exception=error,
            context={},
        )

    def _metric(self, name: str, value: float | None) -> None:
        """A figure of one stream, as a row of its own."""
        if value is not None:
            self.environment.events.request.fire(
                request_type="metric",
                name=name,
                response_time=value,
                response_length=0,
                exception=None,
                context={},
            )


class _Report:
    """What a request has to say about itself."""

    num_bytes = 0


def _checked(response: http.client.HTTPResponse) -> http.client.HTTPResponse:
    """The response, if it is a success. Raises StreamBroken with the start of its body."""
    if response.status != 200:
        raise StreamBroken(f"status {response.status}: {response.read()[:300]!r}")
    return response


class ChatUser(_SizedUser):
    """Streams chat completions, one after another."""

    weight = 6

    @task
    def chat(self) -> None:
        times = StreamTimes(time.perf_counter())
        with self._reported("chat, streamed") as report, self._connected() as connection:
            self._send(connection, "/v1/chat/completions", self._chat_body(self._next_size()))
            response = _checked(connection.getresponse())
            while chunk := response.read1(_READ_BYTES):
                report.num_bytes += len(chunk)
                times.feed(chunk, time.perf_counter())
            times.check_complete()
            self._report_times(times)

    def _report_times(self, times: StreamTimes) -> None:
        self._metric("TTFT", _milliseconds(times.ttft_s))
        self._metric("TPOT", _milliseconds(times.tpot_s))
        if times.tpot_s:
            self._metric("tokens/s", 1 / times.tpot_s)
        self._metric("output tokens", times.num_output_tokens)


class CompletionUser(_SizedUser):
    """Asks for text completions and waits for the whole answer."""

    weight = 2

    @task
    def complete(self) -> None:
        size = self._next_size()
        body = self._body(size, prompt=prompt_of(size.num_prompt_tokens, self._rng))
        with self._reported("completion, whole") as report, self._connected() as connection:
            self._send(connection, "/v1/completions", body)
            data = _checked(connection.getresponse()).read()
            report.num_bytes = len(data)
            answer = json.loads(data)
            if answer["usage"]["completion_tokens"] != size.num_output_tokens:
                raise StreamBroken(f"{answer['usage']} for {size.num_output_tokens} tokens asked")
            if answer["choices"][0]["finish_reason"] != "length":
                raise StreamBroken(f"finish reason {answer['choices'][0]['finish_reason']!r}")


class AbortingUser(_SizedUser):
    """Closes the connection in the middle of an answer, or before there is one."""

    weight = 2

    @task(2)
    def leave_while_streaming(self) -> None:
        """Leaves after some pieces of text; sooner if the answer ends before."""
        size = self._next_size()
        num_wanted = self._rng.randint(1, max(1, size.num_output_tokens - 1))
        times = StreamTimes(time.perf_counter())
        with (
            self._reported("chat, left while streaming") as report,
            self._connected() as connection,
        ):
            self._send(connection, "/v1/chat/completions", self._chat_body(size))
            response = _checked(connection.getresponse())
            while times.num_pieces < num_wanted:
                chunk = response.read1(_READ_BYTES)
                if not chunk:
                    times.check_complete()
                    break
                report.num_bytes += len(chunk)
                times.feed(chunk, time.perf_counter())
            response.close()

    @task(1)
    def leave_while_queued(self) -> None:
        """Leaves after at most a fifth of a second, mostly before the first token."""
        with self._reported("chat, left while queued") as report, self._connected() as connection:
            self._send(connection, "/v1/chat/completions", self._chat_body(self._next_size()))
            connection.sock.settimeout(self._rng.uniform(0.001, 0.2))
            try:
                report.num_bytes = len(_checked(connection.getresponse()).read1(_READ_BYTES))
            except TimeoutError:
                return


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
