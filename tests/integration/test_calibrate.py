"""Calibration measures this very machine, and its profile serves an estimate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(400)
def test_a_profile_of_this_machine_serves_an_estimate(tmp_path: Path) -> None:
    profile = tmp_path / "hardware.yaml"
    command = [sys.executable, "-m", "server"]
    # Others may keep the machine of the tests busy.
    flags = ["--no-engine", "--force", "--threads", "1", "--output", str(profile)]
    calibrated = subprocess.run(
        [*command, "calibrate", *flags],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert calibrated.returncode == 0, calibrated.stderr
    shown = subprocess.run(
        [*command, "hardware", "--json", "--hardware", str(profile)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "shuntyard calibrate" in json.dumps(json.loads(shown.stdout))


def test_sigterm_takes_the_worker_along() -> None:
    command = [sys.executable, "-m", "server", "calibrate", "--no-engine", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline()  # the worker's first words
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.terminate()
        assert process.wait(60) == 143
    assert children
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
