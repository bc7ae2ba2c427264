"""Clients that lose their connection, or their server, and come back for the rest."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.app import HttpOptions
from server.gateway import ChatOptions
from server.journal import Journal
from spot.engines.scripted import Faults
from spot.errors import EngineFailed
from spot.parsed import OutputParser, ParsedDelta, ToolCallDelta
from tests.harness import Server, chat_body, http_request, serving, until
from tests.server.test_migration import JSON_CASES, MODEL_CASES, POLICY, SAID, SAID_CASES

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HAIRY = "a\u00e9\U0001f468\u200d\U0001f469\u200d\U0001f467 \u4f60\u597d STO STOP"


@dataclass
class Client:
    """A client of one request that remembers what an EventSource would."""

    server: Server
    request_id: str
    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    last_event_id: str = ""
    ids: list[str] = field(default_factory=list)
    response_headers: httpx.Headers | None = None

    def read(self, count: int | None = None) -> Client:
        """Ask (again), and hang up after `count` events; None reads to the end."""
        headers = {"x-request-id": self.request_id, **self.headers}
        if self.last_event_id:
            headers["last-event-id"] = self.last_event_id
        if count == 0:
            return self
        with self.server.http.stream(
            "POST", self.path, json={**self.body, "stream": True}, headers=headers
        ) as response:
            self.response_headers = response.headers
            if response.status_code != 200:
                raise AssertionError(response.read().decode())
            for block in self._blocks(response):
                self._take(block)
                if count is not None and (count := count - 1) == 0:
                    break
        return self

    def _blocks(self, response: httpx.Response) -> Iterator[str]:
        rest = ""
        for text in response.iter_text():
            *blocks, rest = (rest + text).split("\n\n")
            yield from blocks
        assert rest == "" or self.server, rest

    def _take(self, block: str) -> None:
        for line in block.split("\n"):
            name, _, value = line.partition(": ")
            if name == "id":
                self.last_event_id = value
                self.ids.append(value)
            elif name == "data":
                self.events.append(value)
            else:
                assert name == "", line

    @property
    def answer(self) -> dict[str, Any]:
        return assembled(self.events)


def assembled(events: list[str]) -> dict[str, Any]:
    """What a client puts together of a whole stream, without what differs between requests."""
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    chunks = [json.loads(event) for event in events[:-1]]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    choices: dict[int, dict[str, Any]] = {}
    answer: dict[str, Any] = {"choices": choices, "usage": None, "prompt_token_ids": None}
    for chunk in chunks:
        if "prompt_token_ids" in chunk:
            assert answer["prompt_token_ids"] is None
            answer["prompt_token_ids"] = chunk["prompt_token_ids"]
        if not chunk["choices"]:
            assert answer["usage"] is None
            answer["usage"] = chunk["usage"]
        for choice in chunk["choices"]:
            add(choices.setdefault(choice["index"], new_choice()), choice)
    return answer


def new_choice() -> dict[str, Any]:
    return {
        "roles": [], "text": "", "reasoning": "", "calls": {}, "logprobs": [], "token_ids": [],
        "prompt_token_ids": [], "finish": [],
    }  # fmt: skip


def add(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta", {})
    whole["roles"] += [delta["role"]] if "role" in delta else []
    whole["text"] += (delta.get("content") or "") + choice.get("text", "")
    whole["reasoning"] += delta.get("reasoning", "")
    for call in delta.get("tool_calls", []):
        known = whole["calls"].setdefault(call["index"], {"num_ids": 0, "name": "", "text": ""})
        known["num_ids"] += "id" in call
        known["name"] += call["function"].get("name", "")
        known["text"] += call["function"]["arguments"]
    logprobs = choice["logprobs"]
    if logprobs is not None:
        columns = logprobs.get("content")
        if columns is None:
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            columns = [list(row) for row in zip(*(logprobs[n] for n in names), strict=True)]
        whole["logprobs"] += columns
    whole["token_ids"] += choice.get("token_ids", [])
    whole["prompt_token_ids"] += choice.get("prompt_token_ids", [])
    if choice["finish_reason"] is not None:
        whole["finish"].append((choice["finish_reason"], choice["stop_reason"]))


USAGE = {"stream_options": {"include_usage": True}}


def cases() -> Iterator[Any]:
    """Name, script, path, body."""
    for name, (kind, fields) in MODEL_CASES.items():
        body = chat_body("Go on", **fields) if kind == "chat" else dict(fields)
        yield name, None, CHAT if kind == "chat" else COMPLETIONS, {**body, **USAGE}
    for name, fields in SAID_CASES.items():
        yield name, SAID, CHAT, chat_body("Go on", **fields, **USAGE)
    for name, (said, fields) in JSON_CASES.items():
        yield name, said, CHAT, chat_body("Go on", **fields, **USAGE)
    yield "hairy", HAIRY, CHAT, chat_body("x", stop=["STOP"], logprobs=True, **USAGE)
    yield "held back", "xxSTO", CHAT, chat_body("x", stop=["STOP"], **USAGE)
    yield "stop, completions", HAIRY, COMPLETIONS, {"prompt": "x", "stop": ["STOP"], **USAGE}
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    yield "continuous usage", SAID, CHAT, chat_body("x", **usage)
    yield "no usage", SAID, CHAT, chat_body("x")
    yield "nothing", SAID, COMPLETIONS, {"prompt": "x", "echo": True, "max_tokens": 0}
    ids = {"return_token_ids": True, "n": 2, "logprobs": 1, "echo": True, "max_tokens": 12}
    yield "ids", SAID, COMPLETIONS, {"prompt": ["x", "y"], **ids, **USAGE}


CASES = {name: rest for name, *rest in cases()}


@pytest.mark.parametrize("name", CASES)
def test_a_client_cut_off_after_any_event_gets_the_rest(name: str, tmp_path: Path) -> None:
    script, path, body = CASES[name]
    with serving(script, journal=tmp_path, step_time_s=0.002) as server:
        whole = Client(server, "whole", path, body).read()
        num_events = len(whole.events)
        assert len(set(whole.ids)) == num_events, "each event has an id of its own"
        for cut in range(1, num_events):
            client = Client(server, f"cut-{cut}", path, body).read(cut).read()
            assert client.answer == whole.answer, f"cut after {cut} events"
            assert len(client.ids) == len(set(client.ids)), f"cut after {cut} events"
        assert num_events < 4 or any(g.output_token_ids for g in server.engine.submitted)


@pytest.mark.parametrize("name", CASES)
def test_a_finished_answer_can_be_had_from_any_event_on(name: str, tmp_path: Path) -> None:
    script, path, body = CASES[name]
    with serving(script, journal=tmp_path) as server:
        whole = Client(server, "whole", path, body).read()
    with serving(script, journal=tmp_path) as server:
        for cut, event_id in enumerate(whole.ids[:-1]):
            client = Client(server, "whole", path, body, last_event_id=event_id).read()
            assert client.events == whole.events[cut + 1 :], event_id
        again = Client(server, "whole", path, body).read()
        assert again.events == whole.events
        assert not server.engine.submitted


@pytest.mark.parametrize("name", CASES)
def test_a_server_that_died_after_any_event_is_not_missed(name: str, tmp_path: Path) -> None:
    script, path, body = CASES[name]
    clients: list[Client] = []
    with serving(script, journal=tmp_path / "first", step_time_s=0.002) as server:
        whole = Client(server, "whole", path, body).read()
        for cut in range(1, len(whole.events), 4):
            clients.append(Client(server, f"cut-{cut}", path, body).read(cut))
            # What is on disk while the server still runs is what a crash leaves.
            shutil.copytree(tmp_path / "first", tmp_path / f"crashed-{cut}")
    for cut, client in zip(range(1, len(whole.events), 4), clients, strict=True):
        with serving(script, journal=tmp_path / f"crashed-{cut}", step_time_s=0.0) as client.server:
            assert client.read().answer == whole.answer, f"crashed after {cut} events"


PROMPT_LOGPROBS = {"prompt_logprobs": 2, "logprobs": True, "max_tokens": 16, "n": 2}
WHOLE_CASES = {
    **{name: CASES[name] for name in (*MODEL_CASES, "stop", "required", "ids", "nothing")},
    "prompt_logprobs": (SAID, CHAT, chat_body("x", **PROMPT_LOGPROBS)),
}


@pytest.mark.parametrize("name", WHOLE_CASES)
def test_an_answer_in_one_piece_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    script, path, body = WHOLE_CASES[name]
    body = {k: v for k, v in body.items() if k != "stream_options"}
    faults = Faults()
    with serving(script, journal=tmp_path, faults=faults, step_time_s=0.0) as server:
        whole = varying_left_out(server.post(path, body))
        for cut in range(1, 16, 3):
            server.engine.faults = Faults(stall_at_token=cut)
            headers = {"x-request-id": f"cut-{cut}"}
            with contextlib.suppress(httpx.ReadTimeout):  # short ones end before
                server.post(path, body, headers=headers, timeout=0.1)
            server.engine.faults = Faults()
            until(lambda: server.gateway.admission.num_requests == 0)
            first = server.post(path, body, headers=headers)
            assert first.headers["x-request-id"] == f"cut-{cut}"
            assert varying_left_out(first) == whole, f"cut after {cut} tokens"
            submitted = len(server.engine.submitted)
            again = server.post(path, body, headers=headers)
            assert again.content == first.content
            assert len(server.engine.submitted) == submitted


def varying_left_out(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    del answer["id"], answer["created"]
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", []):
            del call["id"]
    return answer


class _Fussy:
    """A parser whose output shows how its input was cut, and that invents ids."""

    num_made = 0

    def __init__(self) -> None:
        self._num_fed = 0

    def feed(self, text: str, token_ids: list[int], finished: bool) -> ParsedDelta:
        self._num_fed += 1
        parsed = ParsedDelta(f"<{text}>", f"({len(token_ids)})")
        if self._num_fed % 4 == 0:
            _Fussy.num_made += 1
            index = self._num_fed // 4 - 1
            parsed.tool_calls.append(ToolCallDelta(index, f"call-{_Fussy.num_made}", "f", "{}"))
        return parsed


class _FussyParsers:
    def new(self, body: dict[str, Any], prompt_token_ids: list[int]) -> OutputParser:
        return _Fussy()

    def adjust(self, body: dict[str, Any]) -> dict[str, Any] | None:
        return None

    def reasoning_ended(self, body: dict[str, Any], prompt_token_ids: list[int]) -> bool | None:
        return None


def test_what_a_parser_made_of_its_pieces_stays_as_it_was(tmp_path: Path) -> None:
    chat = ChatOptions(has_reasoning_parser=True, parsers=_FussyParsers())
    body = chat_body("x", stream_interval=3)
    with serving(SAID, journal=tmp_path, chat=chat, step_time_s=0.002) as server:
        whole = Client(server, "whole", CHAT, body).read()
        for cut in range(1, len(whole.events)):
            client = Client(server, f"cut-{cut}", CHAT, body).read(cut).read()
            again = Client(server, f"cut-{cut}", CHAT, body).read()
            assert again.events == client.events, f"cut after {cut} events"
    with serving(SAID, journal=tmp_path, chat=chat) as server:
        again = Client(server, "whole", CHAT, body).read()
        assert again.events == whole.events


LONG = {"seed": 5, "max_tokens": 60, "ignore_eos": True}


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Checks that the HTTP server has nothing to complain of."""
    with caplog.at_level(logging.ERROR, logger="uvicorn.error"):
        yield
    assert "ASGI callable" not in caplog.text


