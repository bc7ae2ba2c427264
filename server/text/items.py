"""Items of the Responses API as a conversation, and as they are stored."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from server.protocol.chat import Content, RefusalPart, ThinkingPart
from server.protocol.responses_api import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
)
from server.text.conversation import PART_SEPARATOR, text_of
from spot.errors import InvalidRequest

JsonObject = dict[str, Any]
KnownItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem

_items = TypeAdapter(list[Item])


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def items_of_json(data: bytes) -> list[Any]:
    """Items from their stored form."""
    return _items.validate_json(data)


def messages_of(items: Sequence[KnownItem], *, num_earlier: int = 0) -> list[JsonObject]:
    """The conversation as messages of a chat request.

    What the model said in one turn (reasoning, text, calls) becomes one message.
    num_earlier: so many of the items are not the request's own; paths in errors count without them.
    Raises InvalidRequest (media on a text model, an output without its call).
    """
    messages: list[JsonObject] = []
    thoughts: list[str] = []
    call_ids: set[str] = set()
    for position, item in enumerate(items):
        path = f"input.{position - num_earlier}"
        if isinstance(item, ReasoningItem):
            thoughts.append(_reasoning_text(item))
        elif isinstance(item, FunctionCallItem):
            call_ids.add(item.call_id)
            turn = _assistant_turn(messages, thoughts)
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        elif isinstance(item, FunctionCallOutputItem):
            if item.call_id not in call_ids:
                raise InvalidRequest(
                    f"There is no function call with call_id '{item.call_id[:64]}' before this "
                    "output.",
                    param=f"{path}.call_id",
                )
            text = text_of(item.output, f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        elif item.role == "assistant":
            turn = _assistant_turn(messages, thoughts)
            turn["content"] = _joined(turn["content"], text_of(item.content, f"{path}.content"))
        else:
            text = text_of(item.content, f"{path}.content")
            messages.append({"role": item.role, "content": text})
    return messages


def _assistant_turn(messages: list[JsonObject], thoughts: list[str]) -> JsonObject:
    """The model's message at the end, begun if need be, with the thoughts before it."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    turn = messages[-1]
    if thoughts:
        turn["reasoning"] = _joined(turn.get("reasoning", ""), PART_SEPARATOR.join(thoughts))
        thoughts.clear()
    return turn


def _joined(before: str, after: str) -> str:
    return before + PART_SEPARATOR + after if before and after else before or after


def _reasoning_text(item: ReasoningItem) -> str:
    return PART_SEPARATOR.join(part.text for part in item.content or item.summary or [])


def stored_form(item: KnownItem) -> JsonObject:
    """The item as the API shows it, with an id."""
    if isinstance(item, MessageItem):
        return {
            "id": item.id or new_id("msg"),
            "type": "message",
            "status": item.status or "completed",
            "role": item.role,
            "content": _parts(item.content, "output" if item.role == "assistant" else "input"),
        }
    if isinstance(item, FunctionCallItem):
        return {
            "id": item.id or new_id("fc"),
            "type": "function_call",
            "status": item.status or "completed",
            "call_id": item.call_id,
            "name": item.name,
            "arguments": item.arguments,
        }
    if isinstance(item, FunctionCallOutputItem):
        output = item.output
        return {
            "id": item.id or new_id("fco"),
            "type": "function_call_output",
            "status": item.status or "completed",
            "call_id": item.call_id,
            "output": output if isinstance(output, str) else _parts(output, "input"),
        }
    return {
        "id": item.id or new_id("rs"),
        "type": "reasoning",
        "status": item.status or "completed",
        "summary": [{"type": "summary_text", "text": part.text} for part in item.summary or []],
        "content": [{"type": "reasoning_text", "text": part.text} for part in item.content or []],
    }


def _parts(content: Content, kind: str) -> list[JsonObject]:
    if isinstance(content, str):
        return [_text_part(content, kind)]
    parts: list[JsonObject] = []
    for part in content:
        if isinstance(part, RefusalPart) and kind == "output":
            parts.append({"type": "refusal", "refusal": part.refusal})
        elif isinstance(part, RefusalPart):
            parts.append(_text_part(part.refusal, kind))
        elif isinstance(part, ThinkingPart):
            parts.append(_text_part(part.thinking, kind))
        else:
            parts.append(_text_part(getattr(part, "text", ""), kind))
    return parts


def _text_part(text: str, kind: str) -> JsonObject:
    if kind == "input":
        return {"type": "input_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": []}
