"""The command line: what belongs to us, what to vLLM, and clear ends."""

from __future__ import annotations

import pytest

from server import cli
from server.settings import Settings, SettingsError
from spot.errors import EngineFailed

KNOWN = frozenset({"--port", "--model", "--served-model-name", "--enforce-eager"})


@pytest.mark.parametrize(
    ("argv", "ours", "engine"),
    [
        (["./m", "--port", "1"], ["./m", "--port", "1"], []),
        (
            ["./m", "--swap-space", "4", "--port", "1"],
            ["./m", "--port", "1"],
            ["--swap-space", "4"],
        ),
        (["--swap-space=4", "--port=1"], ["--port=1"], ["--swap-space=4"]),
        (
            ["--served-model-name", "a", "b", "--lora-modules", "x=y", "z=w"],
            ["--served-model-name", "a", "b"],
            ["--lora-modules", "x=y", "z=w"],
        ),
        (
            ["--cpu-offload-gb", "-1", "--enforce-eager"],
            ["--enforce-eager"],
            ["--cpu-offload-gb", "-1"],
        ),
    ],
)
def test_unknown_flags_go_to_vllm_with_their_values(
    argv: list[str], ours: list[str], engine: list[str]
) -> None:
    assert cli.split_engine_flags(argv, KNOWN) == (ours, engine)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, list[str]]]:
    calls: list[tuple[Settings, list[str]]] = []

    def fake_serve(settings: Settings, engine_flags: list[str]) -> int:
        calls.append((settings, engine_flags))
        return 0

    monkeypatch.setattr("server.serve.serve", fake_serve)
    return calls


def test_serve_reads_model_names_and_engine_flags(
    served: list[tuple[Settings, list[str]]],
) -> None:
    argv = ["serve", "./my-model", "--served-model-name", "gpt-4o-mini", "my-alias"]
    assert cli.main([*argv, "--no-docs", "--swap-space", "4"]) == 0
    [(settings, engine_flags)] = served
    assert settings.model == "./my-model"
    assert settings.served_model_name == ["gpt-4o-mini", "my-alias"]
    assert settings.docs is False
    assert engine_flags == ["--swap-space", "4"]


def test_serve_without_a_model_leaves_it_to_the_demo(
    served: list[tuple[Settings, list[str]]],
) -> None:
    assert cli.main(["serve"]) == 0
    assert served[0][0].model is None


def test_a_model_given_twice_is_wrong_usage(
    served: list[tuple[Settings, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "./a", "--model", "./b"]) == 2
    assert "once" in capsys.readouterr().err
    assert not served


def test_a_wrong_setting_exits_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--port", "-5"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shuntyard: --port")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(("error", "code"), [(SettingsError("bad"), 2), (EngineFailed("dead"), 1)])
def test_expected_errors_are_one_line_without_a_traceback(
    error: Exception,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(settings: Settings, engine_flags: list[str]) -> int:
        raise error

    monkeypatch.setattr("server.serve.serve", fail)
    assert cli.main(["serve"]) == code
    assert capsys.readouterr().err.splitlines() == [f"shuntyard: {error}"]


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in text


def test_help_says_what_a_value_is_and_what_holds_without_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "--api-key KEY [KEY ...]",
        "--port N",
        "--keep-alive-timeout SECONDS seconds that an idle connection stays open (default: 75)",
        "--ssl-keyfile FILE",
        "--no-docs serve /docs, /redoc and /openapi.json (default: yes)",
    ):
        assert part in text


def test_an_unknown_flag_of_a_command_is_one_line_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", "--model", "m", "--cluster", "c", "--workload", "w", "--explian"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "shuntyard: there is no --explian (did you mean --explain?); see shuntyard plan --help\n"
    )


def test_no_command_shows_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2
    assert "usage: shuntyard" in capsys.readouterr().err


def test_a_flag_of_vllms_front_end_says_what_stands_for_it_here(
    served: list[tuple[Settings, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--disable-fastapi-docs"]) == 2
    assert "--no-docs" in capsys.readouterr().err
    assert not served