@pytest.mark.usefixtures("quiet")
def test_a_half_open_connection_is_taken_over(tmp_path: Path) -> None:
    body = chat_body("x", **LONG)
    with serving(None, journal=tmp_path, step_time_s=0.01) as server:
        whole = Client(server, "whole", CHAT, body).read()
        raw = json.dumps({**body, "stream": True}).encode()
        with server.connect() as connection:
            connection.sendall(http_request(CHAT, raw, headers=["x-request-id: cut"]))
            received = b""
            while received.count(b"\n\n") < 9:
                received += connection.recv(65536)
            client = Client(server, "cut", CHAT, body)
            head, _, rest = received.partition(b"\r\n\r\n")
            assert b"x-request-id: cut" in head
            for line in rest.decode().split("\n"):  # as it is chunked, lines are enough
                if line.startswith(("id: ", "data: ")):
                    client._take(line)
            if len(client.ids) > len(client.events):
                client.ids.pop()
                client.last_event_id = client.ids[-1]
            client.read()
            assert client.answer == whole.answer
            connection.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(65536):
                    pass
        assert server.gateway.model.engine.stats.running == 0


@pytest.mark.usefixtures("quiet")
def test_who_is_taken_over_before_the_first_token_gets_no_answer(tmp_path: Path) -> None:
    body = chat_body("x", **LONG)
    raw = json.dumps({**body, "stream": True}).encode()
    request = http_request(CHAT, raw, headers=["x-request-id: cut"])
    with (
        serving(None, journal=tmp_path, faults=Faults(stall_at_token=0)) as server,
        server.connect() as old,
        server.connect() as new,
    ):
        old.sendall(request)
        until(lambda: server.engine.stats.running == 1)
        new.sendall(request)
        assert old.recv(65536) == b""
        server.engine.faults = Faults()
        received = b""
        while b"[DONE]" not in received:
            received += new.recv(65536)


