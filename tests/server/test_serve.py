"""What `serve` refuses before it loads anything."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from server import serve
from server.serve import start_news
from server.settings import Settings, SettingsError


def test_a_taken_port_is_known_at_once_and_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port}.*--port"):
            serve._bind(Settings(port=port))


def test_port_0_takes_a_free_port() -> None:
    with serve._bind(Settings(port=0)) as listener:
        assert listener.getsockname()[1] > 0


def test_a_unix_socket_is_bound(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serve._bind(Settings(uds=str(path))):
        assert path.is_socket()


def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(SettingsError, match="precious"):
        serve._bind(Settings(uds=str(path)))
    assert path.read_text() == "data"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(enable_auto_tool_choice=True), "--tool-call-parser"),
        (Settings(chat_cache_ttl=1, share_equal_requests=False), "--no-share-equal-requests"),
        (Settings(ssl_keyfile=Path("key.pem")), "belong together"),
        (
            Settings(ssl_keyfile=Path("none.pem"), ssl_certfile=Path("none.pem")),
            "--ssl-keyfile: there is no file",
        ),
    ],
)
def test_settings_that_do_not_go_together_stop_the_start(settings: Settings, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        serve._check_together(settings)


def test_a_connection_has_the_deadlines_of_the_settings() -> None:
    settings = Settings(keep_alive_timeout=0.5, body_timeout=2)
    protocol: Any = serve._uvicorn_config(settings, None).http
    assert (protocol.idle_s, protocol.arrival_s) == (0.5, 2)


def test_what_several_engines_do_is_told_with_their_names() -> None:
    said: dict[str, str] = {}
    assert start_news({"local-1": "loading", "local-2": ""}, said) == ["local-1: loading"]
    assert start_news({"local-1": "loading", "local-2": "loading"}, said) == ["local-2: loading"]
    assert start_news({"local-1": "", "local-2": "warming up"}, said) == ["local-2: warming up"]
    assert start_news({"local-1": "loading", "local-2": "warming up"}, said) == ["local-1: loading"]


def test_what_the_only_engine_does_is_told_once() -> None:
    said: dict[str, str] = {}
    assert start_news({"local-1": "loading"}, said) == ["engine: loading"]
    assert start_news({"local-1": "loading"}, said) == []
