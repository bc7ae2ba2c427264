"""Items as a conversation."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from server.text.items import items_of_json, messages_of, stored_form
from spot.errors import InvalidRequest, NotSupported

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def messages(*items: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    return messages_of(items_of_json(orjson.dumps(items)), **options)


def test_messages_keep_their_roles() -> None:
    assert messages(
        {"role": "system", "content": "a"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"role": "developer", "content": "d"},
    ) == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "developer", "content": "d"},
    ]


def test_what_the_model_said_in_one_turn_is_one_message() -> None:
    second = {**CALL, "call_id": "c2"}
    assert messages(THOUGHT, {"role": "assistant", "content": "well"}, CALL, second) == [
        {
            "role": "assistant",
            "content": "well",
            "reasoning": "hm",
            "tool_calls": [TOOL_CALL, {**TOOL_CALL, "id": "c2"}],
        }
    ]


def test_the_result_of_a_call_is_a_tool_message() -> None:
    parts = {**RESULT, "output": [{"type": "input_text", "text": "42"}]}
    for result in (RESULT, parts):
        assert messages(CALL, result) == [
            {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ]


def test_a_result_without_its_call_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        messages(CALL, {**RESULT, "call_id": "other"})
    assert caught.value.param == "input.1.call_id"


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user", "content": [{"type": "input_image"}]}, "input.1.content.0.type"),
        ({**RESULT, "output": [{"type": "input_image"}]}, "input.1.output.0.type"),
    ],
)
def test_media_is_refused_by_its_place_in_the_request(item: dict[str, Any], param: str) -> None:
    with pytest.raises(NotSupported) as caught:
        messages({"role": "user", "content": "earlier"}, CALL, item, num_earlier=1)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
        CALL,
        RESULT,
        {**RESULT, "output": [{"type": "input_text", "text": "42"}]},
        THOUGHT,
        {**THOUGHT, "summary": [{"type": "summary_text", "text": "s"}], "content": None},
    ],
    ids=str,
)
def test_stored_items_mean_the_same(item: dict[str, Any]) -> None:
    (parsed,) = items_of_json(orjson.dumps([item]))
    stored = stored_form(parsed)
    assert stored["id"]
    (again,) = items_of_json(orjson.dumps([stored]))
    assert stored_form(again) == stored
    assert messages_of([*items_of_json(orjson.dumps([CALL])), again]) == messages(CALL, item)


def test_an_id_is_kept() -> None:
    (parsed,) = items_of_json(orjson.dumps([{**CALL, "id": "fc_mine", "status": "incomplete"}]))
    stored = stored_form(parsed)
    assert (stored["id"], stored["status"]) == ("fc_mine", "incomplete")
