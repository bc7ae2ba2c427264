"""What was learnt outlives the server."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import anyio
import pytest

from spot.virtual_time import run_virtual
from workflows.profile_file import ProfileFile
from workflows.profiler import Profiler
from workflows.scheduling.messages import Size

pytestmark = pytest.mark.anyio


def learnt() -> Profiler:
    profiler = Profiler()
    for _ in range(30):
        profiler.observe("llm:m", Size(100, 50), 9.0)
    return profiler


async def test_a_server_goes_on_with_what_the_last_one_learnt(tmp_path: Path) -> None:
    file = tmp_path / "state" / "profile.json"
    first = learnt()
    async with ProfileFile(Profiler(), file):
        pass
    assert not file.parent.exists()
    async with ProfileFile(first, file):
        pass
    assert [one.name for one in file.parent.iterdir()] == ["profile.json"]
    second = Profiler()
    async with ProfileFile(second, file):
        assert second.cost("llm:m") == first.cost("llm:m")
        assert second.cost("llm:m") != second.prior("llm:m")


@pytest.mark.parametrize("content", ["", "[1]", '{"format": 1, "profiles": {"llm:m": {}}}'])
async def test_a_file_that_cannot_be_read_is_learnt_anew(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "profile.json"
    file.write_text(content)
    profiler = Profiler()
    with caplog.at_level(logging.WARNING):
        async with ProfileFile(profiler, file):
            assert profiler.cost("llm:m") == profiler.prior("llm:m")
            profiler.observe("llm:m", Size(1), 1.0)
    assert json.loads(file.read_text())["profiles"]["llm:m"]["num_observed"] == 1
    assert ("cannot be read" in caplog.text) == (content == "")


async def test_a_folder_that_cannot_be_written_is_told_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    async with ProfileFile(learnt(), tmp_path / "file" / "profile.json"):
        pass
    assert "cannot be written" in caplog.text


def test_it_is_written_while_the_server_runs(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"

    async def main() -> None:
        async with ProfileFile(learnt(), file, period_s=60):
            await anyio.sleep(59)
            assert not file.exists()
            await anyio.sleep(2)
            assert file.exists()

    run_virtual(main)