@pytest.mark.usefixtures("quiet")
def test_two_that_come_back_at_once_leave_one(tmp_path: Path) -> None:
    body = chat_body("x", **LONG, stream=True)
    raw = json.dumps(body).encode()
    with serving(None, journal=tmp_path, step_time_s=0.01) as server:
        connections = [server.connect() for _ in range(5)]
        for connection in connections:
            connection.sendall(http_request(CHAT, raw, headers=["x-request-id: same"]))
        received = []
        for connection in connections:
            data = b""
            with connection, contextlib.suppress(ConnectionResetError):
                while b"[DONE]" not in data and (more := connection.recv(65536)):
                    data += more
            received.append(data)
        assert sum(b"[DONE]" in data for data in received) == 1


@pytest.mark.usefixtures("quiet")
def test_a_reader_that_never_reads_is_taken_over(tmp_path: Path) -> None:
    body = chat_body("x", logprobs=True, top_logprobs=20, seed=5, max_tokens=300, ignore_eos=True)
    raw = json.dumps({**body, "stream": True}).encode()
    with (
        serving(None, journal=tmp_path, step_time_s=0.0, send_buffer=4096) as server,
        server.connect(receive_buffer=4096) as connection,
    ):
        connection.sendall(http_request(CHAT, raw, headers=["x-request-id: cut"]))
        assert connection.recv(10)
        until(lambda: server.call(server.num_buffered_bytes) > 0)
        assert len(Client(server, "cut", CHAT, body).read().answer["choices"][0]["text"]) > 9
        # Nothing waits for it any more, whatever it does.
        until(lambda: server.call(server.num_buffered_bytes) == 0)


