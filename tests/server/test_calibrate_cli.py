"""`shuntyard calibrate`, without measuring."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from placement.calibration import run
from placement.calibration.run import CalibrationFailed, Say
from server.cli import main


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    seen: list[dict] = []

    def calibrate(say: Say, **options: object) -> str:
        seen.append(options)
        say("measuring")
        return "gpus: {}\n"

    monkeypatch.setattr(run, "calibrate", calibrate)
    return seen


def test_the_profile_is_written_and_progress_told(
    calls: list[dict], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "mine.yaml"
    assert main(["calibrate", "--output", str(output), "--threads", "1", "--no-engine"]) == 0
    assert output.read_text() == "gpus: {}\n"
    assert calls == [{"num_threads": 1, "with_engine": False, "takes_any_fit": False}]
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[0] == "measuring"
    assert "mine.yaml written" in told.err


def test_any_fit_is_taken_where_told(calls: list[dict], tmp_path: Path) -> None:
    assert main(["calibrate", "--force", "--output", str(tmp_path / "mine.yaml")]) == 0
    assert calls == [{"num_threads": None, "with_engine": True, "takes_any_fit": True}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], "--threads: must be at least 1"),
        (
            ["--threads", "100000"],
            f"--threads: must be at most {os.cpu_count()}, the CPUs of this machine",
        ),
        (["--output", "/"], "--output: / is a folder, not a file"),
        (["--output", "/nowhere/x.yaml"], "--output: there is no folder /nowhere"),
    ],
)
def test_wrong_flags_are_told_before_measuring(
    calls: list[dict], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *arguments]) == 2
    assert capsys.readouterr().err == f"shuntyard: {message}\n"
    assert calls == []


def test_a_failed_measurement_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(say: Say, **options: object) -> str:
        raise CalibrationFailed("cuda:0 cannot be measured: out of memory")

    monkeypatch.setattr(run, "calibrate", fail)
    assert main(["calibrate", "--output", str(tmp_path / "x.yaml")]) == 1
    assert capsys.readouterr().err == "shuntyard: cuda:0 cannot be measured: out of memory\n"


def test_sigterm_ends_the_measurement_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = []

    def measure(say: Say, **options: object) -> str:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            ended.append(True)
        return "gpus: {}\n"

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(run, "calibrate", measure)
    assert main(["calibrate", "--output", str(tmp_path / "x.yaml")]) == 143
    assert ended
    assert not (tmp_path / "x.yaml").exists()
    assert signal.getsignal(signal.SIGTERM) is before
