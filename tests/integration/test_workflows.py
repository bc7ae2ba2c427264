"""Workflows on the real engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.clients.live_server import MAX_NUM_SEQS, LiveServer
from tests.harness import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PATH = "/v1/workflows"
# Of the wall clocks of two runs.
CLOCK_ERROR_S = 0.05


def llm(node_id: str, prompt: str, **params: Any) -> dict[str, Any]:
    params = {"max_tokens": 12, "temperature": 0, **params}
    return {"id": node_id, "op": "llm", "params": {"prompt": prompt, **params}}


def num_running(live: LiveServer) -> float:
    text = live.http.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_a_diamond_runs_through_the_model(live: LiveServer) -> None:
    nodes = [
        llm("root", "Name a colour."),
        llm("left", "Is {{ nodes.root.output.text }} warm?"),
        llm("right", "Is {{ nodes.root.output.text }} cold?"),
        {
            "id": "join",
            "op": "template",
            "params": {"value": ["{{ nodes.left.output.text }}", "{{ nodes.right.output.text }}"]},
        },
    ]
    run = live.http.post(PATH, json={"nodes": nodes}, timeout=120).json()
    assert run["status"] == "completed"
    joined = run["outputs"]["join"]["value"]
    assert joined == [run["nodes"][name]["output"]["text"] for name in ("left", "right")]
    assert all(joined)
    # The two branches ran side by side.
    left, right = run["nodes"]["left"], run["nodes"]["right"]
    assert left["started_at"] < right["finished_at"]
    assert right["started_at"] < left["finished_at"]


def test_a_node_answers_as_the_same_chat_request_would(live: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 12}
    body |= {"temperature": 0}
    chat = live.http.post("/v1/chat/completions", json=body, timeout=120).json()
    node = {"id": "a", "op": "llm", "params": body}
    run = live.http.post(PATH, json={"nodes": [node]}, timeout=120).json()
    assert run["outputs"]["a"]["text"] == chat["choices"][0]["message"]["content"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert run["usage"][name] == chat["usage"][name]


def test_equal_nodes_of_concurrent_runs_are_generated_once(live: LiveServer) -> None:
    body = {"nodes": [llm("a", "Tell a long story.", max_tokens=64, ignore_eos=True)]}
    runs: list[dict[str, Any]] = []

    def post() -> None:
        runs.append(httpx.post(f"{live.url}{PATH}", json=body, timeout=120).json())

    threads = [threading.Thread(target=post) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = {run["outputs"]["a"]["text"] for run in runs}
    assert len(texts) == 1
    assert sorted(run["nodes"]["a"]["shared"] for run in runs) == ["inflight"] * 3 + ["none"]
    assert sum(run["usage"]["completion_tokens"] for run in runs) == 64


def test_a_run_that_comes_late_catches_up_with_an_equal_one(live: LiveServer) -> None:
    choice = {"structured_outputs": {"choice": ["the sea", "the sky"]}}
    story = "Tell a story about {{ nodes.topic.output.text }} and a lighthouse."
    nodes = [
        llm("topic", "Which is wider, the sea or the sky?", **choice),
        llm("story", story, max_tokens=300, ignore_eos=True),
    ]
    body = {"nodes": nodes}
    path = f"{PATH}/{live.http.post(PATH, json={**body, 'background': True}).json()['id']}"

    def node(name: str) -> dict[str, Any]:
        return dict(live.http.get(path).json()["nodes"][name])

    until(lambda: node("story")["started_at"] is not None, within_s=60)
    late = live.http.post(PATH, json=body, timeout=120).json()
    first = live.http.get(path).json()
    assert (first["status"], late["status"]) == ("completed", "completed")
    assert late["nodes"]["topic"]["shared"] == "cache"
    assert late["nodes"]["story"]["shared"] == "inflight"
    assert late["outputs"] == first["outputs"]
    assert late["usage"]["completion_tokens"] == 0
    assert late["nodes"]["topic"]["usage"]["shared_tokens"] > 10
    explained = live.http.get(f"{PATH}/{late['id']}/explain").json()["nodes"]["topic"]
    assert "active" in explained["reason"]
    # Nothing of them is left: the same again is generated again.
    again = live.http.post(PATH, json={"nodes": nodes[:1]}, timeout=120).json()["nodes"]["topic"]
    assert again["shared"] == "none"
    assert again["output"]["text"] == first["nodes"]["topic"]["output"]["text"]


def test_equal_chats_are_generated_once(live: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "Tell another long story."}]}
    body |= {"temperature": 0, "max_tokens": 200, "ignore_eos": True, "stream": True}

    def content(response: httpx.Response) -> str:
        events = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        return "".join(delta.get("content") or "" for delta in deltas)

    with (
        httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body, timeout=120) as first,
        httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body, timeout=120) as second,
    ):
        assert "x-shuntyard-shared" not in first.headers
        assert second.headers["x-shuntyard-shared"] == "1"
        assert num_running(live) == 1
        texts = content(first), content(second)
    assert texts[0] == texts[1]
    assert len(texts[0]) > 200


def test_cancel_frees_the_seat_within_a_second(live: LiveServer) -> None:
    until(lambda: num_running(live) == 0, within_s=30)
    node = llm("a", "Count.", max_tokens=900, ignore_eos=True)
    run = live.http.post(PATH, json={"nodes": [node], "background": True}).json()
    until(lambda: num_running(live) == 1, within_s=30)
    answer = live.http.post(f"{PATH}/{run['id']}/cancel", json={}).json()
    assert answer["status"] == "cancelled"
    until(lambda: num_running(live) == 0, within_s=1.0)


def test_deltas_stream_while_the_node_runs(live: LiveServer) -> None:
    node = llm("a", "Count to ten.", stream=True, max_tokens=20, ignore_eos=True)
    with live.http.stream("POST", PATH, json={"nodes": [node], "stream": True}) as response:
        events = [
            json.loads(line.removeprefix("data: "))
            for line in response.iter_lines()
            if line.startswith("data: {")
        ]
    deltas = [event for event in events if event["type"] == "node.delta"]
    assert len(deltas) > 5
    assert deltas[0]["created_at"] < deltas[-1]["created_at"]
    assert "".join(e["text"] for e in deltas) == events[-1]["outputs"]["a"]["text"]


def slots(live: LiveServer, name: str) -> int:
    return int(live.metric(f"shuntyard_workflow_{name}", resource="llm"))


def start(live: LiveServer, node: dict[str, Any]) -> str:
    """The id of a run of one node."""
    body = {"nodes": [node], "background": True}
    return str(live.http.post(PATH, json=body).json()["id"])


def cancel(live: LiveServer, run_id: str) -> None:
    assert live.http.post(f"{PATH}/{run_id}/cancel", json={}).json()["status"] == "cancelled"


def started_at(live: LiveServer, run_id: str) -> list[float]:
    nodes = live.http.get(f"{PATH}/{run_id}/explain").json()["nodes"].values()
    return [turn["started_at"] for node in nodes for turn in node["turns"]]


@pytest.fixture
def holds(live: LiveServer) -> Iterator[list[str]]:
    """Long runs, one for each slot, in the order in which they got theirs; stopped at the end."""
    until(lambda: slots(live, "slots_used") == 0, within_s=30)
    # More than seats, so that a seat that comes free is taken in the next step.
    until(lambda: slots(live, "slots") > MAX_NUM_SEQS, within_s=30)
    num_slots = slots(live, "slots")
    run_ids: list[str] = []
    try:
        for number in range(num_slots):
            node = llm("n", f"Count from {number}.", max_tokens=1900, ignore_eos=True)
            run_ids.append(start(live, node))
            until(lambda: slots(live, "slots_used") == len(run_ids), within_s=30)
        yield run_ids
    finally:
        for run_id in run_ids:
            cancel(live, run_id)
    until(lambda: num_running(live) == 0, within_s=1.0)
    assert slots(live, "slots_used") == 0


def test_runs_share_the_slots_by_the_policy(live: LiveServer, holds: list[str]) -> None:
    """All slots are held; of those who wait, the more urgent ones get what comes free."""
    # So far apart that it does not matter who came a few seconds earlier.
    runs: dict[int, list[str]] = {300: [], -300: []}
    for number in range(5):
        for priority, ids in runs.items():
            ids.append(start(live, llm("a", f"Say {number}.", seed=priority, priority=priority)))
    until(lambda: slots(live, "queue_length") == 10, within_s=30)
    # A more urgent chat takes the seat of one of them, at the end of its sub-node.
    body = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2, "priority": -900}
    assert live.http.post("/v1/chat/completions", json=body, timeout=120).status_code == 200
    # One that generates, and the two that wait in the engine.
    for run_id in (holds.pop(0), holds.pop(), holds.pop()):
        num_queued = slots(live, "queue_length")
        cancel(live, run_id)
        until(lambda n=num_queued: slots(live, "queue_length") < n, within_s=1.0)  # type: ignore[misc]
    for run_id in (run_id for ids in runs.values() for run_id in ids):
        path = f"{PATH}/{run_id}"
        until(lambda p=path: live.http.get(p).json()["status"] == "completed", within_s=120)  # type: ignore[misc]
    urgent, patient = (
        [at_s for run_id in runs[priority] for at_s in started_at(live, run_id)]
        for priority in (-300, 300)
    )
    assert len(urgent) == len(patient) == 5
    # Those that start in one step are told apart by less than what each run's wall clock is off by.
    assert max(urgent) <= min(patient) + CLOCK_ERROR_S


def test_what_is_known_of_a_prompt_is_read_while_the_search_runs(live: LiveServer) -> None:
    """Two runs whose prompts nobody has seen before, in one of them behind what is searched for."""

    def cached_share(text: str, *, is_known: bool) -> float:
        found = "{{ nodes.find.output.texts | join(' ') }}"
        prompt = f"{text}\n\n{found}" if is_known else f"{found}\n\n{text}"
        nodes = [
            {"id": "find", "op": "web_search", "params": {"query": f"slowly {text[:9]}"}},
            llm("answer", prompt, max_tokens=4),
        ]
        run = live.http.post(PATH, json={"nodes": nodes}, timeout=120).json()
        assert run["status"] == "completed", run["error"]
        usage = run["nodes"]["answer"]["usage"]
        return float(usage["cached_tokens"] / usage["prompt_tokens"])

    ahead = live.metric("shuntyard_prefilled_ahead_tokens_total")
    texts = [" ".join(f"{word} {number}" for number in range(150)) for word in ("Stone", "Cloud")]
    assert cached_share(texts[0], is_known=True) > 0.6
    assert live.metric("shuntyard_prefilled_ahead_tokens_total") > ahead
    assert cached_share(texts[1], is_known=False) < 0.4


def test_what_a_node_writes_is_read_before_it_is_whole(live: LiveServer) -> None:
    """Two runs with new texts; in one of them a filter stands between the text and the prompt."""

    def cached_share(topic: str, text: str) -> float:
        nodes = [
            llm("draft", f"Write a long story about {topic}.", max_tokens=300, ignore_eos=True),
            llm("check", f"Check this draft about {topic}: {text}", max_tokens=4),
        ]
        run = live.http.post(PATH, json={"nodes": nodes}, timeout=240).json()
        assert run["status"] == "completed", run["error"]
        assert run["nodes"]["draft"]["usage"]["completion_tokens"] == 300
        usage = run["nodes"]["check"]["usage"]
        assert usage["prompt_tokens"] > 250
        return float(usage["cached_tokens"] / usage["prompt_tokens"])

    ahead = live.metric("shuntyard_prefilled_ahead_tokens_total")
    assert cached_share("a lighthouse", "{{ nodes.draft.output.text }}") > 0.5
    assert live.metric("shuntyard_prefilled_ahead_tokens_total") > ahead
    ahead = live.metric("shuntyard_prefilled_ahead_tokens_total")
    assert cached_share("a volcano", "{{ nodes.draft.output.text | trim }}") < 0.3
    assert live.metric("shuntyard_prefilled_ahead_tokens_total") == ahead


def test_a_function_of_the_operator_works_on_what_the_model_said(live: LiveServer) -> None:
    text = "{{ nodes.a.output.text }}"
    nodes = [
        llm("a", "Say something."),
        {"id": "b", "op": "python", "params": {"function": "backwards", "args": {"text": text}}},
    ]
    run = live.http.post(PATH, json={"nodes": nodes}, timeout=120).json()
    assert run["outputs"]["b"]["value"] == run["nodes"]["a"]["output"]["text"][::-1]
