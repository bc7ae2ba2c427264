"""Runs whose server is killed, on a real Postgres: they end as they would have, effects once."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import psycopg
import pytest

from tests.harness import until
from tests.integration.durable_server import NEVER, Crash, DurableServer, start
from tests.postgres import data_folder
from workflows.stores.embedded import EmbeddedPostgres

pytestmark = pytest.mark.timeout(400)

PATH = "/v1/workflows"


class Receiver:
    """A service that does what it is asked once for each key.

    requests: how many, by key. on_request: is called in the midst of each.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.requests: Counter[str] = Counter()
        self.answers: dict[str, bytes] = {}
        self.on_request: Callable[[], object] = lambda: None

    def answer(self, key: str, body: bytes) -> bytes:
        self.requests[key] += 1
        self.on_request()
        return self.answers.setdefault(key, json.dumps({"did": json.loads(body)}).encode())

    def clear(self) -> None:
        self.requests.clear()
        self.answers.clear()
        self.on_request = lambda: None


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
                events.append(json.loads(line.removeprefix("data: ")))  # noqa: PERF401 - it may break
    return events


def post(server: DurableServer, body: dict[str, Any], key: str) -> list[dict[str, Any]]:
    headers = {"idempotency-key": key}
    request = {"json": {**body, "stream": True}, "headers": headers}
    with (
        suppress(httpx.TransportError),
        server.http.stream("POST", PATH, **request) as response,
    ):
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
    assert num_crashes > (30 if kind == "at_event" else 5)


def ended(server: DurableServer, run_id: str, within_s: float = 20) -> dict[str, Any]:
    """The run, once it has ended."""
    run: dict[str, Any] = {}

    def is_over() -> bool:
        run.update(server.http.get(f"{PATH}/{run_id}").json())
        return run["status"] not in ("queued", "in_progress")

    until(is_over, within_s=within_s)
    return run


def background(server: DurableServer, *nodes: dict[str, Any], **fields: Any) -> str:
    body = {"nodes": list(nodes), "background": True, **fields}
    answer = server.http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] in ("queued", "in_progress")
    return str(answer.json()["id"])


@pytest.mark.parametrize(
    ("fields", "status", "num_requests"),
    [({}, "completed", 2), ({"on_interrupt": "fail"}, "failed", 1)],
)
def test_an_effect_that_was_interrupted_is_repeated_under_its_key_or_not_at_all(
    settings: dict[str, Any],
    receiver: Receiver,
    fields: dict[str, Any],
    status: str,
    num_requests: int,
) -> None:
    receiver.clear()
    with serving(settings) as first:
        receiver.on_request = lambda: first.end(signal.SIGKILL)
        run_id = background(first, post_node(receiver, "a", "x", **fields))
        until(lambda: not first.process.is_alive(), within_s=20)
    receiver.on_request = lambda: None
    with serving(settings) as second:
        run = ended(second, run_id)
    assert run["status"] == status
    assert receiver.requests == {f"{run_id}:a": num_requests}
    if status == "failed":
        assert (run["error"]["code"], run["error"]["node_id"]) == ("interrupted", "a")


def test_a_run_whose_answer_was_at_once_is_there_whatever_happens(
    settings: dict[str, Any], receiver: Receiver
) -> None:
    receiver.clear()
    release = threading.Event()
    receiver.on_request = lambda: release.wait(20)
    first = start(settings)
    run_id = background(first, post_node(receiver, "a", "x"), name="kept")
    first.end(signal.SIGKILL)
    release.set()
    with serving(settings) as second:
        assert ended(second, run_id)["name"] == "kept"


