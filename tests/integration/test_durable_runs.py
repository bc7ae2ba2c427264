"""Runs whose server is killed, on a real Postgres: they end as they would have, effects once."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import psycopg
import pytest

from tests.integration.durable_server import NEVER, Crash, DurableServer, start
from tests.postgres import data_folder
from workflows.stores.embedded import EmbeddedPostgres

pytestmark = pytest.mark.timeout(400)

PATH = "/v1/workflows"


class Receiver:
    """A service that does what it is asked once for each key, and counts.

    requests: by key; effects: keys, in the order of their first request.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.requests: Counter[str] = Counter()
        self.answers: dict[str, bytes] = {}

    def answer(self, key: str, body: bytes) -> bytes:
        self.requests[key] += 1
        return self.answers.setdefault(key, json.dumps({"did": json.loads(body)}).encode())

    def clear(self) -> None:
        self.requests.clear()
        self.answers.clear()


@contextmanager
def receiving() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            answer = receiver.answer(self.headers["idempotency-key"], body)
            with suppress(ConnectionError):
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def database_url() -> Iterator[str]:
    """A Postgres that outlives the servers."""
    with data_folder() as folder:
        postgres = EmbeddedPostgres(folder)
        try:
            yield postgres.start()
        finally:
            postgres.stop()


@pytest.fixture
def settings(database_url: str) -> dict[str, Any]:
    return {"database_url": database_url, "workflow_http_allow": ["127.0.0.1"]}


@contextmanager
def serving(settings: dict[str, Any], crash: Crash = NEVER) -> Iterator[DurableServer]:
    server = start(settings, crash)
    try:
        yield server
    finally:
        server.end()


def post_node(receiver: Receiver, node_id: str, value: str, **fields: Any) -> dict[str, Any]:
    params = {"method": "POST", "url": receiver.url, "json": {"value": value}}
    return {"id": node_id, "op": "http", "params": params, **fields}


def small_dag(receiver: Receiver) -> dict[str, Any]:
    inner = {
        "nodes": [
            post_node(receiver, "tell", "{{ inputs.item }}"),
            template("said", "{{ nodes.tell.output.json.did.value }}!"),
        ],
        "outputs": {"said": "{{ nodes.said.output.value }}"},
    }
    return {
        "nodes": [
            {"id": "facts", "op": "llm", "params": {"prompt": "Facts", "stream": True}},
            post_node(receiver, "note", "{{ nodes.facts.output.text }}"),
            {"id": "each", "op": "map", "params": {"workflow": inner, "over": ["x", "y"]}},
            template("join", ["{{ nodes.note.output.json }}", "{{ nodes.each.output.items }}"]),
            post_node(receiver, "last", "{{ nodes.join.output.value | tojson }}"),
        ],
        "outputs": {
            "last": "{{ nodes.last.output.json }}",
            "each": "{{ nodes.each.output.items }}",
        },
    }


def template(node_id: str, value: Any) -> dict[str, Any]:
    return {"id": node_id, "op": "template", "params": {"value": value}}


def read_events(response: httpx.Response) -> list[dict[str, Any]]:
    """All events of a stream until it ends, or breaks."""
    events = []
    with suppress(httpx.TransportError):
        for line in response.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
    return events


def post(server: DurableServer, body: dict[str, Any], key: str) -> list[dict[str, Any]]:
    headers = {"idempotency-key": key}
    with suppress(httpx.TransportError):
        with server.http.stream(
            "POST", PATH, json={**body, "stream": True}, headers=headers
        ) as response:
            assert response.status_code == 200, response.read()
            return read_events(response)
    return []


def stored_events(url: str, key: str) -> list[tuple[str, list[Any]]]:
    """What the database has of the run of a key: events with where they stand."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT path, events FROM shuntyard.run_events JOIN shuntyard.runs ON run_id = id "
            "WHERE idempotency_key = %s ORDER BY path, first_number",
            [key],
        ).fetchall()
    return [(path, event) for path, events in rows for event in json.loads(events)]


def completed_writes(url: str, key: str) -> set[str]:
    """The ends of the keys under which writes were sent that are known to be done."""
    writes = ("note", "tell", "last")
    return {
        f"{path}{event[2]}"
        for path, event in stored_events(url, key)
        if event[0] == "node.completed" and event[2] in writes
    }


def crash_and_go_on(
    settings: dict[str, Any], receiver: Receiver, crash: Crash, key: str
) -> tuple[list[dict[str, Any]], bool]:
    """The events that a client sees of a run whose server dies, and whether it did."""
    receiver.clear()
    body = small_dag(receiver)
    server = start(settings, crash)
    seen = post(server, body, key)
    code = server.end()
    done = completed_writes(settings["database_url"], key)
    before = dict(receiver.requests)
    with serving(settings) as server:
        if not seen:
            seen = post(server, body, key)
        else:
            path = f"{PATH}/{seen[0]['run_id']}/events"
            last = seen[-1]["sequence_number"]
            with server.http.stream("GET", path, params={"starting_after": last}) as response:
                seen += read_events(response)
        path = f"{PATH}/{seen[0]['run_id']}"
        with server.http.stream("GET", f"{path}/events") as response:
            assert read_events(response) == seen
        assert server.http.get(path).json()["outputs"] == seen[-1]["outputs"]
    # What was done is not done again; what was interrupted is sent again under the same key.
    run_id = seen[0]["run_id"]
    for ending in done:
        assert receiver.requests[f"{run_id}:{ending}"] == before[f"{run_id}:{ending}"] == 1, crash
    wanted = {"note", "last", "each[0].tell", "each[1].tell"}
    assert set(receiver.requests) == {f"{run_id}:{ending}" for ending in wanted}
    assert all(count <= 2 for count in receiver.requests.values())
    return seen, code == -9


def check_whole(seen: list[dict[str, Any]]) -> None:
    assert [event["sequence_number"] for event in seen] == list(range(1, len(seen) + 1))
    assert seen[-1]["type"] == "run.completed"
    assert seen[-1]["outputs"] == {
        "last": {
            "did": {"value": '[{"did":{"value":"Rain is wet."}},[{"said":"x!"},{"said":"y!"}]]'}
        },
        "each": [{"said": "x!"}, {"said": "y!"}],
    }
    ended = Counter(event["node_id"] for event in seen if event["type"] == "node.completed")
    assert ended == dict.fromkeys(["facts", "note", "each", "join", "last"], 1)


@pytest.mark.parametrize("kind", ["at_event", "after_write"])
def test_a_run_survives_the_death_of_its_server_at_every_transition(
    settings: dict[str, Any], receiver: Receiver, kind: str
) -> None:
    num_crashes = 0
    while True:
        crash = Crash(**{kind: num_crashes + 1})
        seen, has_died = crash_and_go_on(settings, receiver, crash, f"{kind}-{num_crashes}")
        check_whole(seen)
        if not has_died:
            break
        num_crashes += 1
    print(kind, num_crashes)
    assert num_crashes > (30 if kind == "at_event" else 5)