def test_another_tenant_gets_nothing(tmp_path: Path) -> None:
    keys = HttpOptions(api_keys={"key-one-raw": "alice", "key-two-raw": "bob"})
    body = chat_body("x", temperature=1.0, max_tokens=8, ignore_eos=True)
    with serving(None, journal=tmp_path, http=keys) as server:
        alice = {"authorization": "Bearer key-one-raw"}
        bob = {"authorization": "Bearer key-two-raw"}
        first = Client(server, "same", CHAT, body, alice).read()
        other = server.post(CHAT, {**body, "stream": True}, headers={**bob, "x-request-id": "same"})
        assert json.loads(first.events[0])["id"] not in other.text
        assert len(server.engine.submitted) == 2
        unlike = server.post(
            CHAT, chat_body("y", max_tokens=4), headers={**bob, "x-request-id": "more"}
        )
        assert unlike.status_code == 200, "another tenant's ids are free"
        lost = Client(server, "same-2", CHAT, body, bob, last_event_id="3")
        with pytest.raises(AssertionError, match="cannot_continue"):
            lost.read()
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        assert b"-raw" not in path.read_bytes()


def test_another_model_does_not_go_on_with_what_this_one_began(tmp_path: Path) -> None:
    body = chat_body("x", **LONG)
    with serving(None, journal=tmp_path, step_time_s=0.002) as server:
        client = Client(server, "cut", CHAT, body).read(8)
        whole = Client(server, "whole", CHAT, body).read()
    with serving(None, journal=tmp_path) as server:
        server.gateway.model.root = "another"
        client.server = server
        with pytest.raises(AssertionError, match="cannot_continue"):
            client.read()
        assert Client(server, "whole", CHAT, body).read().events == whole.events