def test_a_server_that_is_stopped_leaves_its_runs_to_the_next(
    settings: dict[str, Any], receiver: Receiver
) -> None:
    receiver.clear()
    release = threading.Event()
    receiver.on_request = lambda: release.wait(20)
    first = start(settings)
    watched: list[httpx.Response] = []

    def wait_for_it() -> None:
        body = {"nodes": [post_node(receiver, "a", "x")], "name": "waited for"}
        watched.append(first.http.post(PATH, json=body))

    waiting = threading.Thread(target=wait_for_it)
    waiting.start()
    until(lambda: bool(receiver.requests), within_s=20)
    os.kill(first.process.pid or 0, signal.SIGTERM)
    waiting.join()
    assert first.end() == 0
    release.set()
    assert watched[0].status_code == 503
    error = watched[0].json()["error"]
    assert error["code"] == "shutting_down"
    run_id = error["message"].split("/")[-1].rstrip(".")
    with serving(settings) as second:
        assert ended(second, run_id)["status"] == "completed"
    assert receiver.requests == {f"{run_id}:a": 2}


def test_a_deadline_runs_on_while_no_server_does(
    settings: dict[str, Any], receiver: Receiver
) -> None:
    receiver.clear()
    release = threading.Event()
    receiver.on_request = lambda: release.wait(20)
    first = start(settings)
    run_id = background(first, post_node(receiver, "a", "x"), deadline_s=2.0)
    until(lambda: bool(receiver.requests), within_s=20)
    first.end(signal.SIGKILL)
    with serving(settings) as second:
        run = ended(second, run_id)
    release.set()
    assert (run["status"], run["error"]["code"]) == ("incomplete", "deadline_exceeded")
    assert run["finished_at"] - run["created_at"] >= 2.0


