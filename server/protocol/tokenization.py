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
    """A served name; without one the server's main model."""
    prompt: str | None = None
    """Text to encode."""
    messages: list[Message] | None = Field(
        default=None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True
    )
    """A conversation, rendered by the chat template."""
    tools: list[Tool] | None = Field(default=None, fail_fast=True)
    """Functions for the chat template."""
    add_special_tokens: bool | None = None
    """Add special tokens; by default to text only."""
    add_generation_prompt: bool | None = None
    """Let the template open the answer's turn."""
    continue_final_message: bool | None = False
    """Leave the last message open instead."""
    return_token_strs: bool | None = False
    """Answer with each token as text as well."""
    chat_template: str | None = None
    """A template for this request; needs `--trust-request-chat-template`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments for the chat template."""


class DetokenizeRequest(RequestBody):
    """Token ids to text."""

    model: str | None = None
    """A served name; without one the server's main model."""
    tokens: list[TokenId] = Field(fail_fast=True)
    """Token ids to decode."""
