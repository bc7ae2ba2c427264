"""Standard output without what native code writes."""

from __future__ import annotations

import os

import pytest

from server.clean_stdout import clean_stdout


def test_what_native_code_writes_inside_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    print("before")
    with clean_stdout():
        os.write(1, b"a greeting\n")
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"


def test_output_comes_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no"), clean_stdout():
        raise ValueError("no")
    print("after")
    assert capfd.readouterr().out == "after\n"
