"""The command itself: what operators rely on, over the socket of the real server.

The last tests kill its engine and then stop it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from tests.clients.live_server import ALIAS, MAX_MODEL_LEN, MODEL, LiveServer
from tests.harness import Streamed, until

pytestmark = [pytest.mark.engine, pytest.mark.contract, pytest.mark.timeout(600)]

RESTART_TIMEOUT_S = 300.0


def long_stream(**fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Count."}],
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/load", "/metrics"])
def test_operators_get_and_head(live: LiveServer, path: str) -> None:
    answer = live.http.get(path)
    assert answer.status_code == 200
    head = live.http.head(path)
    assert head.status_code == 200
    assert head.content == b""


def test_the_metrics_count_what_was_served(live: LiveServer) -> None:
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [live.metric(name) for name in names]
    completed = live.metric(
        "shuntyard_requests_total", outcome="completed", endpoint="/v1/completions"
    )
    body = {"prompt": "One two three", "max_tokens": 5, "ignore_eos": True, "n": 2}
    usage = live.http.post("/v1/completions", json=body).json()["usage"]
    after = [live.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [
        usage["prompt_tokens"],
        usage["completion_tokens"],
    ]
    assert usage["completion_tokens"] == 10
    assert (
        live.metric("shuntyard_requests_total", outcome="completed", endpoint="/v1/completions")
        == completed + 1
    )


def test_a_request_without_a_model_gets_the_main_one(live: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    answer = live.http.post("/v1/chat/completions", json=body)
    assert answer.json()["model"] == MODEL
    assert live.http.get(f"/v1/models/{ALIAS}").json()["max_model_len"] == MAX_MODEL_LEN


def test_tokens_go_there_and_back(live: LiveServer) -> None:
    text = "Grüße, 東京 🚂!"
    tokens = live.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == MAX_MODEL_LEN
    back = live.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back["prompt"] == text


def test_health_answers_at_once_under_load(live: LiveServer) -> None:
    delays: list[float] = []
    with live.http.stream(
        "POST", "/v1/chat/completions", json=long_stream(n=8, max_tokens=400)
    ) as response:
        next(response.iter_raw())
        for _ in range(20):
            started_s = time.monotonic()
            assert httpx.get(f"{live.url}/health", trust_env=False).status_code == 200
            delays.append(time.monotonic() - started_s)
    assert sorted(delays)[len(delays) // 2] < 0.5
    until(lambda: live.num_running == 0 and live.load == 0)


@pytest.mark.ends_live
def test_a_stream_outlives_its_killed_engine(live: LiveServer) -> None:
    cores = [pid for pid, name in live.processes.items() if "EngineCore" in name]
    if not cores:
        pytest.skip("the server was not started here")
    max_tokens = 150
    stream = live.openai().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Count."}],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=max_tokens,
        logprobs=True,
        extra_body={"ignore_eos": True},
        timeout=RESTART_TIMEOUT_S,
    )
    chunks = []
    for chunk in stream:
        chunks.append(chunk)
        if len(chunks) == 5:
            break
    os.kill(cores[0], signal.SIGKILL)
    until(lambda: live.http.get("/health").status_code == 503, within_s=5)
    with pytest.raises(openai.InternalServerError) as caught:
        live.openai().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}]
        )
    assert caught.value.status_code == 503
    chunks += list(stream)
    last = chunks[-1]
    assert last.usage is not None
    assert last.usage.completion_tokens == max_tokens
    assert last.model_extra == {"shuntyard": {"migrations": 1}}
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert [c.finish_reason for c in choices if c.finish_reason] == ["length"]
    logprobs = [entry for c in choices if c.logprobs for entry in c.logprobs.content or []]
    assert len(logprobs) == max_tokens
    until(lambda: live.http.get("/health").status_code == 200, within_s=RESTART_TIMEOUT_S)
    body = {"prompt": "One two three", "max_tokens": 2}
    assert live.http.post("/v1/completions", json=body).status_code == 200
    assert live.metric("shuntyard_engine_restarts") == 1


@pytest.mark.ends_live
def test_sigterm_lets_running_answers_finish(live: LiveServer) -> None:
    process = live.process
    if process is None:
        pytest.skip("the server was not started here")
    done: list[Streamed] = []

    def read() -> None:
        body = long_stream(max_tokens=120)
        response = httpx.post(
            f"{live.url}/v1/chat/completions", json=body, timeout=120, trust_env=False
        )
        done.append(Streamed(response.status_code, response.headers, response.content))

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: live.num_running == 1, within_s=30)
    process.send_signal(signal.SIGTERM)
    reader.join(120)
    (streamed,) = done
    assert streamed.is_done
    assert streamed.error is None
    assert streamed.finish_reasons() == ["length"]
    assert process.wait(60) == 0, live.tail()
    until(lambda: not live.processes, within_s=5)
    assert "Traceback" not in live.tail(10_000)
    for line in live.tail(10_000).splitlines():
        if line.startswith("{"):
            json.loads(line)
