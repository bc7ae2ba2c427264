"""Files of the user, and what is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from placement import regular_file
from placement.regular_file import read_regular_file


def test_a_file_is_read_whole_up_to_the_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regular_file, "MAX_BYTES", 4)
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    assert read_regular_file(path) == b"1234"
    path.write_bytes(b"12345")
    with pytest.raises(OSError, match="it is larger than"):
        read_regular_file(path)


def test_pipes_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(OSError, match="it is no regular file"):
            read_regular_file(path)


def test_folders_and_missing_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_regular_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_regular_file(tmp_path / "nothing")
