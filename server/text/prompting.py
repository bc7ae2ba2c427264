"""Prompt text to token ids and back, off the event loop when it is long."""

from __future__ import annotations

import anyio.to_thread

from server.gateway import ServedModel
from server.protocol.sampling import Truncation
from server.sampling import context_exceeded
from server.text.tokenizer import ChatTokenizer
from spot.errors import InvalidRequest

# Above this, encoding takes long enough (about 5 ms) to be felt by other streams.
LONG_TEXT_CHARS = 16_384


async def encode_prompt(
    model: ServedModel,
    text: str,
    *,
    add_special_tokens: bool,
    truncation: Truncation | None = None,
    param: str,
) -> list[int]:
    """Token ids of a prompt.

    Raises ContextLengthExceeded, without encoding, for text that no tokenizer could make fit.
    """
    limit = model.max_model_len
    if truncation is None and len(text) > limit * model.tokenizer.max_token_chars:
        raise context_exceeded(limit, None, param)
    ids = await encode_text(model.tokenizer, text, add_special_tokens=add_special_tokens)
    return check_prompt(model, ids, truncation=truncation, param=param)


async def encode_text(
    tokenizer: ChatTokenizer, text: str, *, add_special_tokens: bool
) -> list[int]:
    """Token ids of a text of any length. Raises InvalidRequest for text that is not Unicode."""
    if len(text) <= LONG_TEXT_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await anyio.to_thread.run_sync(
        lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens)
    )


async def decode_ids(tokenizer: ChatTokenizer, ids: list[int]) -> str:
    """The text of token ids, however many."""
    if len(ids) <= LONG_TEXT_CHARS:
        return tokenizer.decode(ids)
    return await anyio.to_thread.run_sync(tokenizer.decode, ids)


def check_prompt(
    model: ServedModel, ids: list[int], *, truncation: Truncation | None, param: str
) -> list[int]:
    """The ids, truncated as asked.

    Raises InvalidRequest for an empty prompt or a truncation over the limit.
    """
    limit = model.max_model_len
    if truncation is not None:
        if truncation.max_tokens > limit:
            raise InvalidRequest(
                f"truncate_prompt_tokens ({truncation.max_tokens}) is over the context length "
                f"({limit}).",
                param="truncate_prompt_tokens",
            )
        keep = limit - 1 if truncation.max_tokens < 0 else truncation.max_tokens
        if keep < len(ids):
            ids = ids[:keep] if truncation.side == "right" else ids[len(ids) - keep :]
    if not ids:
        raise InvalidRequest("The prompt is empty.", param=param)
    return ids
