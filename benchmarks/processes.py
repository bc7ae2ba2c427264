"""Processes that a benchmark starts, measures and ends."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import msgspec
import psutil  # type: ignore[import-untyped]

from benchmarks.client import Outcome, Spec
from benchmarks.gateway import GatewaySpec
from benchmarks.record import ROOT


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
    with _child("benchmarks.gateway") as (process, log):
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
    with _child("benchmarks.client") as (process, log):
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(spec).decode() + "\n")
        process.stdin.flush()
        yield RunningClient(process, log)


@contextmanager
def _child(
    module: str, arguments: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A Python module as a child that is gone after the block; its log goes to a file."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield process, log
        finally:
            end(process)


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
