"""The benchmark of whole workflows: each system, in the environment where it is measured, answers
all kinds of runs on the real server, and all of them give the same answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import anyio
import pytest

from benchmarks.workflow_frameworks import environment
from benchmarks.workflow_frameworks.capacity import measure_capacity
from benchmarks.workflow_frameworks.load import SYSTEMS, LoadOutcome, LoadSpec, SystemName
from benchmarks.workflow_frameworks.systems.base import Addresses
from benchmarks.workflow_frameworks.testbed import (
    COLLECTION,
    RunningTestbed,
    collection_table,
    ingest,
    server_database,
)
from benchmarks.workflow_frameworks.workload import Kind, Run, load_passages
from tests.clients.live_server import EMBEDDING_MODEL, MODEL, LiveServer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not os.environ.get("SHUNTYARD_TEST_FRAMEWORKS"),
        reason="SHUNTYARD_TEST_FRAMEWORKS=1 runs it: it installs three frameworks beside ours",
    ),
]

RUNS = [Run(kind, f"What do cats do? ({kind})", "Berlin") for kind in get_args(Kind)]


def flag(live: LiveServer, name: str) -> str:
    """What the session's server was told."""
    if live.process is None:
        pytest.skip("needs a server that this session has started")
    arguments = [str(word) for word in live.process.args]
    return arguments[arguments.index(name) + 1]


@pytest.fixture(scope="module")
def bed(live: LiveServer) -> RunningTestbed:
    data = Path(flag(live, "--workflow-data"))
    ingest(live.url, load_passages()[:6])
    database = server_database(data)
    addresses = Addresses(
        base_url=live.url,
        search_url=flag(live, "--searxng-url"),
        database=database,
        table=collection_table(database),
        collection=COLLECTION,
        model=MODEL,
        embedding_model=EMBEDDING_MODEL,
        cache_salt="test",
    )
    assert live.process is not None
    return RunningTestbed(addresses, environment.ensure_environment(), live.process.pid)


def outcome_of(bed: RunningTestbed, system: SystemName) -> tuple[LoadOutcome, dict[str, float]]:
    spec = LoadSpec(
        system=system,
        addresses=bed.with_salt(f"test {system}"),
        warm_up=[Run("rag", "Where is Paris?", "")],
        runs=RUNS,
        concurrency=1,
        limit_s=600,
    )
    measured = bed.measure(spec)
    return measured.outcome, measured.counters


def test_all_systems_answer_alike_and_none_finds_what_another_left(bed: RunningTestbed) -> None:
    outcomes = {system: outcome_of(bed, system) for system in SYSTEMS}
    ours, _ = outcomes["shuntyard"]
    assert all(one.digest for one in ours.runs), ours.errors
    for system, (outcome, counters) in outcomes.items():
        assert outcome.errors == [], system
        assert [one.digest for one in outcome.runs] == [one.digest for one in ours.runs], system
        # The warm-up is not counted. A web run calls the model twice.
        assert counters["chats"] == len(RUNS) + 1, system


def test_capacities_are_of_the_work_of_the_runs(bed: RunningTestbed) -> None:
    capacity = anyio.run(measure_capacity, bed.with_salt("capacity"), RUNS)
    assert min(capacity.chats, capacity.embeddings, capacity.pairs) > 0
