"""Token ids to text, piece by piece: whole characters only, and no bad byte breaks it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from server.text.tokenizer import ChatTokenizer

# A character has at most four bytes, so tokens that wait for longer than this wait for nothing.
MAX_HELD_TOKENS = 32

_INVALID_PREFIX = "Invalid prefix"
_REPLACEMENT = "\ufffd"


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
        self._held: list[int] = []
        # Of the prompt: what stands before an incomplete character in the tokens that hold it.
        self._prompts_own = ""
        self._stream = self._started(list((prompt_token_ids or ())[-8:]))

    def push(self, token_id: int) -> str:
        """Text that this token completes; often a word, sometimes nothing."""
        if self._skip_special_tokens and token_id in self._tokenizer.special_ids:
            return ""  # the stream would skip it too, but keep it and read it again each time
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
            text = self._stream.step(self._tokenizer.rust, token_id)
        except (OverflowError, TypeError):
            return ""
        except Exception as error:
            if _INVALID_PREFIX not in str(error):
                raise
            # A sequence whose text changes in hindsight (invalid UTF-8): start afresh here.
            self._stream = self._fresh()
            self._prompts_own = ""
            text = self._stream.step(self._tokenizer.rust, token_id)
        if text is not None:
            if self._held:
                self._held.clear()
            if self._prompts_own:
                text, self._prompts_own = text.removeprefix(self._prompts_own), ""
            return text
        self._held.append(token_id)
        return self._give_up() if len(self._held) >= MAX_HELD_TOKENS else ""

    def _give_up(self) -> str:
        """The text of what was held, incomplete as it is."""
        skip = self._skip_special_tokens
        text = self._tokenizer.decode(self._held, skip_special_tokens=skip)
        self._held.clear()
        self._stream = self._fresh()
        self._prompts_own = ""
        return text

    def _fresh(self) -> DecodeStream:
        return self._tokenizer.decode_stream(skip_special_tokens=self._skip_special_tokens)

    def _started(self, prompt_end: list[int]) -> DecodeStream:
        """A stream that continues after the prompt.

        Started with ids whose text is incomplete, `DecodeStream` gives the prompt out again. So a
        prompt that ends inside a character is pushed through it; one that ends with a replacement
        character of its own, or whose text changes in hindsight, is left out.
        """
        skip = self._skip_special_tokens
        if not self._tokenizer.decode(prompt_end, skip_special_tokens=skip).endswith(_REPLACEMENT):
            return self._tokenizer.decode_stream(prompt_end, skip_special_tokens=skip)
        stream = self._fresh()
        characters = codecs.getincrementaldecoder("utf-8")("replace")
        characters.decode(b"".join(map(self._tokenizer.token_bytes, prompt_end)))
        if characters.getstate()[0]:
            held: list[int] = []
            try:
                for token_id in prompt_end:
                    is_held = stream.step(self._tokenizer.rust, token_id) is None
                    held = [*held, token_id] if is_held else []
                own = self._tokenizer.decode(held, skip_special_tokens=skip)
                self._prompts_own = own.rstrip(_REPLACEMENT)
            except Exception as error:
                if _INVALID_PREFIX not in str(error):
                    raise
                return self._fresh()
        return stream
