"""What is measured against: one server with its stores, a search engine, and processes of load."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import psycopg
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.processes import BenchmarkError, child, free_port, serving
from benchmarks.workflow_frameworks import environment
from benchmarks.workflow_frameworks.load import LoadOutcome, LoadSpec
from benchmarks.workflow_frameworks.systems.base import Addresses
from benchmarks.workflow_frameworks.workload import load_passages
from spot.engines.vllm_compat.environment import apply_default_environment

SERVER_FLAGS = (
    "--dtype=float32",
    "--max-model-len=2048",
    "--max-num-seqs=32",
    "--embedding-model=demo",
    "--served-model-name=bench",
    "--served-embedding-name=bench-embedding",
    "--no-log-requests",
    # Equal chats of the other frameworks are as many generations as on any other server.
    "--no-share-equal-requests",
)
CHUNK_TOKENS = 64
COLLECTION = "musique"
_INGEST_AT_ONCE = 50
_END_TIMEOUT_S = 900.0
# Of `/metrics`: what it is called here, and the labels to add up.
_COUNTERS: dict[str, tuple[str, dict[str, str]]] = {
    "chats": ("vllm:request_success_total", {}),
    "prompt_tokens": ("vllm:prompt_tokens_total", {}),
    "prefix_cache_hits": ("vllm:prefix_cache_hits_total", {}),
    "completion_tokens": ("vllm:generation_tokens_total", {}),
    "pooling_inputs": ("shuntyard_pooling_inputs_total", {}),
    "pooling_tokens": ("shuntyard_pooling_tokens_total", {}),
    "embedding_requests": ("shuntyard_requests_total", {"endpoint": "/v1/embeddings"}),
    "rerank_requests": ("shuntyard_requests_total", {"endpoint": "/v1/rerank"}),
    "workflow_batches": ("shuntyard_workflow_batches_total", {}),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """counters: how much each grew on the server. server_cpu_s: of all of its processes."""

    outcome: LoadOutcome
    counters: dict[str, float]
    server_cpu_s: float


class RunningTestbed:
    """A running server that has the passages."""

    def __init__(self, addresses: Addresses, python: Path, server_pid: int) -> None:
        self.addresses = addresses
        self._python = python
        self._server_pid = server_pid

    def measure(self, spec: LoadSpec) -> Measured:
        """One load. Raises BenchmarkError if it did not come to its end."""
        command = environment.command(self._python, "benchmarks.workflow_frameworks.load")
        with child(command, environment=environment.variables()) as (process, log):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(spec.to_json() + "\n")
            process.stdin.flush()
            said = process.stdout.readline().strip()
            before, cpu_s = self._counters(), self._cpu_s()
            output = "" if said != "ready" else process.communicate("\n", _END_TIMEOUT_S)[0]
            if process.wait() or not output:
                log.seek(0)
                raise BenchmarkError(f"{spec.system} failed:\n{log.read()[-5000:]}")
        after = self._counters()
        return Measured(
            outcome=LoadOutcome.from_json(output),
            counters={name: after[name] - before[name] for name in after},
            server_cpu_s=self._cpu_s() - cpu_s,
        )

    def with_salt(self, salt: str) -> Addresses:
        return replace(self.addresses, cache_salt=salt)

    def _counters(self) -> dict[str, float]:
        text = httpx.get(f"{self.addresses.base_url}/metrics", trust_env=False, timeout=60).text
        return counters_of(text)

    def _cpu_s(self) -> float:
        """Of all processes that the server has, and of those that it had."""
        server = psutil.Process(self._server_pid)
        total_s = 0.0
        for process in (server, *server.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # then its parent has its time
                total_s += sum(process.cpu_times()[:4])
        return total_s


def counters_of(metrics: str) -> dict[str, float]:
    """What counts here, out of the text of `/metrics`."""
    samples = [
        sample for family in text_string_to_metric_families(metrics) for sample in family.samples
    ]
    return {
        name: sum(
            sample.value
            for sample in samples
            if sample.name == metric and labels.items() <= sample.labels.items()
        )
        for name, (metric, labels) in _COUNTERS.items()
    }


@contextmanager
def testbed(python: Path, *, seed: int, num_passages: int | None) -> Iterator[RunningTestbed]:
    """Starts everything and stores the passages; ends everything after the block."""
    server_variables = dict(os.environ)
    apply_default_environment(server_variables)
    search_port, port = free_port(), free_port()
    search = ["-m", "benchmarks.workflow_frameworks.search_stub", str(search_port), str(seed)]
    with _postgres_folder() as data:
        flags = [
            *SERVER_FLAGS,
            f"--port={port}",
            f"--workflow-data={data}",
            f"--searxng-url=http://127.0.0.1:{search_port}",
        ]
        server = [sys.executable, "-m", "server", "serve", *flags]
        with (
            serving([sys.executable, *search], search_port),
            serving(server, port, environment=server_variables) as process,
        ):
            base_url = f"http://127.0.0.1:{port}"
            ingest(base_url, load_passages()[:num_passages])
            database = server_database(data)
            addresses = Addresses(
                base_url=base_url,
                search_url=f"http://127.0.0.1:{search_port}",
                database=database,
                table=collection_table(database),
                collection=COLLECTION,
                model="bench",
                embedding_model="bench-embedding",
                cache_salt="",
            )
            yield RunningTestbed(addresses, python, process.pid)


@contextmanager
def _postgres_folder() -> Iterator[Path]:
    """One that Postgres can use also where the server runs as root, which Postgres does not."""
    folder = Path(tempfile.mkdtemp(prefix="shuntyard-benchmark-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ingest(base_url: str, passages: Sequence[dict[str, str]]) -> None:
    with httpx.Client(base_url=base_url, trust_env=False, timeout=1800) as http:
        for first in range(0, len(passages), _INGEST_AT_ONCE):
            print(f"\rstoring passages: {first} of {len(passages)}", end="", file=sys.stderr)
            params: dict[str, Any] = {
                "collection": COLLECTION,
                "documents": passages[first : first + _INGEST_AT_ONCE],
                "chunk": {"size": CHUNK_TOKENS, "overlap": 0, "unit": "tokens"},
            }
            node = {"id": "store", "op": "ingest", "params": params}
            run = http.post("/v1/workflows", json={"nodes": [node]}).json()
            if run.get("status") != "completed":
                raise BenchmarkError(f"the passages were not stored: {run}")
        print(file=sys.stderr)


def server_database(data: Path) -> str:
    """The address of the server's own Postgres, whose socket folder its `postmaster.pid` names."""
    socket_folder = (data / "postgres" / "postmaster.pid").read_text().splitlines()[4]
    return f"postgresql://postgres@/postgres?host={socket_folder}"


def collection_table(database: str) -> str:
    with psycopg.connect(database) as connection:
        row = connection.execute(
            "SELECT id FROM shuntyard.collections WHERE name = %s AND NOT is_deleted",
            (COLLECTION,),
        ).fetchone()
    assert row is not None
    return f"shuntyard.chunks_{row[0]}"