@pytest.mark.parametrize(
    ("changed", "param"),
    [({"max_tokens": 9}, "max_tokens"), ({"stream": False}, "stream"), ({"top_k": 4}, "top_k")],
)
def test_another_body_under_the_same_id_is_refused(
    changed: dict[str, Any], param: str, tmp_path: Path
) -> None:
    body = chat_body("x", max_tokens=4, stream=True)
    headers = {"x-request-id": "same"}
    with serving(None, journal=tmp_path) as server:
        assert server.post(CHAT, body, headers=headers).status_code == 200
        refused = server.post(CHAT, {**body, **changed}, headers=headers)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == (param, "request_id_in_use")
        assert param in error["message"]
        moved = server.post(COMPLETIONS, {"prompt": "x"}, headers=headers)
        assert moved.status_code == 400
        assert "path" in moved.json()["error"]["message"]
        same = server.post("/chat/completions", body, headers=headers)
        assert same.status_code == 200


def test_a_refused_request_leaves_its_id_free(tmp_path: Path) -> None:
    headers, body = {"x-request-id": "same"}, chat_body("x", max_tokens=4)
    with serving(None, journal=tmp_path, faults=Faults(refuse="not this")) as server:
        assert server.post(CHAT, {**body, "n": 0}, headers=headers).status_code == 400
        assert server.post(CHAT, body, headers=headers).status_code == 400
        server.engine.faults = Faults()
        assert server.post(CHAT, {**body, "n": 2}, headers=headers).status_code == 200


def test_the_servers_own_id_is_as_good(tmp_path: Path) -> None:
    body = chat_body("x", **LONG)
    with serving(None, journal=tmp_path, step_time_s=0.002) as server:
        with server.http.stream("POST", CHAT, json={**body, "stream": True}) as response:
            request_id = response.headers["x-request-id"]
            next(response.iter_raw())
        client = Client(server, request_id, CHAT, body).read()
        assert client.answer == Client(server, "whole", CHAT, body).read().answer
        assert server.metric("shuntyard_journal_resumed_total") == 1
        assert server.metric("shuntyard_journal_entries") == 2
        assert server.metric("shuntyard_journal_bytes") > 100


@pytest.mark.parametrize(
    "event_id",
    ["x", "1.2", "-1", "3;end", "1f;x", "1;1", "99", "6f", "5+1", "+1", "+9999", "2+9999", "03"],
)
def test_an_event_id_that_cannot_be_is_refused(event_id: str, tmp_path: Path) -> None:
    body = chat_body("x", **LONG)
    with serving(
        None, journal=tmp_path, step_time_s=0.0, faults=Faults(stall_at_token=5)
    ) as server:
        Client(server, "same", CHAT, body).read(6)
        client = Client(server, "same", CHAT, body, last_event_id=event_id)
        with pytest.raises(AssertionError, match="Last-Event-ID"):
            client.read()
        server.engine.faults = Faults()
        assert Client(server, "same", CHAT, body).read().answer