def test_posts_at_once_with_one_key_are_one_run(
    settings: dict[str, Any], receiver: Receiver
) -> None:
    receiver.clear()
    body = {"nodes": [post_node(receiver, "a", "x")]}
    headers = {"idempotency-key": "race"}
    with serving(settings) as one, serving(settings) as other:
        runs: list[httpx.Response] = []
        threads = [
            threading.Thread(
                target=lambda url=server.http.base_url: runs.append(
                    httpx.post(f"{url}{PATH}", json=body, headers=headers, timeout=60)
                )
            )
            for server in (one, one, one, other, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        answers = [run.json() for run in runs if run.status_code == 200]
        # The other server may be asked before the run has ended, which it cannot wait for.
        refused = [run.json()["error"]["code"] for run in runs if run.status_code != 200]
        assert len(answers) >= 2
        assert set(refused) <= {"run_elsewhere"}
        assert all(answer == answers[0] for answer in answers)
        assert list(receiver.requests.values()) == [1]
        # By now both know it, however it is asked for.
        for server in (one, other):
            again = server.http.post(PATH, json=body, headers=headers)
            assert again.json() == answers[0]
            streamed = post(server, body, "race")
            assert streamed[0]["type"] == "run.created"
            assert streamed[-1]["type"] == "run.completed"
        changed = one.http.post(PATH, json={**body, "name": "n"}, headers=headers)
        assert changed.status_code == 409
        assert changed.json()["error"]["code"] == "idempotency_key_reused"


def test_a_run_is_another_servers_while_that_lives(
    settings: dict[str, Any], receiver: Receiver
) -> None:
    receiver.clear()
    release = threading.Event()
    receiver.on_request = lambda: release.wait(30)
    first = start(settings)
    run_id = background(first, post_node(receiver, "a", "x"))
    until(lambda: bool(receiver.requests), within_s=20)
    with serving(settings) as second:
        assert second.http.get(f"{PATH}/{run_id}").json()["status"] == "in_progress"
        for path in (f"{PATH}/{run_id}/events", f"{PATH}/{run_id}/cancel"):
            method = "POST" if path.endswith("cancel") else "GET"
            answer = second.http.request(method, path, json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "run_elsewhere")
        first.end(signal.SIGKILL)
        release.set()
        assert ended(second, run_id)["status"] == "completed"


def without_turns(explained: dict[str, Any]) -> dict[str, Any]:
    """What the scheduler did is known while the server lives."""
    nodes = {name: {**node, "turns": None} for name, node in explained["nodes"].items()}
    return {**explained, "nodes": nodes}


def test_what_has_ended_is_shown_as_before_and_to_its_tenant_only(
    settings: dict[str, Any], receiver: Receiver
) -> None:
    receiver.clear()
    settings |= {"api_key": ["anna:sk-1", "sk-2"]}
    anna, nobody = ({"authorization": f"Bearer {key}"} for key in ("sk-1", "sk-2"))
    with serving(settings) as first:
        runs = [
            first.http.post(PATH, json={**small_dag(receiver), "name": f"{n}\0"}, headers=anna)
            for n in range(3)
        ]
        failing = {"nodes": [template("a", "{{ inputs.x.y.z }}")]}
        runs.append(first.http.post(PATH, json=failing, headers=anna))
        theirs = first.http.post(PATH, json=small_dag(receiver), headers=nobody).json()
        ids = [run.json()["id"] for run in runs]
        paths = [
            PATH,
            *(f"{PATH}/{one}{end}" for one in ids for end in ("", "/events", "/explain")),
        ]
        before = [first.http.get(path, headers=anna) for path in paths]
    # The unnamed tenant is known by its key, wherever that stands.
    settings |= {"api_key": ["sk-0", "sk-2", "anna:sk-1"]}
    with serving(settings) as second:
        for path, old in zip(paths, before, strict=True):
            new = second.http.get(path, headers=anna)
            assert new.status_code == 200
            if "event" in path:
                assert new.text == old.text
            elif "explain" in path:
                assert without_turns(new.json()) == without_turns(old.json())
            else:
                assert new.json() == old.json()
            assert second.http.get(path, headers=nobody).status_code in (200, 404)
        assert second.http.get(f"{PATH}/{theirs['id']}", headers=anna).status_code == 404
        assert second.http.get(f"{PATH}/{theirs['id']}", headers=nobody).json() == theirs
        listed = second.http.get(PATH, headers=nobody).json()["data"]
        assert [run["id"] for run in listed] == [theirs["id"]]
        page = second.http.get(f"{PATH}?limit=3", headers=anna).json()
        assert [run["id"] for run in page["data"]] == ids[:0:-1]
        assert page["has_more"]
        page = second.http.get(f"{PATH}?limit=3&after={ids[1]}", headers=anna).json()
        assert ([run["id"] for run in page["data"]], page["has_more"]) == ([ids[0]], False)
        for path in ("run_%00", "run_%00/events", "run_%00/explain", "run_%00/graph.svg"):
            assert second.http.get(f"{PATH}/{path}", headers=anna).status_code == 404
        # Another tenant's run is as unknown as none.
        for after in ("run_none", theirs["id"]):
            answer = second.http.get(f"{PATH}?after={after}", headers=anna)
            assert (answer.status_code, after in answer.text) == (404, True)


def test_while_postgres_is_gone_runs_go_on_and_none_begins(receiver: Receiver) -> None:
    receiver.clear()
    release = threading.Event()
    receiver.on_request = lambda: release.wait(20)
    with data_folder() as folder:
        postgres = EmbeddedPostgres(folder)
        settings = {"database_url": postgres.start(), "workflow_http_allow": ["127.0.0.1"]}
        try:
            with serving(settings) as server:
                nodes = [
                    post_node(receiver, "a", "x"),
                    template("b", "{{ nodes.a.output.status }}"),
                ]
                run_id = background(server, *nodes, post_node(receiver, "c", "y"), outputs="b")
                until(lambda: len(receiver.requests) == 2, within_s=20)
                address = postgres.start()
                postgres.stop()
                release.set()

                def is_refused() -> bool:
                    body = {"nodes": [template("a", 1)]}
                    answer = server.http.post(PATH, json=body)
                    return answer.status_code == 503

                until(is_refused, within_s=20)
                assert server.http.get("/health").status_code == 200
                assert postgres.start() == address
                run = ended(server, run_id)
                assert (run["status"], run["outputs"]) == ("completed", {"b": {"value": 200}})
                until(lambda: not is_refused(), within_s=60)
            with serving(settings) as second:
                shown = second.http.get(f"{PATH}/{run_id}").json()
                assert shown == run
        finally:
            postgres.stop()
