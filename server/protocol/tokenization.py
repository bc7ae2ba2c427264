"""Bodies of `POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from server.protocol.base import RequestBody
from server.protocol.chat import MAX_MESSAGES, Message, Tool
from server.protocol.sampling import TokenId


class TokenizeRequest(RequestBody):
    """Text (`prompt`) or a conversation (`messages`) to token ids; exactly one of the two."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(
        default=None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True
    )
    tools: list[Tool] | None = Field(default=None, fail_fast=True)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    return_token_strs: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(RequestBody):
    """Token ids to text."""

    model: str | None = None
    tokens: list[TokenId] = Field(fail_fast=True)
