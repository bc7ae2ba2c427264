"""Workflows over HTTP, on the scripted engine."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.app import HttpOptions
from tests.harness import Server, serving, until

PATH = "/v1/workflows"


def llm(node_id: str, prompt: str = "Hi", **params: Any) -> dict[str, Any]:
    return {"id": node_id, "op": "llm", "params": {"prompt": prompt, **params}}


CHAIN = {
    "nodes": [llm("a", "Say {{ inputs.q }}"), llm("b", "Again: {{ nodes.a.output.text }}")],
    "inputs": {"q": "hello"},
}
FOREVER = {"nodes": [llm("a", max_tokens=4000, ignore_eos=True)]}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(script="Hello there.", keep_alive_s=0.2) as server:
        yield server


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """Its answers take half a minute."""
    with serving(step_time_s=0.01) as server:
        yield server


def events(stream: httpx.Response) -> list[dict[str, Any]]:
    """The events of a whole stream, with its framing checked."""
    blocks = stream.text.removesuffix("\n\n").split("\n\n")
    assert blocks.pop() == "data: [DONE]"
    result = []
    for block in blocks:
        if block.startswith(":"):
            continue
        number, kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        assert number == f"id: {event['sequence_number']}"
        result.append(event)
    return result


def is_idle(server: Server) -> bool:
    stats = server.engine.stats
    return stats.running + stats.waiting == 0


def test_a_run_answers_with_all_of_its_nodes(server: Server) -> None:
    run = server.post(PATH, CHAIN).json()
    assert run["object"] == "workflow.run"
    assert run["status"] == "completed"
    assert run["outputs"]["b"]["text"] == "Hello there."
    first, second = run["nodes"]["a"], run["nodes"]["b"]
    assert first["output"]["finish_reason"] == "stop"
    assert first["finished_at"] <= second["started_at"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert run["usage"][name] == first["usage"][name] + second["usage"][name] > 0


def test_the_prompt_of_a_node_is_made_of_other_nodes_outputs(server: Server) -> None:
    prompts = []
    alone = server.chat("Again: Hello there.").json()["usage"]["prompt_tokens"]
    prompts.append(server.post(PATH, CHAIN).json()["nodes"]["b"]["usage"]["prompt_tokens"])
    assert prompts == [alone]


@pytest.mark.parametrize(
    "value",
    ["{{ 2**64 }}", "{{ '\\ud800' }}", "{{ 'nan'|float }}", "{{ 1.0|round(999999999,'ceil') }}"],
)
def test_what_is_no_json_ends_its_own_run_only(server: Server, value: str) -> None:
    node = {"id": "a", "op": "template", "params": {"value": value}}
    assert server.post(f"{PATH}/validate", {"nodes": [node]}).json()["valid"]
    run = server.post(PATH, {"nodes": [node]}).json()
    assert (run["status"], run["error"]["code"]) == ("failed", "template_error")
    assert server.post(PATH, CHAIN).json()["status"] == "completed"


def test_a_node_takes_what_a_chat_request_takes(server: Server) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    node = {"id": "a", "op": "llm", "params": {"messages": messages, "max_tokens": 2, "seed": 1}}
    run = server.post(PATH, {"nodes": [node]}).json()
    assert run["nodes"]["a"]["output"]["finish_reason"] == "length"
    assert run["usage"]["completion_tokens"] == 2


def test_events_stream_with_numbers_and_deltas(server: Server) -> None:
    nodes = [llm("a", stream=True), llm("b", "{{ nodes.a.output.text }}")]
    response = server.post(PATH, {"nodes": nodes, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    seen = events(response)
    assert [event["sequence_number"] for event in seen] == list(range(1, len(seen) + 1))
    assert (seen[0]["type"], seen[-1]["type"]) == ("run.created", "run.completed")
    deltas = [event for event in seen if event["type"] == "node.delta"]
    assert "".join(event["text"] for event in deltas) == "Hello there."
    assert {event["node_id"] for event in deltas} == {"a"}
    assert seen[-1]["outputs"]["b"]["text"] == "Hello there."


def test_a_run_can_be_asked_for_and_its_events_resumed(server: Server) -> None:
    run = server.post(PATH, CHAIN).json()
    path = f"{PATH}/{run['id']}"
    assert server.http.get(path).json() == run
    assert run["id"] in [one["id"] for one in server.http.get(PATH).json()["data"]]
    every = events(server.http.get(f"{path}/events"))
    later = events(server.http.get(f"{path}/events?starting_after=3"))
    assert later == every[3:]
    again = server.http.get(f"{path}/events", headers={"last-event-id": "3"})
    assert events(again) == later


@pytest.mark.parametrize("number", ["-1", "x", "1.5", "٣", "9" * 30, ""])
def test_a_number_that_is_none_is_refused(server: Server, number: str) -> None:
    run = server.post(PATH, CHAIN).json()
    response = server.http.get(f"{PATH}/{run['id']}/events", params={"starting_after": number})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "starting_after"


def test_a_background_run_answers_at_once_and_goes_on(server: Server) -> None:
    run = server.post(PATH, {**CHAIN, "background": True}).json()
    assert run["status"] == "in_progress"
    until(lambda: server.http.get(f"{PATH}/{run['id']}").json()["status"] == "completed")


def test_everything_wrong_is_told_with_its_path_and_nothing_runs(server: Server) -> None:
    before = server.metric("vllm:generation_tokens_total")
    body = {"nodes": [{"id": "a", "op": "lm"}, llm("b", "{{ nodes.c.output }}", temprature=1)]}
    for path in (PATH, f"{PATH}/validate"):
        response = server.post(path, body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "invalid_workflow"
        details = {detail["path"]: detail["message"] for detail in error["details"]}
        assert set(details) == {
            "nodes.0.op",
            "nodes.1.params.prompt",
            "nodes.1.params.temprature",
        }
        assert "temperature" in details["nodes.1.params.temprature"]
    assert server.metric("vllm:generation_tokens_total") == before


def test_what_only_the_model_knows_fails_the_node(server: Server) -> None:
    node = llm("a", "{{ inputs.text }}")
    run = server.post(PATH, {"nodes": [node], "inputs": {"text": "word " * 9000}}).json()
    assert run["status"] == "failed"
    assert run["error"]["code"] == "context_length_exceeded"
    assert run["error"]["node_id"] == "a"


@pytest.mark.parametrize(
    "params", [{"n": 2}, {"prompt": "x", "messages": []}, {}, {"messages": []}]
)
def test_a_node_that_no_chat_request_could_be_is_refused(server: Server, params: Any) -> None:
    response = server.post(PATH, {"nodes": [{"id": "a", "op": "llm", "params": params}]})
    assert response.status_code == 400
    assert response.json()["error"]["details"][0]["path"].startswith("nodes.0.params")


def test_validate_judges_inputs_where_there_are_some(server: Server) -> None:
    document = {"nodes": [llm("a")], "input_schema": {"required": ["q"]}}
    assert server.post(f"{PATH}/validate", document).json()["valid"]
    refused = server.post(f"{PATH}/validate", {**document, "inputs": {}})
    assert refused.status_code == 400
    assert refused.json()["error"]["details"][0]["path"] == "inputs"


def test_validate_shows_the_order_and_runs_nothing(server: Server) -> None:
    answer = server.post(f"{PATH}/validate", CHAIN).json()
    assert answer["valid"] is True
    assert [(node["id"], node["depends_on"]) for node in answer["nodes"]] == [
        ("a", []),
        ("b", ["a"]),
    ]


def test_an_unknown_run_is_not_found(server: Server) -> None:
    for path in ("run_x", "run_x/events"):
        assert server.http.get(f"{PATH}/{path}").status_code == 404
    assert server.post(f"{PATH}/run_x/cancel", {}).status_code == 404


def test_cancel_frees_the_engine(slow: Server) -> None:
    run = slow.post(PATH, {**FOREVER, "background": True}).json()
    until(lambda: slow.engine.stats.running == 1)
    cancelled = slow.post(f"{PATH}/{run['id']}/cancel", {}).json()
    assert cancelled["status"] == "cancelled"
    assert cancelled["nodes"]["a"]["status"] == "cancelled"
    until(lambda: is_idle(slow), within_s=1.0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_run(slow: Server, stream: bool) -> None:
    _leave(slow, {**FOREVER, "stream": stream})
    until(lambda: is_idle(slow), within_s=1.0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_can_outlive_its_client(slow: Server, stream: bool) -> None:
    nodes = [llm("a", max_tokens=20, ignore_eos=True)]
    body = {"name": "outlives", "nodes": nodes, "stream": stream, "on_disconnect": "continue"}
    _leave(slow, body)
    runs = slow.http.get(PATH).json()["data"]
    run = next(one for one in runs if one["name"] == "outlives")
    until(lambda: slow.http.get(f"{PATH}/{run['id']}").json()["status"] == "completed")
    slow.post(f"{PATH}/{run['id']}/cancel", {})


def _leave(server: Server, body: dict[str, Any]) -> None:
    """Send a request and hang up once its generation runs."""
    raw = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    with server.connect() as connection:
        connection.sendall(head.encode() + raw)
        until(lambda: server.engine.stats.running == 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def test_a_silent_stream_is_kept_alive() -> None:
    with serving(step_time_s=0.7, keep_alive_s=0.2) as server:
        response = server.post(PATH, {"nodes": [llm("a", max_tokens=2)], "stream": True})
        assert ": keep-alive" in response.text
        assert events(response)[-1]["type"] == "run.completed"


def test_tenants_do_not_see_each_others_runs() -> None:
    http = HttpOptions(api_keys={"sk-a": "alice", "sk-b": "bob"})
    with serving(script="Hi.", http=http) as server:
        alice, bob = ({"authorization": f"Bearer sk-{name}"} for name in "ab")
        run = server.post(PATH, CHAIN, headers=alice).json()
        path = f"{PATH}/{run['id']}"
        assert server.http.get(path, headers=alice).status_code == 200
        assert server.http.get(path, headers=bob).status_code == 404
        assert server.http.get(f"{path}/events", headers=bob).status_code == 404
        assert server.post(f"{path}/cancel", {}, headers=bob).status_code == 404
        assert server.http.get(PATH, headers=bob).json()["data"] == []


def test_a_shutdown_ends_runs_and_answers_them() -> None:
    with serving(step_time_s=0.01) as server:
        run = server.post(PATH, {**FOREVER, "background": True}).json()
        assert run["status"] == "in_progress"
        until(lambda: server.engine.stats.running == 1)


def test_the_tokens_of_nodes_are_counted(server: Server) -> None:
    before = server.metric("vllm:generation_tokens_total")
    run = server.post(PATH, CHAIN).json()
    counted = server.metric("vllm:generation_tokens_total") - before
    assert counted == run["usage"]["completion_tokens"]


def test_equal_deterministic_nodes_are_answered_by_one_generation(slow: Server) -> None:
    def node(name: str, **params: Any) -> dict[str, Any]:
        return llm(name, "Count.", max_tokens=10, ignore_eos=True, **params)

    nodes = [node("a", temperature=0), node("b", temperature=0, stream=True), node("c", seed=3)]
    before = slow.metric("vllm:generation_tokens_total")
    run = slow.post(PATH, {"nodes": [*nodes, node("d")]}).json()
    assert slow.metric("vllm:generation_tokens_total") - before == 30
    assert run["nodes"]["a"]["output"] == run["nodes"]["b"]["output"]
    assert run["usage"]["completion_tokens"] == 30
    assert run["nodes"]["b"]["usage"]["shared_tokens"] > 10
    explained = slow.http.get(f"{PATH}/{run['id']}/explain").json()["nodes"]
    assert [explained[name]["shared"] for name in "abcd"] == ["none", "inflight", "none", "none"]
    assert "sampled" in explained["d"]["reason"]


def test_a_kept_answer_streams_like_a_new_one(server: Server) -> None:
    node = llm("a", "Once.", temperature=0, stream=True)
    body = {"nodes": [{**node, "cache": {"ttl_s": 60}}], "stream": True}
    first, second = (events(server.post(PATH, body)) for _ in range(2))
    for seen in (first, second):
        said = "".join(event["text"] for event in seen if event["type"] == "node.delta")
        assert said == seen[-1]["outputs"]["a"]["text"] == "Hello there."
    kinds = [event["type"] for event in second]
    assert ("node.shared" in kinds, "node.shared" in [e["type"] for e in first]) == (True, False)


@pytest.mark.parametrize(("limit", "how"), [({"max_tokens": 20}, "cache"), ({}, "none")])
def test_an_answer_as_long_as_was_asked_is_kept_and_one_cut_by_the_context_is_not(
    limit: dict[str, int], how: str
) -> None:
    with serving("word " * 500, max_model_len=64) as server:
        node = llm("a", "Go on.", temperature=0, **limit) | {"cache": {"ttl_s": 60}}
        runs = [server.post(PATH, {"nodes": [node]}).json() for _ in range(2)]
    assert [one["nodes"]["a"]["output"]["finish_reason"] for one in runs] == ["length"] * 2
    assert runs[1]["nodes"]["a"]["shared"] == how


def test_a_run_is_drawn(server: Server) -> None:
    run = server.post(PATH, CHAIN).json()
    answer = server.http.get(f"{PATH}/{run['id']}/graph.svg")
    assert answer.headers["content-type"] == "image/svg+xml"
    assert answer.text.count("<path") == 1
    assert "a (llm) is completed" in answer.text
    assert server.http.get(f"{PATH}/run_nothing/graph.svg").status_code == 404


def test_explain_says_what_the_scheduler_did(server: Server) -> None:
    run = server.post(PATH, CHAIN).json()
    explained = server.http.get(f"{PATH}/{run['id']}/explain").json()["nodes"]
    for name in "ab":
        (turn,) = explained[name]["turns"]
        assert turn["resource"] == "llm"
        assert 0 <= turn["waited_s"] < 5
        assert turn["asked_at"] <= turn["started_at"] <= turn["finished_at"]
        assert (turn["items"], turn["batch_mates"], turn["split"]) == (1, 0, 1)
        assert turn["remaining_s"] is None


def test_more_nodes_than_seats_wait_for_a_slot() -> None:
    """On a fleet of two pipelines with a seat and a place each."""
    with serving(script="Hello there.", spare=True, max_num_seqs=1, step_time_s=0.01) as server:
        until(lambda: server.metric("shuntyard_workflow_slots", resource="llm") == 4)
        nodes = [llm(f"n{index}", f"Say {index}") for index in range(12)]
        hold = server.post(PATH, {"nodes": nodes, "background": True}).json()
        until(lambda: server.metric("shuntyard_workflow_queue_length", resource="llm") == 8)
        assert server.metric("shuntyard_workflow_slots_used", resource="llm") == 4
        assert server.metric("shuntyard_workflow_active_runs") == 1
        explained = server.http.get(f"{PATH}/{hold['id']}/explain").json()["nodes"]
        waiting = [one["turns"][0] for one in explained.values() if one["turns"]]
        assert any(turn["started_at"] is None and turn["remaining_s"] > 0 for turn in waiting)
        until(lambda: server.metric("shuntyard_workflow_active_runs") == 0, within_s=10)
        assert server.metric("shuntyard_workflow_dispatches_total", resource="llm") == 12
        assert server.metric("shuntyard_workflow_wait_seconds_count", resource="llm") == 12
        assert server.metric("shuntyard_workflow_wait_seconds_sum", resource="llm") > 0
        assert server.metric("shuntyard_workflow_slots_used", resource="llm") == 0


def test_a_plain_chat_is_not_starved_by_runs_that_wait() -> None:
    with serving(script="Hello there.", spare=True, max_num_seqs=1, step_time_s=0.01) as server:
        until(lambda: server.metric("shuntyard_workflow_slots", resource="llm") == 4)
        nodes = [llm(f"n{index}", f"Say {index}") for index in range(100)]
        run = server.post(PATH, {"nodes": nodes, "background": True}).json()
        until(lambda: server.metric("shuntyard_workflow_slots_used", resource="llm") == 4)
        assert server.chat("Hi").status_code == 200
        status = server.http.get(f"{PATH}/{run['id']}").json()["status"]
        assert status == "in_progress"
        cancelled = server.post(f"{PATH}/{run['id']}/cancel", {}).json()
        assert cancelled["status"] == "cancelled"


def test_what_generations_took_is_learnt(server: Server) -> None:
    server.post(PATH, {"nodes": [llm("a", "Something new.")]})
    profiler = server.gateway.workflows.slots.profiler
    assert any(name.startswith("llm:") for name in profiler.to_dict()["profiles"])


@pytest.mark.parametrize("key", ["", "x" * 256, "ü"])
def test_an_idempotency_key_that_is_none_is_refused(server: Server, key: str) -> None:
    headers = {"idempotency-key": key.encode("latin-1")}
    response = server.http.post(PATH, json=CHAIN, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "Idempotency-Key"


def test_a_key_gives_the_same_run_however_it_is_asked_for(server: Server) -> None:
    headers = {"idempotency-key": "once"}
    run = server.http.post(PATH, json=CHAIN, headers=headers).json()
    assert server.http.post(PATH, json=CHAIN, headers=headers).json() == run
    body = {**CHAIN, "background": True, "on_disconnect": "cancel"}
    assert server.http.post(PATH, json=body, headers=headers).json() == run
    streamed = events(server.http.post(PATH, json={**CHAIN, "stream": True}, headers=headers))
    assert streamed[0]["sequence_number"] == 1
    assert {event["run_id"] for event in streamed} == {run["id"]}
    other = server.http.post(PATH, json={**CHAIN, "inputs": {"q": "x"}}, headers=headers)
    assert other.status_code == 409
    assert other.json()["error"]["code"] == "idempotency_key_reused"


def test_a_client_that_leaves_may_come_back_for_the_run_of_its_key(slow: Server) -> None:
    body = {"nodes": [llm("a", max_tokens=50, ignore_eos=True)]}
    headers = {"idempotency-key": "back"}
    with pytest.raises(httpx.ReadTimeout):
        slow.http.post(PATH, json=body, headers=headers, timeout=0.2)
    run = slow.http.post(PATH, json=body, headers=headers).json()
    assert run["status"] == "completed"


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", f"limit={10**20}", "after=%00"]
)
def test_a_page_that_is_none_is_refused(server: Server, query: str) -> None:
    assert server.http.get(f"{PATH}?{query}").status_code == 400


def test_the_list_comes_in_pages(server: Server) -> None:
    ids = [server.post(PATH, CHAIN).json()["id"] for _ in range(3)]
    page = server.http.get(f"{PATH}?limit=2").json()
    assert ([run["id"] for run in page["data"]], page["has_more"]) == (ids[:0:-1], True)
    unknown = server.http.get(f"{PATH}?after=run_none")
    assert (unknown.status_code, "run_none" in unknown.text) == (404, True)
    page = server.http.get(f"{PATH}?limit=1&after={ids[1]}").json()
    assert [run["id"] for run in page["data"]] == ids[:1]
