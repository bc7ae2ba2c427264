"""A plan of two CPU pipelines, made and served by the commands of a user, with real engines.

It is a re-plan: one pipeline runs already.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server import cli
from tests.clients.live_server import MODEL, LiveServer, live_server
from tests.harness import until

pytestmark = [pytest.mark.engine, pytest.mark.contract, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    cluster, hardware = folder / "cluster.yaml", folder / "cpu.yaml"
    first, second = folder / "first.json", folder / "second.json"
    hardware.write_text("gpus: {cpu: {memory_mib: 1500}}\n")
    arguments = [
        *("plan", "--model", MODEL, "--cluster", str(cluster), "--hardware", str(hardware)),
        *("--workload", "1200x100", "--objective", "throughput", "--model-fidelity", "paper"),
        *("--dtype", "float32", "--json"),
    ]
    for nodes, more in (
        (1, ["--output", str(first)]),
        (2, ["--running", str(first), "--output", str(second)]),
    ):
        cluster.write_text(f"offers: [{{gpu: cpu, nodes: {nodes}}}]\n")
        assert cli.main([*arguments, *more]) == 0
        assert len(json.loads(Path(more[-1]).read_text())["pipelines"]) == nodes
    return second


@pytest.fixture(scope="module")
def server(plan: Path) -> Iterator[LiveServer]:
    with live_server("--plan", str(plan)) as running:
        until(lambda: states(running) == ["serving", "serving"], within_s=300)
        yield running


def states(server: LiveServer) -> list[str]:
    return [item["state"] for item in server.http.get("/admin/pipelines").json()]


def test_a_plan_runs_as_planned(plan: Path, server: LiveServer) -> None:
    planned = json.loads(plan.read_text())["pipelines"]
    listed = server.http.get("/admin/pipelines").json()
    assert [item["weight"] for item in listed] == pytest.approx(
        [one["throughput_rps"] for one in planned]
    )
    assert [item["seats"] for item in listed] == [min(one["batch"], 16) for one in planned]
    assert [len(one["stages"]) for one in planned] == [1, 1]


def test_both_planned_pipelines_answer(server: LiveServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": 24,
        "ignore_eos": True,
    }

    def ask(number: int) -> int:
        answer = server.http.post("/v1/chat/completions", json=body | {"seed": number})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["completion_tokens"])

    with ThreadPoolExecutor(12) as pool:
        futures = [pool.submit(ask, number) for number in range(12)]
        until(
            lambda: all(item["running"] for item in server.http.get("/admin/pipelines").json()),
            within_s=60,
        )
        assert [future.result() for future in futures] == [24] * 12


def test_a_planned_server_has_no_room_for_one_more(server: LiveServer) -> None:
    answer = server.http.post("/admin/pipelines", json={})
    assert answer.status_code == 400
    assert "plan" in answer.json()["error"]["message"]
