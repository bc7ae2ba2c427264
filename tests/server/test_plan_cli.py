"""`shuntyard plan`, `estimate` and `hardware` as users and scripts call them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from placement import optimizer
from placement.hardware import Offer
from placement.optimizer.clock import Clock, nothing_meets
from placement.plan import Goal, Plan
from server import cli, plan_inputs
from tests import plans

CLUSTER = """\
offers:
  - {shape: g6.12xlarge, count: 3}
  - {shape: g6e.xlarge, count: 4, market: spot, zone: use1-az1}
"""
Run = Callable[..., int]


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The optimizer's place is taken by one that answers with the same plan at once."""
    calls: list[dict[str, Any]] = []

    def solve(offers: Sequence[Offer], estimator: Any, goal: Goal, **options: Any) -> Plan:
        calls.append({"offers": offers, "estimator": estimator, "goal": goal, **options})
        base = plans.papers_plan()
        return plans.plan(*base.pipelines, goal=goal, gap=0.02)

    monkeypatch.setattr(optimizer, "solve", solve)
    monkeypatch.setattr(optimizer, "solve_paper", solve)
    return calls


def plan(cluster: Path, *more: str, model: str = "Qwen/Qwen3-32B") -> int:
    flags = ["--cluster", str(cluster), "--model-fidelity", "paper"]
    workload = [] if "--workload" in more else ["--workload", "azure-conv"]
    return cli.main(["plan", "--model", model, *flags, *workload, *more])


def estimate(*more: str, model: str = "Qwen/Qwen3-32B") -> int:
    return cli.main(["estimate", "--model", model, "--model-fidelity", "paper", *more])


def refused(capsys: pytest.CaptureFixture[str], code: int) -> str:
    """The one line of an error."""
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("shuntyard: ")
    return line.removeprefix("shuntyard: ")


def test_the_answer_for_scripts(
    cluster: Path, asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(cluster, "--json") == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert captured.err == ""
    assert set(answer) == {
        *("pipelines", "throughput_rps", "price_usd_per_hour", "objective", "bound", "gap"),
        *("solve_s", "solver"),
    }
    first, second = answer["pipelines"]
    assert set(first) == {"stages", "batch", "throughput_rps", "latency_s", "price_usd_per_hour"}
    assert set(first["stages"][0]) == {
        *("shape", "gpu", "tp", "layers", "prefill_s", "decode_s", "weights_bytes", "kv_bytes"),
    }
    assert [stage["layers"] for stage in second["stages"]] == [33, 31]
    assert answer["objective"] == pytest.approx(
        answer["throughput_rps"] / answer["price_usd_per_hour"]
    )
    assert answer["gap"] == pytest.approx(0.02)
    [call] = asked
    assert [(one.shape.name, one.count, one.market) for one in call["offers"]] == [
        ("g6.12xlarge", 3, "on_demand"),
        ("g6e.xlarge", 4, "spot"),
    ]
    assert call["estimator"].model.name == "Qwen/Qwen3-32B"
    assert call["time_limit_s"] == 60.0


def test_a_heuristic_without_a_bound_is_valid_json(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def solve(*_: Any, **__: Any) -> Plan:
        return plans.plan(*plans.papers_plan().pipelines, gap=float("inf"), solver="paper")

    monkeypatch.setattr(optimizer, "solve_paper", solve)
    assert plan(cluster, "--json", "--solver", "paper", "--beam", "8") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["bound"], answer["gap"], answer["solver"]) == (None, None, "paper")


def test_nothing_but_json_is_printed(cluster: Path) -> None:
    cluster.write_text("offers: [{shape: g6e.xlarge, count: 2}]")
    command = [sys.executable, "-m", "server", "plan", "--model", "Qwen/Qwen3-8B", "--json"]
    flags = ["--cluster", str(cluster), "--workload", "azure-conv"]
    ended = subprocess.run([*command, *flags], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert json.loads(ended.stdout)["gap"] == 0


def test_a_price_that_is_not_known_is_none(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.write_text("offers:\n  - {gpu: L40S, price_usd_per_hour: 1.0}\n  - {gpu: A100-80}\n")
    path = tmp_path / "plan.json"
    flags = ["--objective", "throughput", "--output", str(path)]
    model = "meta-llama/Llama-3.1-8B-Instruct"
    assert plan(cluster, *flags, "--json", model=model) == 0
    for answer in (json.loads(capsys.readouterr().out), json.loads(path.read_text())):
        assert answer["price_usd_per_hour"] is None
        prices = [one["price_usd_per_hour"] for one in answer["pipelines"]]
        assert sorted(prices, key=str) == [1.0, None]
    machines = [one["machines"][0] for one in answer["pipelines"]]
    assert [one["price_usd_per_hour"] for one in machines] == prices
    assert plan(cluster, *flags, "--explain", model=model) == 0
    shown = capsys.readouterr().out
    assert "price       not known" in shown
    assert "requests/s, price not known, " in shown  # of a runner-up
    assert "$0.00" not in shown


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (">&-", "shuntyard: standard output is closed\n"),
        (
            ">/dev/full",
            "shuntyard: standard output cannot be written: no space left on device\n",
        ),
    ],
)
def test_an_output_that_takes_no_answer_is_one_line(output: str, message: str) -> None:
    command = f"{sys.executable} -m server hardware --json {output}"
    ended = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, message)


