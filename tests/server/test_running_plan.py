"""`shuntyard plan --running`: from the plan file that runs to the one that follows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server import cli
from server.plan_file import read_plan

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
Change = Callable[[dict[str, Any]], object]


class Desk:
    """Where somebody plans: a cluster.yaml, the plan that runs, the one that follows."""

    def __init__(self, folder: Path) -> None:
        self.cluster, self.running, self.following = (
            folder / name for name in ("cluster.yaml", "running.json", "following.json")
        )

    def plan(self, cluster: str, *more: str, model: str = MODEL) -> int:
        self.cluster.write_text(f"offers: [{cluster}]")
        return cli.main(
            [
                *("plan", "--model", model, "--cluster", str(self.cluster)),
                *("--workload", "azure-conv", "--model-fidelity", "paper", *more),
            ]
        )

    def move(self, cluster: str, *more: str, model: str = MODEL) -> int:
        return self.plan(cluster, "--running", str(self.running), *more, model=model)

    def change(self, how: Change) -> None:
        content = json.loads(self.running.read_text())
        how(content)
        self.running.write_text(json.dumps(content))


# No two of them are better together.
SLOW = "inter: {latency_us: 1000, bandwidth_gb_per_s: 0.001}"
SPOT = (
    "{shape: g6e.xlarge, count: %d, market: spot, zone: use1-az1, price_usd_per_hour: 1.0, "
    f"{SLOW}}}"
)
OTHER = "{shape: g6.12xlarge, count: 1, price_usd_per_hour: 2.0}"
THROUGHPUT = ("--objective", "throughput")


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    """Three pipelines run, each on one machine."""
    made = Desk(tmp_path)
    assert made.plan(SPOT % 3, *THROUGHPUT, "--output", str(made.running), "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["pipelines"]) == 3
    return made


def answered(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return dict(json.loads(capsys.readouterr().out))


def test_a_lost_pipeline_starts_on_the_machine_that_came(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--lost", "2", "--start-up", "6m", "--horizon", "1h", *THROUGHPUT]
    assert desk.move(SPOT % 3, *flags, "--output", str(desk.following), "--json") == 0
    answer = answered(capsys)
    rps = answer["pipelines"][0]["throughput_rps"]
    assert answer["objective"] == pytest.approx(2.9 * rps)
    assert answer["throughput_rps"] == pytest.approx(3 * rps)
    assert answer["gap"] == 0
    assert answer["replan"] == {
        "start_up_s": 360,
        "horizon_s": 3600,
        "kept": [0, 2],
        "stopped": [{"pipeline": 1, "reason": "lost", "machine": None}],
        "started": [2],
        "throughput_rps": pytest.approx(2.9 * rps),
        "missed_requests": pytest.approx(360 * rps),
        "start_up_usd": pytest.approx(0.1),
        "stay_objective": pytest.approx(2 * rps),
        "gain": pytest.approx(0.45),
    }


def test_the_plan_that_follows_is_a_plan_file_like_any_other(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--output", str(desk.following), *THROUGHPUT, "--json"]
    assert desk.move(f"{SPOT % 2}, {OTHER}", *flags) == 0
    capsys.readouterr()
    written = read_plan(desk.following)
    assert [one.stages[0].shape for one in written.pipelines[:2]] == ["g6e.xlarge"] * 2
    assert written.model is not None
    desk.running = desk.following
    assert desk.move(f"{SPOT % 2}, {OTHER}", *THROUGHPUT, "--json") == 0
    again = answered(capsys)["replan"]
    assert (again["kept"], again["started"], again["gain"]) == (
        list(range(len(written.pipelines))),
        [],
        0,
    )


def test_machines_that_are_not_offered_any_more_take_their_pipelines_along(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.move(OTHER, *THROUGHPUT, "--json") == 0
    answer = answered(capsys)["replan"]
    assert answer["stopped"][2] == {
        "pipeline": 2,
        "reason": "not_offered",
        "machine": "g6e.xlarge (spot in use1-az1)",
    }
    assert (answer["kept"], answer["stay_objective"], answer["gain"]) == ([], None, None)


def test_fewer_machines_and_better_ones_are_told_apart(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.move(SPOT % 2, *THROUGHPUT, "--json") == 0
    [stopped] = answered(capsys)["replan"]["stopped"]
    assert stopped["reason"] == "fewer_machines"
    dear = SPOT.replace("1.0", "1.5") % 3
    elsewhere = f"{{shape: g6e.xlarge, count: 3, price_usd_per_hour: 1.0, {SLOW}}}"
    assert desk.move(f"{dear}, {elsewhere}", "--json") == 0
    answer = answered(capsys)
    assert {one["reason"] for one in answer["replan"]["stopped"]} == {"moved"}
    # (1 − 111.3 / 3600) / 1.0 against 1 / 1.5.
    assert answer["replan"]["gain"] == pytest.approx(1.5 * (1 - 111.3 / 3600) - 1)


def test_a_move_for_people(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--lost", "1, 3", "--start-up", "6m", *THROUGHPUT]
    assert desk.move(SPOT % 2, *flags, "--explain") == 0
    shown = capsys.readouterr().out
    for line in (
        "Pipelines of running.json, from now on",
        "go on       2 (here 1)",
        "stops       1: has lost a machine",
        "stops       3: has lost a machine",
        "start       2",
        "and $0.10 paid in the 360 s of starting",
        "without starting anything; this is 90.0% better",
        "Runner-ups",
    ):
        assert line in shown
    assert desk.move(f"{OTHER}", *THROUGHPUT) == 0
    shown = capsys.readouterr().out
    assert "go on       none" in shown
    assert "g6e.xlarge (spot in use1-az1) is not offered any more" in shown
    assert "staying     nothing that runs meets the goal by itself" in shown


def stage(**fields: object) -> Change:
    return lambda plan: plan["pipelines"][1]["stages"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan.pop("model"), "model: is missing; write the plan with"),
        (lambda plan: plan.pop("pipelines"), "pipelines: Field required"),
        (
            lambda plan: plan["model"].update(name="other", hidden_size=8),
            "model: it is for other with hidden_size 8; the model has 4096",
        ),
        (
            lambda plan: plan["model"].update(quantization="fp8"),
            "model.quantization: it was planned with fp8; give --quantization",
        ),
        (
            lambda plan: plan["pipelines"][1].pop("machines"),
            "pipelines.1.machines: is missing; write the plan with",
        ),
        (
            lambda plan: plan["pipelines"][1]["machines"][0].update(market="Spot"),
            "pipelines.1.machines.0.market: Input should be 'spot' or 'on_demand'",
        ),
        (stage(node=1), "pipelines.1.machines.0: 0 of the 1 GPUs of g6e.xlarge are used"),
        (stage(tp=2), "pipelines.1.machines.0: 2 of the 1 GPUs of g6e.xlarge are used"),
        (lambda plan: plan.pop("format"), "format: is missing; write the plan with"),
        (lambda plan: plan.update(format=None), "format: is missing; write the plan with"),
        (lambda plan: plan.update(format=True), "format: Input should be a valid integer"),
        (stage(tp=True), "pipelines.1.stages.0.tp: Input should be a valid integer"),
        (stage(shape="x"), "pipelines.1.stages.0.shape: machine 0 is g6e.xlarge, not x"),
        (stage(gpu="L4"), "pipelines.1.stages.0.gpu: g6e.xlarge has L40S today, not L4"),
        (stage(layers=31), "pipelines.1: 31 layers are placed of 32"),
    ],
)
def test_a_wrong_running_plan_is_one_line_that_names_the_field(
    desk: Desk, capsys: pytest.CaptureFixture[str], change: Change, message: str
) -> None:
    desk.change(change)
    assert desk.move(SPOT % 3, *THROUGHPUT) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"shuntyard: --running: running.json: {message}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lost", "4"], "--lost: running.json has pipelines 1 to 3, not 4"),
        (["--lost", "two"], "--lost: 'two' is no number of a pipeline"),
        (["--lost", "1,"], "--lost: '' is no number of a pipeline"),
        (["--lost", "9" * 5000], "--lost: '99999999999999999999' is no number of a pipeline"),
        (["--start-up", "2h"], "--start-up: must lie between 0 and the horizon of 3600 s"),
        (
            ["--horizon", "1m"],
            "--start-up: must lie between 0 and the horizon of 60 s, and is 111.3 s",
        ),
        (["--horizon", "soon"], "--horizon: 'soon' is no time"),
        (["--solver", "paper"], "--running: is not known to the paper's search"),
        (["--dtype", "float16"], "--running: running.json: model.dtype: it was planned without"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(
    desk: Desk, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert desk.move(SPOT % 3, *THROUGHPUT, *flags) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"shuntyard: {message}")


def test_flags_of_a_running_fleet_need_one(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--lost", "1"], ["--start-up", "1m"], ["--horizon", "2h"]):
        assert desk.plan(SPOT % 3, *flags) == 2
        assert capsys.readouterr().err == f"shuntyard: {flags[0]}: is for --running\n"


def test_what_is_no_plan_is_told(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.running.write_text("no plan")
    assert desk.move(SPOT % 3) == 2
    assert "--running: running.json: Invalid JSON" in capsys.readouterr().err
    desk.running = desk.running.with_name("nowhere.json")
    assert desk.move(SPOT % 3) == 2
    assert "nowhere.json: cannot be read: No such file" in capsys.readouterr().err


def test_another_model_is_told(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert desk.move(SPOT % 3, model="Qwen/Qwen3-8B") == 2
    assert f"model: it is for {MODEL} with num_layers 32; the model has 36" in (
        capsys.readouterr().err
    )
