"""A request's messages as chat templates expect them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from server.protocol.chat import (
    AssistantMessage,
    Content,
    FunctionMessage,
    MediaPart,
    Message,
    RefusalPart,
    TextPart,
    ThinkingPart,
    Tool,
    ToolCall,
    ToolMessage,
)
from spot.errors import InvalidRequest, NotSupported

logger = logging.getLogger(__name__)

PART_SEPARATOR = "\n"


def template_messages(
    messages: Sequence[Message], *, knows_developer: bool
) -> list[dict[str, Any]]:
    """The conversation as plain dicts with string content.

    A developer message becomes a system message where the template does not know the role; then
    all system messages are joined at the front, since such templates expect one.
    Raises InvalidRequest (media on a text model, two trailing assistant turns).
    """
    _check_order(messages)
    converted = [_message(message, f"messages.{i}") for i, message in enumerate(messages)]
    if not knows_developer and any(item["role"] == "developer" for item in converted):
        for item in converted:
            if item["role"] == "developer":
                item["role"] = "system"
        return _system_first(converted)
    return converted


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tool definitions as dicts, without absent fields."""
    if not tools:
        return None
    return [tool.model_dump(exclude_none=True) for tool in tools]


def _check_order(messages: Sequence[Message]) -> None:
    if len(messages) < 2:
        return
    if isinstance(messages[-1], AssistantMessage) and isinstance(messages[-2], AssistantMessage):
        raise InvalidRequest(
            "A conversation cannot end with two assistant messages.",
            param=f"messages.{len(messages) - 1}",
        )


def _system_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system = [item["content"] for item in messages if item["role"] == "system"]
    rest = [item for item in messages if item["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(system)}, *rest]


def _message(message: Message, path: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "role": message.role,
        "content": text_of(message.content, f"{path}.content"),
    }
    if message.name is not None:
        result["name"] = message.name
    if isinstance(message, AssistantMessage):
        if message.tool_calls:
            result["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
        elif message.function_call:
            call = ToolCall(id="call_0", function=message.function_call)
            result["tool_calls"] = [_tool_call(call)]
        reasoning = message.reasoning or message.reasoning_content
        if reasoning:
            result["reasoning"] = result["reasoning_content"] = reasoning
        if not result["content"] and message.refusal:
            result["content"] = message.refusal
    elif isinstance(message, ToolMessage):
        if message.tool_call_id is not None:
            result["tool_call_id"] = message.tool_call_id
    elif isinstance(message, FunctionMessage):
        result["role"] = "tool"
    return result


def text_of(content: Content | None, path: str) -> str:
    """The text of a message. Raises NotSupported for media, with the part's path."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for position, part in enumerate(content):
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, RefusalPart):
            texts.append(part.refusal)
        elif isinstance(part, ThinkingPart):
            texts.append(part.thinking)
        elif isinstance(part, MediaPart):
            raise NotSupported(
                f"This model reads text only; a part of type '{part.type}' cannot be used.",
                param=f"{path}.{position}.type",
            )
    return PART_SEPARATOR.join(texts)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id or "", "type": "function", "function": function}


def _arguments(arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    """Templates want an object. What is not one becomes `{}`: the conversation can go on."""
    if isinstance(arguments, dict):
        return arguments
    if not arguments:
        return {}
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        logger.warning("tool call arguments in the history are not a JSON object; using {}")
        return {}
    return value
