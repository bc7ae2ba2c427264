"""SIGTERM and Ctrl-C: what runs, what comes new, and what is said."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness import until

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 150}
STREAM = {**CHAT, "stream": True}
PATH = "/v1/chat/completions"


@contextlib.contextmanager
def server(*, shutdown_timeout_s: float) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    command = [sys.executable, "-m", "tests.server.stopping_server", str(shutdown_timeout_s)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, **pipes) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
            with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
                until(lambda: is_ready(client) or process.poll() is not None, within_s=90)
                yield process, client
        finally:
            process.kill()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.ConnectError:
        return False


def is_stopping(client: httpx.Client) -> bool:
    return client.get("/ready").status_code == 503


def test_what_runs_finishes_while_what_comes_new_is_told_to_come_back_later() -> None:
    with server(shutdown_timeout_s=20) as (process, client):
        with client.stream("POST", PATH, json=STREAM) as running:
            lines = running.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            with httpx.Client(base_url=client.base_url, trust_env=False) as newcomer:
                until(lambda: is_stopping(newcomer), within_s=10)
                refused = newcomer.post(PATH, json=CHAT)
            rest = list(lines)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["code"] == "shutting_down"
        assert any('"finish_reason":"length"' in line for line in rest)
        assert "data: [DONE]" in rest
        assert process.wait(10) == 0


@pytest.mark.parametrize("is_hurried", [False, True])
def test_what_runs_too_long_ends_with_an_error(is_hurried: bool) -> None:
    with server(shutdown_timeout_s=20 if is_hurried else 0.3) as (process, client):
        with client.stream("POST", PATH, json=STREAM) as running:
            lines = running.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            until(lambda: is_stopping(client), within_s=10)
            if is_hurried:
                process.send_signal(signal.SIGINT)
            rest = list(lines)
        assert any("shutting down" in line for line in rest)
        assert process.wait(10) == 0
        assert process.stderr is not None
        said = process.stderr.read()
        assert "Traceback" not in said
        assert ("stopping now, 1 running answer cut" in said) == is_hurried
