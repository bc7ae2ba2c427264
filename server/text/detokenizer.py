"""Token ids to text, piece by piece: whole characters only, and no bad byte breaks it."""

from __future__ import annotations

from collections.abc import Sequence

from server.text.tokenizer import ChatTokenizer


class Detokenizer:
    """The text of one output. Incomplete characters wait until they are complete."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        prompt_token_ids: Sequence[int] | None,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._glue_special = not (skip_special_tokens or spaces_between_special_tokens)
        self._last_was_special = False
        self._stream = tokenizer.decode_stream(
            prompt_token_ids, skip_special_tokens=skip_special_tokens
        )

    def push(self, token_id: int) -> str:
        """Text that this token completes; often a word, sometimes nothing."""
        text = self._step(token_id)
        if self._glue_special:
            added = self._tokenizer.added.get(token_id)
            if added is not None and self._last_was_special:
                text = added
            self._last_was_special = added is not None
        return text

    def push_many(self, token_ids: list[int]) -> str:
        """The same for several tokens at once; cheaper than one by one."""
        return "".join([self.push(token_id) for token_id in token_ids])

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer.rust, token_id) or ""
        except (OverflowError, TypeError):
            return ""
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            # A sequence whose text changes in hindsight (invalid UTF-8): start afresh here.
            self._stream = self._tokenizer.decode_stream(
                skip_special_tokens=self._skip_special_tokens
            )
            return self._stream.step(self._tokenizer.rust, token_id) or ""
