"""The check that the installed vLLM is the one that was written against."""

from __future__ import annotations

import pytest

from spot.engines.vllm_compat import self_check
from spot.engines.vllm_compat.self_check import IncompatibleVllm, check


def test_the_installed_vllm_passes() -> None:
    check()


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "installed_version", lambda: "0.33.1")
    with pytest.raises(IncompatibleVllm, match=r"0\.33\.1 is installed, 0\.32\.\* is needed"):
        check()


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (("vllm.v1.engine", "NoSuchThing", ()), "vllm.v1.engine.NoSuchThing is missing"),
        (("vllm.nowhere", "x", ()), "vllm.nowhere.x is missing"),
        (
            ("vllm.inputs.engine", "tokens_input", ("prompt_token_ids", "gone")),
            "vllm.inputs.engine.tokens_input has no 'gone'",
        ),
    ],
)
def test_every_difference_is_named(
    monkeypatch: pytest.MonkeyPatch, entry: tuple[str, str, tuple[str, ...]], problem: str
) -> None:
    monkeypatch.setattr(self_check, "_USED", (entry,))
    with pytest.raises(IncompatibleVllm, match=problem):
        check()
