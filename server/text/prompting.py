"""Prompt text to token ids, off the event loop when it is long."""

from __future__ import annotations

import anyio.to_thread

from server.gateway import ServedModel
from server.sampling import context_exceeded
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
    if len(text) > LONG_TEXT_CHARS:
        ids = await anyio.to_thread.run_sync(
            lambda: model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )
    else:
        ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return check_prompt(model, ids, truncate_to=truncate_to, param=param)


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
