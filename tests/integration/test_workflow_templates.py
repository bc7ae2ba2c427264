"""The workflow templates that ship, and stored ones, on the real models, Postgres and a search."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.live_server import LiveServer
from tests.search_engine import PAGES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PATH = "/v1/workflow-templates"
FACTS = [text for _, text in PAGES]
SHIPPED = ["map-reduce-summary", "rag", "rag-rerank", "tool-agent", "web-search-agent"]
SHORT = {"max_tokens": 16}


@pytest.fixture(scope="module")
def facts(live: LiveServer) -> str:
    """A collection with a few passages."""
    params = {"collection": "template-facts", "documents": FACTS}
    node = {"id": "n", "op": "ingest", "params": params}
    run = live.http.post("/v1/workflows", json={"nodes": [node]}, timeout=120).json()
    assert run["status"] == "completed", run
    return "template-facts"


def run_template(live: LiveServer, name: str, **inputs: Any) -> dict[str, Any]:
    body = {"workflow": name, "inputs": inputs}
    answer = live.http.post("/v1/workflows", json=body, timeout=240)
    run: dict[str, Any] = answer.json()
    assert answer.status_code == 200, run
    assert run["status"] == "completed", run["error"]
    assert run["outputs"]["answer"], run["outputs"]
    return run


def test_what_ships_is_listed(live: LiveServer) -> None:
    cards = live.http.get(PATH).json()["data"]
    assert [card["name"] for card in cards if card["version"] == 0] == SHIPPED
    assert all(card["description"] for card in cards)


@pytest.mark.parametrize("name", ["rag", "rag-rerank"])
def test_rag_answers_from_the_collection(live: LiveServer, facts: str, name: str) -> None:
    question = "What is the capital of France?"
    run = run_template(live, name, question=question, collection=facts, top_k=2, **SHORT)
    assert len(run["outputs"]["sources"]) == 2
    assert FACTS[0] in str(run["outputs"]["sources"][0])
    assert "Paris" in run["outputs"]["answer"]


def test_the_search_agent_searches_and_names_its_sources(live: LiveServer) -> None:
    run = run_template(
        live, "web-search-agent", question="Where is Paris?", max_searches=2, **SHORT
    )
    assert 1 <= run["outputs"]["searches"] <= 2
    assert {one["title"] for one in run["outputs"]["sources"]} == {title for title, _ in PAGES}


def test_a_long_text_is_summarised_piece_by_piece(live: LiveServer) -> None:
    text = "\n\n".join(FACTS * 4)
    run = run_template(
        live, "map-reduce-summary", text=text, piece_size=300, piece_max_tokens=24, **SHORT
    )
    assert run["nodes"]["parts"]["output"]["rounds"] >= 1
    num_prompt = run["usage"]["prompt_tokens"]
    assert num_prompt > run["nodes"]["summary"]["usage"]["prompt_tokens"] * 2


def test_the_tool_agent_calls_tools_until_it_has_done(live: LiveServer, facts: str) -> None:
    run = run_template(
        live, "tool-agent", question="What do cats do?", collection=facts, max_steps=2, **SHORT
    )
    assert 1 <= run["outputs"]["steps"] <= 2
    messages = run["nodes"]["work"]["output"]["outputs"]["messages"]
    assert messages[0] == {"role": "user", "content": "What do cats do?"}
    for call, result in zip(messages[1::2], messages[2::2], strict=True):
        assert result["tool_call_id"] == call["tool_calls"][0]["id"]


def test_any_chat_client_runs_a_template(live: LiveServer, facts: str) -> None:
    client = live.openai()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    more = {"inputs": {"collection": facts}}
    options: Any = {"model": "workflow:rag", "messages": question, "max_tokens": 16}
    whole = client.chat.completions.create(**options, temperature=0, extra_body=more)
    content = whole.choices[0].message.content
    assert content
    assert "Paris" in content
    assert whole.usage
    assert whole.usage.completion_tokens <= 16
    chunks = list(
        client.chat.completions.create(
            **options,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=more,
        )
    )
    deltas = [one.choices[0].delta.content for one in chunks if one.choices]
    assert "".join(filter(None, deltas)) == content
    assert sum(bool(delta) for delta in deltas) > 2
    assert chunks[-1].usage
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_stored_template_is_run_by_name_and_by_version(live: LiveServer) -> None:
    def document(text: str) -> dict[str, Any]:
        return {"nodes": [{"id": "a", "op": "template", "params": {"value": {"text": text}}}]}

    def answer(name: str) -> str:
        body = {"model": f"workflow:{name}", "messages": [{"role": "user", "content": "?"}]}
        message = live.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        return str(message["content"])

    versions = [
        live.http.put(f"{PATH}/mine", json=document(text)).json()["version"]
        for text in ("one", "two", "two")
    ]
    assert versions == [versions[0], versions[0] + 1, versions[0] + 1]
    assert "workflow:mine" in [model.id for model in live.openai().models.list()]
    assert answer("mine") == '{"value":{"text":"two"}}'
    assert answer(f"mine@{versions[0]}") == '{"value":{"text":"one"}}'
    assert live.http.delete(f"{PATH}/mine").json()["deleted"]
    assert live.http.get(f"{PATH}/mine").status_code == 404
    assert live.http.delete(f"{PATH}/mine").status_code == 404
