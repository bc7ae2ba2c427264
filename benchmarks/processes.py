"""Processes that a benchmark starts, measures and ends."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import msgspec
import psutil  # type: ignore[import-untyped]

from benchmarks.client import Outcome, Spec
from benchmarks.gateway import GatewaySpec
from benchmarks.record import ROOT

_START_TIMEOUT_S = 600.0


class BenchmarkError(Exception):
    """Something that is measured did not do its work; no result is claimed."""


@dataclass(slots=True)
class RunningGateway:
    """A gateway that serves on `port`."""

    port: int
    process: subprocess.Popen[str]

    @property
    def cpu_s(self) -> float:
        return cpu_seconds([self.process.pid])

    @property
    def rss_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)


@contextmanager
def gateway(spec: GatewaySpec) -> Iterator[RunningGateway]:
    """A `benchmarks.gateway` for the time of the block."""
    with child(_module("benchmarks.gateway")) as (process, log):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(spec).decode() + "\n")
        process.stdin.flush()
        line = process.stdout.readline().split()
        if line[:1] != ["ready"]:
            log.seek(0)
            raise BenchmarkError(f"the gateway did not start:\n{log.read()[-3000:]}")
        yield RunningGateway(int(line[1]), process)
        process.stdin.close()
        if process.wait(60) != 0:
            log.seek(0)
            raise BenchmarkError(f"the gateway failed:\n{log.read()[-3000:]}")


def run_client(spec: Spec) -> Outcome:
    """One load, in a process of its own. Raises BenchmarkError if any request failed."""
    with holding_client(spec) as client:
        return client.finish()


@dataclass(slots=True)
class RunningClient:
    """A load generator at work."""

    process: subprocess.Popen[str]
    log: IO[str]

    def wait_held(self) -> None:
        """Wait until every stream has had its first token."""
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != "held":
            self.log.seek(0)
            raise BenchmarkError(f"the streams did not open:\n{self.log.read()[-3000:]}")

    def finish(self) -> Outcome:
        """Let held streams go; the outcome."""
        output, _ = self.process.communicate("\n")
        if self.process.returncode:
            self.log.seek(0)
            raise BenchmarkError(f"the load generator failed:\n{self.log.read()[-3000:]}")
        if not output:
            raise BenchmarkError("the load generator ended without an outcome")
        outcome = msgspec.json.decode(output, type=Outcome)
        if outcome.num_failed:
            raise BenchmarkError(f"{outcome.num_failed} requests failed")
        return outcome


@contextmanager
def holding_client(spec: Spec) -> Iterator[RunningClient]:
    """A load generator for the time of the block."""
    with child(_module("benchmarks.client")) as (process, log):
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(spec).decode() + "\n")
        process.stdin.flush()
        yield RunningClient(process, log)


def _module(name: str) -> list[str]:
    return [sys.executable, "-m", name]


@contextmanager
def child(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A process to talk with that is gone after the block; its log goes to a file."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield process, log
        finally:
            end(process)


@contextmanager
def serving(
    command: Sequence[str], port: int, *, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A server for the time of the block, once its `/health` is good; its family ends with it."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            _wait_healthy(process, port, log)
            yield process
        finally:
            family = psutil.Process(process.pid).children(recursive=True)
            end(process, within_s=30)
            for left in psutil.wait_procs(family, timeout=10)[1]:
                left.kill()


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_healthy(process: subprocess.Popen[str], port: int, log: IO[str]) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        if _is_healthy(port):
            return
        time.sleep(0.5)
    log.seek(0)
    raise BenchmarkError(f"the server did not start:\n{log.read()[-5000:]}")


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def end(process: subprocess.Popen[str], *, within_s: float = 15.0) -> None:
    """Ask a child to end, then make it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time that these processes have used so far, all threads."""
    total = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system
    return total
