"""Prompt text to token ids and back, off the event loop when it is long."""

from __future__ import annotations

import anyio.to_thread

from server.gateway import ServedModel
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
    truncate_to: int | None = None,
    param: str,
) -> list[int]:
    """Token ids of a prompt.

    truncate_to: keep only that many tokens at the end; -1 means the context length.
    Raises ContextLengthExceeded, without encoding, for text that no tokenizer could make fit.
    """
    limit = model.max_model_len
    if truncate_to is None and len(text) > limit * model.tokenizer.max_token_chars:
        raise context_exceeded(limit, None, param)
    ids = await encode_text(model.tokenizer, text, add_special_tokens=add_special_tokens)
    return check_prompt(model, ids, truncate_to=truncate_to, param=param)


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
    model: ServedModel, ids: list[int], *, truncate_to: int | None, param: str
) -> list[int]:
    """The ids, truncated as asked.

    Raises InvalidRequest for an empty prompt or a truncation over the limit.
    """
    limit = model.max_model_len
    if truncate_to is not None:
        if truncate_to > limit:
            raise InvalidRequest(
                f"truncate_prompt_tokens ({truncate_to}) is over the context length ({limit}).",
                param="truncate_prompt_tokens",
            )
        keep = limit - 1 if truncate_to < 0 else truncate_to
        ids = ids[len(ids) - keep :] if 0 < keep < len(ids) else ids if keep else []
    if not ids:
        raise InvalidRequest("The prompt is empty.", param=param)
    return ids
