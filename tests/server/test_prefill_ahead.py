"""Prompts that are read ahead, on the scripted engine: what it is asked to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from server.prefill_ahead import PrefillAhead
from spot.generation import Generation
from tests.harness import Server, demo_tokenizer, serving

PATH = "/v1/workflows"
STORY = "".join(
    f"Wagon {number} rolls unforgettably down the hump, onto its own track. "
    for number in range(27)
)
BLOCK = 16


def script(generation: Generation) -> Sequence[int]:
    """A story, for whoever asks for one."""
    tokenizer = demo_tokenizer()
    is_story = "a story" in tokenizer.decode(generation.prompt_token_ids[:60])
    return tokenizer.encode(STORY if is_story else "Fine.", add_special_tokens=False)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(script) as server:
        server.gateway.prefills_ahead = True
        yield server


def llm(node_id: str, prompt: str, **params: Any) -> dict[str, Any]:
    return {"id": node_id, "op": "llm", "params": {"prompt": prompt, **params}}


def prompts(server: Server, *, ahead: bool) -> list[list[int]]:
    return [
        list(one.prompt_token_ids)
        for one in server.engine.submitted
        if one.id.startswith("ahead-") == ahead
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Check this: {{ nodes.draft.output.text }} Is it good?"])
def test_what_is_read_while_a_node_writes_is_how_the_prompt_begins(
    server: Server, prompt: str, stream: bool
) -> None:
    nodes = [llm("draft", "Tell a story.", stream=stream), llm("check", prompt)]
    run = server.post(PATH, {"nodes": nodes}).json()
    assert run["nodes"]["draft"]["output"]["text"] == STORY
    _, whole = prompts(server, ahead=False)
    read = prompts(server, ahead=True)
    assert len(read) == len(STORY) // 400
    for one, before in zip(read, [[], *read], strict=False):
        assert len(one) >= len(before) + 4 * BLOCK
        assert len(one) % BLOCK == 0
        assert whole[: len(one)] == one
    assert len(read[-1]) > 0.75 * len(whole)
    # The scripted engine finds nothing in a cache.
    assert server.metric("shuntyard_prefilled_ahead_tokens_total") == sum(map(len, read))


@pytest.mark.parametrize(
    "prompt",
    ["Check: {{ nodes.draft.output.text | trim }}", "{{ nodes.draft.output.message.content }}"],
)
def test_what_a_filter_makes_of_a_text_is_not_read_before_it_is_whole(
    server: Server, prompt: str
) -> None:
    run = server.post(PATH, {"nodes": [llm("draft", "Tell a story."), llm("check", prompt)]}).json()
    assert run["status"] == "completed"
    assert prompts(server, ahead=True) == []


def test_a_text_is_read_as_the_node_will_put_it_out() -> None:
    """Without what follows a stop string, and behind an echo of the last message."""
    messages = [
        {"role": "user", "content": "Tell a story."},
        {"role": "assistant", "content": "Once upon a time."},
    ]
    params = {"messages": messages, "echo": True, "add_generation_prompt": False}
    params |= {"stop": ["Wagon 20 rolls"], "stream": True}
    draft = {"id": "draft", "op": "llm", "params": params}
    check = llm("check", "{{ nodes.draft.output.text }}")
    with serving(script) as server:
        server.gateway.prefills_ahead = True
        run = server.post(PATH, {"nodes": [draft, check]}).json()
        text = run["nodes"]["draft"]["output"]["text"]
        assert text == "Once upon a time." + STORY.partition("Wagon 20 rolls")[0]
        _, whole = prompts(server, ahead=False)
        read = prompts(server, ahead=True)
        assert read
        assert all(whole[: len(one)] == one for one in read)
        events = server.http.get(f"{PATH}/{run['id']}/events").text
    assert "Once upon a time." in events.partition("node.completed")[0]


def test_nothing_is_read_while_all_seats_are_taken() -> None:
    with serving(script, max_num_seqs=1) as server:
        server.gateway.prefills_ahead = True
        nodes = [llm("draft", "Tell a story."), llm("check", "{{ nodes.draft.output.text }}")]
        run = server.post(PATH, {"nodes": nodes}).json()
        assert run["status"] == "completed"
        assert prompts(server, ahead=True) == []


def test_equal_beginnings_are_read_once_and_short_ones_not_at_all(server: Server) -> None:
    async def read() -> None:
        ahead = PrefillAhead(server.gateway)
        for num_tokens in (2 * BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 2, 4 * BLOCK, 4 * BLOCK + 2):
            await ahead.read(list(range(num_tokens)), None)
        await ahead.read(list(range(3 * BLOCK)), "salt")

    server.call(read)
    assert [len(one) // BLOCK for one in prompts(server, ahead=True)] == [2, 3, 4, 2]
