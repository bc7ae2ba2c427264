"""The whole server dies in the middle of a stream, and the client hears the rest from the next."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.live_server import LiveServer, crash, start, stop, wait_until_ready

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NUM_TOKENS = 48
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me of a railway yard."}],
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "logprobs": True,
}
CASES: dict[str, dict[str, Any]] = {
    "seeded": {"seed": 12, "temperature": 0.9, "n": 2},
    "greedy": {"temperature": 0, "frequency_penalty": 0.7},
}


def arguments(journal: Path, port: int) -> list[str]:
    return [
        str(Path(sys.executable).with_name("shuntyard")),
        "serve",
        *("--port", str(port)),
        *("--journal", str(journal)),
        *("--max-model-len", "512"),
        *("--max-num-seqs", "8"),
        *("--dtype", "float32"),
        # Its Postgres outlives a server that is killed, until the next one comes.
        "--no-workflow-journal",
    ]


def events(
    server: LiveServer, case: str, request_id: str, last_event_id: str | None = None
) -> Iterator[tuple[str, str]]:
    """Id and data of each event."""
    headers = {"x-request-id": request_id}
    if last_event_id is not None:
        headers["last-event-id"] = last_event_id
    body = {**BODY, **CASES[case]}
    with server.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status_code == 200, response.read()
        event_id = ""
        for line in response.iter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            elif name == "data":
                yield event_id, value


def answer(data: list[str]) -> dict[str, Any]:
    """What a client has of a whole stream: texts, ids, log probabilities, finish, usage."""
    assert data[-1] == "[DONE]"
    chunks = [json.loads(item) for item in data[:-1]]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    whole: dict[str, Any] = {"usage": chunks[-1]["usage"]["completion_tokens"]}
    for chunk in chunks:
        for choice in chunk["choices"]:
            known = whole.setdefault(
                choice["index"], {"text": "", "ids": [], "logprobs": [], "finish": []}
            )
            known["text"] += choice["delta"].get("content") or ""
            known["ids"] += choice.get("token_ids") or []
            if choice["logprobs"] is not None:
                known["logprobs"] += [
                    pytest.approx(entry["logprob"], abs=1e-3)
                    for entry in choice["logprobs"]["content"]
                ]
            if choice["finish_reason"] is not None:
                known["finish"].append(choice["finish_reason"])
    return whole


def plain(whole: dict[str, Any]) -> dict[str, Any]:
    """Log probabilities as numbers, so that the other side's may be approximate."""
    return {
        key: {**value, "logprobs": [item.expected for item in value["logprobs"]]}
        if isinstance(value, dict)
        else value
        for key, value in whole.items()
    }


def test_kill_9_of_the_server_costs_no_token(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    first = start(arguments(journal, 0), log=tmp_path / "first.log")
    begun: dict[str, list[tuple[str, str]]] = {}
    try:
        first.url = wait_until_ready(first)
        wholes = {case: answer([d for _, d in events(first, case, f"{case}-w")]) for case in CASES}
        streams = {case: events(first, case, f"{case}-cut") for case in CASES}
        for case, stream in streams.items():
            begun[case] = [next(stream) for _ in range(20)]
    finally:
        crash(first)
        for stream in streams.values():
            with contextlib.suppress(httpx.HTTPError):
                stream.close()
    port = int(first.url.rpartition(":")[2])
    second = start(arguments(journal, port), log=tmp_path / "second.log")
    try:
        second.url = wait_until_ready(second)
        assert second.url == first.url
        for case, got in begun.items():
            rest = list(events(second, case, f"{case}-cut", got[-1][0]))
            ids = [event_id for event_id, _ in [*got, *rest]]
            assert len(set(ids)) == len(ids)
            whole = answer([data for _, data in [*got, *rest]])
            assert plain(whole) == wholes[case], case
            again = answer([data for _, data in events(second, case, f"{case}-w")])
            assert plain(again) == wholes[case], case
        assert second.metric("vllm:generation_tokens_total") > 0, "all was made before the crash"
        assert second.metric("shuntyard_journal_resumed_total") == 2 * len(CASES)
    finally:
        second.close()
        stop(second)