def test_a_torn_journal_costs_only_what_was_torn(tmp_path: Path) -> None:
    body = chat_body("x", **LONG)
    with serving(None, journal=tmp_path, step_time_s=0.001) as server:
        whole = Client(server, "whole", CHAT, body).read()
        early = Client(server, "cut", CHAT, body).read(5)
        until(lambda: server.gateway.admission.num_requests == 0)
        (segment,) = tmp_path.glob("segment-*")
        num_bytes = segment.stat().st_size
        late = Client(server, "cut", CHAT, body, last_event_id=early.last_event_id).read(30)
    # However much was made before the server noticed that the client had left, of 60 tokens at most
    # a quarter is left: fewer than the client has.
    data = segment.read_bytes()
    segment.write_bytes(data[: num_bytes + (len(data) - num_bytes) // 4])
    with serving(None, journal=tmp_path, step_time_s=0.001) as server:
        late.server = early.server = server
        with pytest.raises(AssertionError, match="its end was lost"):
            late.read()
        assert early.read().answer == whole.answer
    with serving(None, journal=tmp_path, step_time_s=0.001) as server:
        assert Client(server, "cut", CHAT, body).read().answer == whole.answer


def test_tokens_in_the_journal_are_never_sampled_again(tmp_path: Path) -> None:
    body = chat_body("x", temperature=1.5, max_tokens=20, ignore_eos=True, return_token_ids=True)
    with serving(None, journal=tmp_path, step_time_s=0.001) as server:
        client = Client(server, "same", CHAT, body).read(8).read()
        resumed = server.engine.submitted[-1]
        ids = client.answer["choices"][0]["token_ids"]
        assert len(ids) == 20
        assert resumed.output_token_ids == ids[: len(resumed.output_token_ids)]
        assert len(resumed.output_token_ids) >= 6


def test_after_an_engines_failure_a_client_may_come_back(tmp_path: Path) -> None:
    body = chat_body("x", **LONG)
    with serving(None, journal=tmp_path, step_time_s=0.001) as server:
        whole = Client(server, "whole", CHAT, body).read()
        server.engine.faults = Faults(fail_at_token=20)
        failed = Client(server, "cut", CHAT, body).read()
        assert '"error"' in failed.events[-2]
        server.engine.faults = Faults()
        failed.events = failed.events[:-2]
        assert failed.read().answer == whole.answer
        usage = server.metric("vllm:generation_tokens_total")
        assert usage == 120, "each token is counted once"


def test_coming_back_too_early_costs_nothing(tmp_path: Path) -> None:
    """While the engine starts, a client is told to wait; its answer stays in the journal."""
    body = chat_body("x", **LONG)
    with serving(None, journal=tmp_path, step_time_s=0.001) as server:
        whole = Client(server, "whole", CHAT, body).read()
        early = Client(server, "cut", CHAT, body).read(5)
    with serving(None, journal=tmp_path, step_time_s=0.001) as server:
        early.server = server
        server.call(server.engine.die)
        for _ in range(2):
            with pytest.raises(AssertionError, match="engine_unavailable"):
                early.read()
        server.call(server.engine.revive)
        assert early.read().answer == whole.answer


def test_a_resumed_answer_survives_the_loss_of_its_pipeline(tmp_path: Path) -> None:
    body = chat_body("x", **LONG)
    with serving(None, journal=tmp_path, step_time_s=0.001, spare=True, policy=POLICY) as server:
        whole = Client(server, "whole", CHAT, body).read()
        client = Client(server, "cut", CHAT, body).read(8)
        server.engine.faults = Faults(fail_at_token=40)
        assert client.read().answer == whole.answer
        assert server.fleet.num_migrations == 1


def test_a_stopped_server_sends_its_clients_to_the_next(tmp_path: Path) -> None:
    body = chat_body("x", **LONG)
    with serving(None, journal=tmp_path, faults=Faults(stall_at_token=20)) as server:
        client = Client(server, "cut", CHAT, body)
        headers = {"x-request-id": "cut"}
        with server.http.stream(
            "POST", CHAT, json={**body, "stream": True}, headers=headers
        ) as response:
            blocks = client._blocks(response)
            for _ in range(10):
                client._take(next(blocks))
            server.call(server._loop._end)
            rest = list(blocks)
        assert "shutting_down" in rest[-2]
        for block in rest[:-2]:
            client._take(block)
    with serving(None, journal=tmp_path) as server:
        client.server = server
        assert client.read().answer == Client(server, "whole", CHAT, body).read().answer


def test_a_full_journal_takes_no_new_answers_and_serving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path, now_s=lambda: 0.0, max_bytes=64 * 1024)
    body = chat_body("x" * 1000, **LONG)
    with serving(None, journal=journal, faults=Faults(stall_at_token=2)) as server:
        connections = []
        for number in range(80):
            connections.append(server.connect())
            raw = json.dumps({**body, "stream": True}).encode()
            connections[-1].sendall(http_request(CHAT, raw, headers=[f"x-request-id: {number}"]))
            connections[-1].recv(10)
            if server.metric("shuntyard_journal_full"):
                break
        assert "full with running answers" in caplog.text
        server.engine.faults = Faults()
        plain = server.stream(CHAT, chat_body("x", max_tokens=3), headers={"x-request-id": "new"})
        assert plain.status == 200
        assert b"id: 1" not in plain.raw
        for connection in connections:
            connection.close()
        until(lambda: server.gateway.admission.num_requests == 0)
        assert Client(server, "newer", CHAT, chat_body("x", max_tokens=3)).read().ids
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 64 * 1024


def test_a_disk_that_fails_ends_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = chat_body("x", max_tokens=5, ignore_eos=True, seed=1)
    now_s = [1000.0]
    journal = Journal(tmp_path, now_s=lambda: now_s[0])
    with serving(None, journal=journal) as server:

        def fail(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(journal, "_write", fail)
        assert len(Client(server, "one", CHAT, body).read().events) == 8
        assert caplog.text.count("No space left") == 1
        assert not Client(server, "two", CHAT, body).read().ids
        assert len(list(tmp_path.glob("segment-*"))) == 1
        monkeypatch.undo()
        now_s[0] += 11
        client = Client(server, "two", CHAT, body).read()
        assert client.ids
        assert Client(server, "two", CHAT, body).read().events == client.events
        assert server.metric("shuntyard_journal_write_failures_total") == 1


def test_without_a_journal_there_are_no_ids_and_headers_change_nothing() -> None:
    with serving("Hello there.") as server:
        headers = {"x-request-id": "a", "last-event-id": "1"}
        first = server.stream(CHAT, chat_body("x"), headers=headers)
        assert b"id: " not in first.raw.replace(b'"id": ', b"")
        assert first.text() == "Hello there."
        assert server.stream(CHAT, chat_body("y"), headers=headers).status == 200


def test_what_one_step_brings_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(None, journal=tmp_path, step_time_s=0.005) as server:
        journal = server.gateway.journal
        assert journal is not None
        sizes: list[int] = []
        write = journal._write

        def counted(segment: Any, data: bytes) -> None:
            sizes.append(len(data))
            write(segment, data)

        monkeypatch.setattr(journal, "_write", counted)
        Client(server, "a", CHAT, chat_body("x", **LONG, n=8)).read()
    # One for each of 60 steps; the others are the file's head, the request and its end.
    assert len(sizes) <= 60 + 4


def test_the_official_client_reads_a_journaled_stream(tmp_path: Path) -> None:
    with serving("Hello there.", journal=tmp_path) as server:
        stream = server.openai().chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "x"}], stream=True
        )
        text = "".join(c.choices[0].delta.content or "" for c in stream)
        assert text == "Hello there."


def test_the_documentations_client_gets_through_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "journal.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    example: dict[str, Any] = {}
    exec(code, example)
    monkeypatch.setattr(example["time"], "sleep", lambda seconds: None)
    body = chat_body("x", **LONG, stream=True)
    with serving(None, journal=tmp_path, step_time_s=0.002) as server:
        whole = Client(server, "whole", CHAT, body).read().answer["choices"][0]["text"]
        texts = []
        for number, text in enumerate(example["chat"](server.url, body)):
            texts.append(text)
            if number % 10 == 5:
                for run in list(server.gateway.live):
                    server.call(run.fail, EngineFailed("lost"))
            elif number % 10 == 9:
                server.call(abort_connections, server)
        assert "".join(texts) == whole
        assert server.metric("shuntyard_journal_resumed_total") > 4


def abort_connections(server: Server) -> None:
    for connection in list(server._loop.uvicorn.server_state.connections):
        connection.transport.abort()  # type: ignore[union-attr]
