"""The real server as its users start it: the command in a process of its own, on the loopback.

    with live_server() as server:
        server.openai().models.list()

Leaving the block sends SIGTERM and checks that the command exits with 0 and that none of the
processes it started is left. With LIVE_SERVER_URL set, that server is used and nothing is started.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.postgres import data_folder

MODEL: Final = "SmolLM2-135M-Instruct"
ALIAS: Final = "org/name"
EMBEDDING_MODEL: Final = "all-MiniLM-L6-v2"
MAX_MODEL_LEN: Final = 2048
MAX_NUM_SEQS: Final = 16
COMPACT_JSON: Final = '{"backend": "xgrammar", "disable_any_whitespace": true}'

START_TIMEOUT_S: Final = 500.0
STOP_TIMEOUT_S: Final = 60.0

_READY: Final = re.compile(r"is ready at (http://\S+)/v1")
# Inherited by every process that the command starts, whatever becomes its parent.
_MARK: Final = "LIVE_SERVER_MARK"


@dataclass(slots=True)
class LiveServer:
    """A server that answers at `url`, and clients for it."""

    url: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    mark: str = ""
    _http: httpx.Client | None = None
    _clients: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def base_url(self) -> str:
        """What OpenAI clients want to be told."""
        return f"{self.url}/v1"

    @property
    def http(self) -> httpx.Client:
        if self._http is None:
            self._http = self._clients.enter_context(
                httpx.Client(base_url=self.url, trust_env=False, timeout=120)
            )
        return self._http

    def openai(self, **options: Any) -> OpenAI:
        """The official client. No retries, so that a failure shows itself."""
        options = {"api_key": "unused", "max_retries": 0, "timeout": 120, **options}
        return self._clients.enter_context(OpenAI(base_url=self.base_url, **options))

    def async_openai(self, **options: Any) -> AsyncOpenAI:
        """The official async client; the caller closes it."""
        options = {"api_key": "unused", "max_retries": 0, "timeout": 120, **options}
        return AsyncOpenAI(base_url=self.base_url, **options)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.http.get("/metrics").text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    @property
    def num_running(self) -> int:
        return int(self.metric("vllm:num_requests_running", model_name=MODEL))

    @property
    def load(self) -> int:
        return int(self.http.get("/load").json()["server_load"])

    @property
    def processes(self) -> dict[int, str]:
        """All living processes of the server, with their command lines."""
        return _marked(self.mark)

    def tail(self, num_lines: int = 60) -> str:
        """The end of the server's log."""
        if self.log is None:
            return "(not started here: no log)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def close(self) -> None:
        self._clients.close()


@contextlib.contextmanager
def live_server(*flags: str) -> Iterator[LiveServer]:
    """Start the command with the demo model and these further flags; wait until it is ready."""
    if url := os.environ.get("LIVE_SERVER_URL"):
        server = LiveServer(url.rstrip("/"))
        try:
            yield server
        finally:
            server.close()
        return
    with tempfile.TemporaryDirectory(prefix="live-server-") as scratch, data_folder() as data:
        arguments = [*command(), "--workflow-data", str(data), *flags]
        server = start(arguments, log=Path(scratch) / "log")
        try:
            server.url = wait_until_ready(server)
            yield server
        finally:
            server.close()
            stop(server)


def start(arguments: Sequence[str], *, log: Path) -> LiveServer:
    """Start a command; the caller waits until it is ready, and ends it."""
    mark = secrets.token_hex(8)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            arguments,
            env={**os.environ, _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    return LiveServer("", process, log, mark)


def crash(server: LiveServer) -> None:
    """SIGKILL for the command; wait until the processes that it started have noticed."""
    assert server.process is not None
    server.close()
    server.process.kill()
    server.process.wait()
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while left := server.processes:
        assert time.monotonic() < deadline_s, f"left behind: {left}\n{server.tail()}"
        time.sleep(0.1)


def command() -> list[str]:
    """`shuntyard serve` of the environment that runs the tests, with what all client tests need."""
    model = [path] if (path := os.environ.get("SHUNTYARD_TEST_MODEL")) else []
    return [
        str(Path(sys.executable).with_name("shuntyard")),
        "serve",
        *model,
        *("--port", "0"),
        *("--served-model-name", MODEL, ALIAS),
        *("--embedding-model", "demo"),
        *("--max-model-len", str(MAX_MODEL_LEN)),
        *("--max-num-seqs", str(MAX_NUM_SEQS)),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        # Ties between tokens are rare in float32, so that greedy answers can be compared.
        *("--dtype", "float32"),
        # A model this small may otherwise fill its JSON with white space until the limit.
        *("--structured-outputs-config", COMPACT_JSON),
    ]


def wait_until_ready(server: LiveServer) -> str:
    """The URL that the command announces once the engine is ready."""
    process = server.process
    assert process is not None
    assert server.log is not None
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if found := _READY.search(server.log.read_text(errors="replace")):
            url = found.group(1)
            assert httpx.get(f"{url}/health", trust_env=False, timeout=10).status_code == 200
            return url
        if process.poll() is not None:
            raise AssertionError(f"exited with {process.returncode}:\n{server.tail()}")
        time.sleep(0.1)
    raise AssertionError(f"not ready within {START_TIMEOUT_S:.0f} s:\n{server.tail()}")


def stop(server: LiveServer) -> None:
    """SIGTERM; the command must exit with 0 and take all its processes along."""
    process = server.process
    assert process is not None
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    code = process.poll()
    left = server.processes
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    assert code == 0, f"SIGTERM ended it with {code}:\n{server.tail()}"
    assert not left, f"left behind: {left}\n{server.tail()}"


def _marked(mark: str) -> dict[int, str]:
    """The living processes that carry the mark, with their command lines."""
    found = {}
    wanted = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                found[int(folder.name)] = b" ".join(words).decode(errors="replace").strip()
    return found