def test_a_reader_that_wants_no_more_is_no_error() -> None:
    command = f"{{ {sys.executable} -m server hardware --json; echo $? >&2; }} | true"
    ended = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert ended.stderr == "1\n"


def test_an_interrupt_while_parts_are_imported_is_quiet() -> None:
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'placement.catalogue': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv = ['shuntyard', 'hardware']\n"
        "from server.__main__ import run\n"
        "run()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_wrong_usage_is_one_line(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        plan(cluster, "--workload", "-5x3")
    line = refused(capsys, ended.value.code)
    assert line == "argument --workload: expected one argument; see shuntyard plan --help"


@pytest.mark.parametrize("name", ["cluster", "hardware", "running"])
def test_the_answer_overwrites_no_input(
    tmp_path: Path, cluster: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = cluster if name == "cluster" else tmp_path / "input"
    path.write_text(CLUSTER)
    link = tmp_path / "link"
    link.symlink_to(path)
    more = [] if name == "cluster" else [f"--{name}", str(path)]
    line = refused(capsys, plan(cluster, *more, "--output", str(link)))
    assert line == f"--output: would overwrite the file of --{name}"
    assert path.read_text() == CLUSTER


def test_an_interrupt_is_one_line(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def solve(*_: Any, **__: Any) -> Plan:
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizer, "solve", solve)
    assert plan(cluster) == 130
    assert capsys.readouterr() == ("", "shuntyard: stopped; there is no answer\n")


def test_a_name_that_no_file_can_have_is_no_model(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, plan(cluster, model="m" * 5000))
    assert line == "--model: there is no model of a name of 5000 characters"


def test_a_search_of_the_papers_that_takes_too_long_is_one_line(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def solve(*_: Any, **__: Any) -> Plan:
        raise TimeoutError

    monkeypatch.setattr(optimizer, "solve_paper", solve)
    line = refused(capsys, plan(cluster, "--solver", "paper", "--time-limit", "3s"))
    assert "did not end within 3 s; lower --beam" in line


@pytest.mark.usefixtures("asked")
def test_the_answer_for_people(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(cluster) == 0
    shown = capsys.readouterr().out
    for part in (
        "Qwen/Qwen3-32B: 2 pipelines on 3 machines for azure-conv (763 in, 232 out)",
        "g6e.xlarge #2",
        "4x L4",
        "█",
        "◀",
        "an hour = $",
        "for a million tokens (input + output)",
        "(gap 2.0%)",
    ):
        assert part in shown
    assert all(line == line.rstrip() or len(line) < 200 for line in shown.splitlines())


@pytest.mark.usefixtures("asked")
def test_a_rate_above_the_plan_is_told(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(cluster, "--workload", "763x232@500") == 0
    assert "--objective cost-for-load" in capsys.readouterr().out


@pytest.mark.usefixtures("asked")
def test_explanations_for_people_and_scripts(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(cluster, "--explain") == 0
    shown = capsys.readouterr().out
    for part in ("What holds each pipeline back", "limits the batch", "With a machine more of"):
        assert part in shown
    assert plan(cluster, "--explain", "--json") == 0
    explanation = json.loads(capsys.readouterr().out)["explanation"]
    assert len(explanation["pipelines"]) == 2
    assert {one["offer"] for one in explanation["one_more"]} == {
        "g6.12xlarge (on_demand)",
        "g6e.xlarge (spot in use1-az1)",
    }


def test_flags_become_a_goal(cluster: Path, asked: list[dict[str, Any]]) -> None:
    flags = {
        "--slo-ttft": "2s",
        "--slo-tpot": "100ms",
        "--slo-latency": "1m",
        "--latency-penalty": "0.5",
        "--max-price": "30",
        "--on-demand-share": "0.5",
        "--max-zone-share": "0.6",
        "--recovery": "111s",
        "--time-limit": "5s",
    }
    assert plan(cluster, *(word for pair in flags.items() for word in pair), "--json") == 0
    assert asked[0]["goal"] == Goal(
        slo_ttft_s=2.0,
        slo_tpot_s=0.1,
        slo_latency_s=60.0,
        latency_penalty=0.5,
        max_price_usd_per_hour=30.0,
        on_demand_share=0.5,
        max_zone_share=0.6,
        recovery_s=111.0,
    )
    assert asked[0]["time_limit_s"] == 5.0


@pytest.mark.parametrize(
    ("flags", "load"), [(["--load", "2.5"], 2.5), ([], 4.67), (["--workload", "10x20@7"], 7.0)]
)
def test_the_load_comes_from_its_flag_or_the_workload(
    cluster: Path, asked: list[dict[str, Any]], flags: list[str], load: float
) -> None:
    assert plan(cluster, "--objective", "cost-for-load", *flags, "--json") == 0
    assert asked[0]["goal"].load_rps == load


def test_formats_of_the_model_are_overridden(cluster: Path, asked: list[dict[str, Any]]) -> None:
    assert plan(cluster, "--quantization", "fp8", "--kv-cache-dtype", "fp8", "--json") == 0
    model = asked[0]["estimator"].model
    assert (model.weight_bytes, model.kv_bytes, model.activation_bytes) == (1.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--objective", "throughput-per-dolar"], "--objective: 'throughput-per-dolar' is not"),
        (["--objective", "throughput-per-dolar"], "did you mean throughput-per-dollar"),
        (["--solver", "exakt"], "--solver: 'exakt' is not known; did you mean exact"),
        (["--model-fidelity", "papr"], "--model-fidelity: 'papr' is not known; did you mean paper"),
        (["--figures", "spek"], "--figures: 'spek' is not known; did you mean spec"),
        (["--workload", "azure"], "--workload: 'azure' is not known; did you mean azure-conv"),
        (["--workload", "0x10"], "--workload: must be at least 1"),
        (["--workload", "10x10@fast"], "--workload: 'fast' is no rate"),
        (["--workload", "10x10@inf"], "--workload: 'inf' is no rate"),
        (["--workload", "10x10@1e999"], "--workload: '1e999' is no rate"),
        (["--workload", "10x10@1e300"], "--workload: must be at most 1000000000 requests/s"),
        (["--workload", "10000001x10"], "--workload: must be at most 10000000 tokens"),
        (["--workload", f"10x{'9' * 5000}"], "--workload: must be at most 10000000 tokens"),
        (["--slo-ttft", f"{'9' * 400}s"], "--slo-ttft: must be at most 1000000000 s"),
        (["--max-price", "1e300"], "--max-price: must be at most 1000000000, not 1e300"),
        (["--cluster", "/"], "--cluster: /: is a folder, not a file"),
        (["--cluster", "~nobody-here/c.yaml"], "--cluster: ~nobody-here/c.yaml: there is no such"),
        (["--load=--"], "--load: needs a value"),
        (["--max-price", "9" * 5000], "--max-price: '999"),
        (["--cluster", "9" * 5000], "--cluster: 999"),
        (["--hardware", "/"], "--hardware: /: is a folder, not a file"),
        (["--solver", "paper", "--beam", "9" * 5000], "--beam: must be at most 1000, not 999"),
        (["--workload", "10x10@-2"], "--workload: must be positive"),
        (
            ["--workload", "40000x1000"],
            "--workload: 41000 tokens a request are more than",
        ),
        (["--slo-ttft", "soon"], "--slo-ttft: 'soon' is no time"),
        (["--slo-ttft", "0s"], "--slo-ttft: must be positive"),
        (["--slo-ttft", "9s", "--slo-latency", "5s"], "--slo-ttft: 9 s lie above --slo-latency"),
        (["--latency-penalty", "2"], "--latency-penalty: needs one of --slo-ttft"),
        (["--latency-penalty", "-1", "--slo-ttft", "1s"], "--latency-penalty: must be at least 0"),
        (["--max-price", "-5"], "--max-price: must be positive"),
        (["--max-price", "cheap"], "--max-price: 'cheap' is no number"),
        (["--max-price", "nan"], "--max-price: 'nan' is no number"),
        (["--on-demand-share", "1.5"], "--on-demand-share: must lie between 0 and 1"),
        (
            ["--max-zone-share", "0.3"],
            "--max-zone-share: 0.3 needs at least 4 zones; cluster.yaml has 2 (use1-az1, all "
            "offers without a zone, which count as one)",
        ),
        (["--max-zone-share", "0"], "--max-zone-share: must be above 0"),
        (["--load", "3"], "--load: is for --objective cost-for-load"),
        (
            ["--objective", "cost-for-load", "--workload", "10x10"],
            "--load: is missing: the workload 10x10 has no rate",
        ),
        (["--objective", "cost-for-load", "--load", "-1"], "--load: must be positive"),
        (["--time-limit", "0s"], "--time-limit: must be above 0 s"),
        (["--beam", "3"], "--beam: is for --solver paper"),
        (["--solver", "paper", "--max-price", "9"], "--max-price: is not known to the paper's"),
        (["--solver", "paper", "--beam", "0"], "--beam: must be at least 1, not 0"),
        (["--solver", "paper", "--beam", "1.5"], "--beam: '1.5' is no whole number"),
        (["--dtype", "bf61"], "--dtype: 'bf61' is not known"),
        (["--quantization", "aqw"], "--quantization: 'aqw' is not known; did you mean awq"),
        (["--workload", "800x200@"], "--workload: '' is no rate in requests per second"),
        (["--hardware", "/nowhere.yaml"], "/nowhere.yaml: there is no such file"),
    ],
)
@pytest.mark.usefixtures("asked")
def test_a_wrong_flag_is_one_line_that_names_it(
    cluster: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    line = refused(capsys, plan(cluster, *flags))
    assert message in line
    assert len(line) <= 1500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "offers: [{shape: g6.12xlarg}]",
            "offers.0.shape: 'g6.12xlarg' is not known",
        ),
        ("offers: [{gpu: L40, nodes: 2}]", "offers.0.gpu: 'L40' is not known; did you mean L40S"),
        ("offers: [{shape: g6.xlarge, count: 0}]", "offers.0.count: must be at least 1, not 0"),
        ("offers: [{shape: g6.xlarge, price_usd_per_hour: -2}]", "must be at least 0, not -2"),
        (
            "offers:\n - {shape: g6.xlarge, cuont: 2}",
            "line 2: offers.0.cuont: there is no",
        ),
        ("offers: [", "cluster.yaml, line 1: is not YAML"),
        ("offers: []", "cluster.yaml, line 1: offers: must not be empty: nothing is listed"),
    ],
)
@pytest.mark.usefixtures("asked")
def test_a_wrong_cluster_is_one_line(
    cluster: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    cluster.write_text(text)
    assert message in refused(capsys, plan(cluster))


@pytest.mark.usefixtures("asked")
def test_on_demand_capacity_must_be_on_offer(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.write_text("offers: [{shape: g6.xlarge, market: spot, zone: use1-az1}]")
    line = refused(capsys, plan(cluster, "--on-demand-share", "0.2"))
    assert line == "--on-demand-share: no offer of cluster.yaml is on_demand"


def test_a_model_that_cannot_fit_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("offers: [{gpu: T4, price_usd_per_hour: 0.4}]")
    line = refused(capsys, plan(cluster, model="Qwen/Qwen3-32B"))
    assert line.startswith("Qwen/Qwen3-32B needs ")
    assert " are missing; " in line
    assert " more T4 (on_demand) would make it fit" in line


TWO_L40S = "offers: [{gpu: L40S, nodes: 2, price_usd_per_hour: 2.5}]"


@pytest.mark.parametrize(
    ("flags", "told", "nearest"),
    [
        (["--max-price", "1"], "--max-price 2.5", {"max_price_usd_per_hour": 2.5}),
        (
            ["--objective", "cost-for-load", "--load", "1000", "--max-price", "3"],
            "--load 9.18",
            {"load_rps": 9.18},
        ),
        (["--slo-ttft", "1ms"], "--slo-ttft 0.05", {"slo_ttft_s": 0.05095}),
    ],
)
def test_a_goal_that_no_fleet_meets_names_what_can_be_met(
    cluster: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    told: str,
    nearest: dict[str, float],
) -> None:
    cluster.write_text(TWO_L40S)
    model = "meta-llama/Llama-3.1-8B-Instruct"
    line = refused(capsys, plan(cluster, *flags, model=model))
    assert line.startswith(f"no fleet of these offers meets the goal; what can be met: {told}")
    assert plan(cluster, *flags, "--json", model=model) == 2
    captured = capsys.readouterr()
    assert captured.err == f"shuntyard: {line}\n"
    error = json.loads(captured.out)["error"]
    assert error["message"] == line
    assert error["nearest"] == pytest.approx(nearest, rel=0.01)


def test_an_unknown_model_names_the_nearest(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = refused(capsys, plan(cluster, model="Qwen/Qwen3-33B"))
    assert line.startswith("--model: ")
    assert "Qwen/Qwen3-32B" in line


def test_a_folder_is_a_model(tmp_path: Path, cluster: Path, asked: list[dict[str, Any]]) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "vocab_size": 100,
            }
        )
    )
    assert plan(cluster, "--workload", "10x10", "--json", model=str(tmp_path)) == 0
    assert asked[0]["estimator"].model.num_layers == 3


@pytest.mark.usefixtures("asked")
def test_a_plan_file_is_written(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert plan(cluster, "--output", str(path)) == 0
    written = json.loads(path.read_text())
    assert written["model"]["name"] == "Qwen/Qwen3-32B"
    assert [stage["node"] for stage in written["pipelines"][1]["stages"]] == [0, 1]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "told"), [("nowhere/plan.json", "there is no folder"), ("", "is a folder, not a file")]
)
def test_a_plan_that_cannot_be_written_is_not_searched_for(
    cluster: Path,
    tmp_path: Path,
    asked: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    name: str,
    told: str,
) -> None:
    line = refused(capsys, plan(cluster, "--output", str(tmp_path / name)))
    assert line.startswith("--output: ")
    assert told in line
    assert not asked


def test_an_estimate_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpu", "L4", "--tp", "4", "--layers", "20", "--batch", "32"]
    assert estimate(*flags, "--input", "763", "--output", "232", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {
        *("prefill_s", "decode_s", "decode_step_s", "max_batch", "throughput_rps"),
        "by_operation",
    }
    assert set(answer["by_operation"]) == {
        *("qkv", "attention", "output", "up_gate", "down", "all_reduce", "logits")
    }
    assert answer["prefill_s"] == pytest.approx(
        sum(one["prefill_s"] for one in answer["by_operation"].values())
    )
    assert answer["decode_s"] == pytest.approx(232 * answer["decode_step_s"])
    # 32 · 763 tokens, 2 · 5120 · (8192 + 2 · 1024) FLOPs each over 4 GPUs of 55 TFLOPS, 20 layers.
    qkv = 32 * 763 * 2 * 5120 * (8192 + 2 * 1024) / 4 / 55e12 * 20
    assert answer["by_operation"]["qkv"]["prefill_s"] == pytest.approx(qkv)


def test_figures_of_the_spec_sheet_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpu", "L4", "--layers", "1", "--bare", "--tokens", "4000", "--batch", "1", "--json"]
    seconds = []
    for figures in ("spec", "calibrated"):
        assert estimate(*flags, "--figures", figures) == 0
        seconds.append(json.loads(capsys.readouterr().out)["prefill_s"])
    assert seconds[1] / seconds[0] == pytest.approx(121 / 55)


def test_an_estimate_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate("--gpu", "L4", "--layers", "1", "--bare", "--batch", "5000") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("1 layer on 1x L4, 5000 requests (763 in")
    assert "up_gate" in shown
    assert "the KV cache of 5000 requests does not fit" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu", "L40"], "--gpu: 'L40' is not known; did you mean L40S"),
        (["--gpu", "L4", "--input", "90000"], "--input and --output: 90232 tokens a request are"),
        (["--gpu", "L4", "--input", "9" * 20], "--input: must be at most 10000000, not 999"),
        (["--gpu", "L4", "--tp", "65"], "--tp: must be at most 64, not 65"),
        (["--gpu", "L4", "--tp", "²"], "--tp: '²' is no whole number"),
        (["--gpu", "L4", "--tp", "0"], "--tp: must be at least 1, not 0"),
        (["--gpu", "L4", "--tp", "3"], "--tp: 3 cannot split Qwen/Qwen3-32B (64 heads, 8 for keys"),
        (["--gpu", "L4", "--layers", "65"], "--layers: Qwen/Qwen3-32B has 64, not 65"),
        (["--gpu", "L4", "--batch", "many"], "--batch: 'many' is no whole number"),
        (["--gpu", "L4"], "64 layers of Qwen/Qwen3-32B do not fit 1 × L4"),
    ],
)
def test_a_wrong_estimate_is_one_line(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert message in refused(capsys, estimate(*flags))


def test_the_catalogue_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hardware"]) == 0
    shown = capsys.readouterr().out
    for part in ("L40S", "g6.12xlarge", "Standard_ND96isr_H100_v5", "section 7.1.5", "not known"):
        assert part in shown
    profile = tmp_path / "mine.yaml"
    profile.write_text("gpus: {L4: {calibrated: {tflops: 51}}}")
    assert cli.main(["hardware", "--json", "--hardware", str(profile)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["gpus"]["L4"]["calibrated"]["tflops"] == 51
    assert answer["gpus"]["L4"]["calibrated"]["source"] == "mine.yaml"
    assert answer["spot_prices_usd_per_hour"]["g6.xlarge"]["use1-az1"] == 0.4155


def test_measured_corrections_of_a_profile_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "mine.yaml"
    flags = ["--gpu", "cpu", "--layers", "1", "--bare", "--batch", "1", "--json"]
    flags += ["--model-fidelity", "calibrated", "--hardware", str(profile)]
    seconds = []
    for launch_s in (0.0, 0.01):
        profile.write_text(f"corrections: {{cpu: {{matmul: {{launch_s: {launch_s}}}}}}}")
        assert estimate(*flags) == 0
        answer = json.loads(capsys.readouterr().out)
        seconds.append(answer["by_operation"]["qkv"]["decode_step_s"])
    assert seconds[1] - seconds[0] == pytest.approx(0.01, rel=0.05)
    profile.write_text("corrections: {cpu: {matmul: {lunch_s: 1}}}")
    assert "--hardware: corrections.cpu: " in refused(capsys, estimate(*flags))


@pytest.mark.parametrize("command", ["plan", "estimate", "hardware"])
def test_help_is_complete(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "--hardware" in shown
    assert "--json" in shown


def test_a_search_that_finds_nothing_in_time_asks_for_more() -> None:
    error = nothing_meets(Clock(time_limit_s=0.0))
    assert plan_inputs.shown(error) == "no fleet was found in 0 s; give it a longer --time-limit"
