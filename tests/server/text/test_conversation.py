"""Messages as chat templates expect them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from server.protocol.chat import Message, Tool
from server.text.conversation import template_messages, template_tools
from server.text.tokenizer import ChatTokenizer
from spot.errors import InvalidRequest, NotSupported

MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(list[Message])


def converted(*messages: dict[str, Any], knows_developer: bool = False) -> list[dict[str, Any]]:
    parsed = MESSAGES.validate_python(list(messages))
    return template_messages(parsed, knows_developer=knows_developer)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}} | (
        fields
    )


def test_plain_messages_stay_as_they_are() -> None:
    messages = [
        {"role": "system", "content": "s"},
        user("u"),
        {"role": "assistant", "content": "a"},
    ]
    assert converted(*messages) == messages


def test_a_developer_message_is_kept_where_the_template_knows_the_role() -> None:
    messages = [{"role": "developer", "content": "d"}, user("u")]
    assert converted(*messages, knows_developer=True) == messages


def test_a_developer_message_becomes_the_one_system_message_at_the_front() -> None:
    messages = [
        user("u"),
        {"role": "developer", "content": "d"},
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        user("v"),
    ]
    assert converted(*messages) == [{"role": "system", "content": "d\n\ns"}, user("u"), user("v")]


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert converted(user(parts))[0]["content"] == "a\nb"
    assert converted(user([{"type": "text", "text": "a"}])) == converted(user("a"))


def test_refusals_and_thinking_of_the_history_are_text() -> None:
    parts = [{"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "hm"}]
    message = {"role": "assistant", "content": parts}
    assert converted(message)[0]["content"] == "no\nhm"
    assert converted({"role": "assistant", "refusal": "no"})[0]["content"] == "no"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", "input_image"])
def test_media_is_not_supported_and_named(kind: str) -> None:
    with pytest.raises(NotSupported, match=kind) as caught:
        converted(user("x"), user([{"type": "text", "text": "a"}, {"type": kind, kind: {}}]))
    assert caught.value.param == "messages.1.content.1.type"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"x": 1}', {"x": 1}),
        ({"x": 1}, {"x": 1}),
        ("", {}),
        (None, {}),
        ("nonsense", {}),
        ("[1]", {}),
        ('"text"', {}),
        ("{", {}),
    ],
)
def test_arguments_of_the_history_become_an_object(arguments: Any, expected: Any) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
    (result,) = converted(message)
    assert result["content"] == ""
    assert result["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": expected}}
    ]


def test_empty_tool_calls_are_dropped() -> None:
    message = {"role": "assistant", "content": "a", "tool_calls": []}
    assert converted(message) == [{"role": "assistant", "content": "a"}]


def test_the_old_function_roles_are_tools() -> None:
    messages = [
        user("u"),
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "42"},
    ]
    _, assistant, function = converted(*messages)
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert function == {"role": "tool", "content": "42", "name": "f"}


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_of_the_history_is_there_under_both_names(field: str) -> None:
    (result,) = converted({"role": "assistant", "content": "a", field: "because"})
    assert result["reasoning"] == result["reasoning_content"] == "because"


def test_two_trailing_assistant_turns_are_refused() -> None:
    turn = {"role": "assistant", "content": "a"}
    with pytest.raises(InvalidRequest) as caught:
        converted(user("u"), turn, turn)
    assert caught.value.param == "messages.2"
    assert len(converted(user("u"), turn, user("u"), turn)) == 4


def test_the_request_is_not_changed() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [call('{"x": 1}')]}]
    parsed = MESSAGES.validate_python(messages)
    before = MESSAGES.dump_python(parsed)
    first = template_messages(parsed, knows_developer=False)
    first[0]["tool_calls"][0]["function"]["arguments"]["x"] = 2
    assert template_messages(parsed, knows_developer=False) != first
    assert MESSAGES.dump_python(parsed) == before


def test_tools_are_dicts_without_absent_fields() -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "strict": None}})
    assert template_tools([tool]) == [{"type": "function", "function": {"name": "f"}}]
    assert template_tools(None) is None
    assert template_tools([]) is None


def test_the_demo_template_takes_all_of_it(tokenizer: ChatTokenizer) -> None:
    messages = converted(
        {"role": "developer", "content": "d"},
        user("u"),
        {"role": "assistant", "content": None, "tool_calls": [call("{}")]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    )
    text = tokenizer.render_chat(messages)
    assert text.startswith("<|im_start|>system\nd<|im_end|>\n<|im_start|>user\nu<|im_end|>\n")
    assert text.endswith("<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n")
