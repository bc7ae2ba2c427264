"""Log probabilities in the three shapes that clients know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.text.assembler import TokenEntry
from server.text.tokenizer import ChatTokenizer
from spot.generation import TokenLogprobs

FLOOR = -9999.0


def floored(logprob: float) -> float:
    """JSON has no infinity; clients expect this number for 'impossible'."""
    return logprob if logprob > FLOOR else FLOOR


class LogprobFormatter:
    """Formats entries of one request. as_ids: tokens are written `token_id:N`."""

    def __init__(self, tokenizer: ChatTokenizer, *, num_top: int, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids

    def _shown(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def _actual(self, entry: TokenEntry) -> str:
        """What the token added to the text, so that the tokens joined are the text."""
        if self._as_ids or entry.token_id in self._tokenizer.added or not entry.text:
            hidden_part = not self._as_ids and entry.token_id not in self._tokenizer.added
            return "" if hidden_part else self._shown(entry.token_id)
        return entry.text

    def _bytes(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token_id))

    def _top(self, logprobs: TokenLogprobs) -> list[tuple[int, float]]:
        pairs = list(zip(logprobs.token_ids[1:], logprobs.logprobs[1:], strict=True))
        return pairs if self._num_top < 0 else pairs[: self._num_top]

    def chat(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        """`choices[].logprobs` of a chat answer."""
        content = []
        for entry in entries:
            top = [
                {
                    "token": self._actual(entry) if t == entry.token_id else self._shown(t),
                    "logprob": floored(p),
                    "bytes": self._bytes(t),
                }
                for t, p in self._top(entry.logprobs)
            ]
            content.append(
                {
                    "token": self._actual(entry),
                    "logprob": floored(entry.logprobs.logprobs[0]),
                    "bytes": self._bytes(entry.token_id),
                    "top_logprobs": top,
                }
            )
        return {"content": content, "refusal": None}

    def completion(
        self, entries: Sequence[TokenEntry | tuple[int, str]], *, offset: int
    ) -> tuple[dict[str, Any], int]:
        """`choices[].logprobs` of a text completion, and the offset after it.

        A bare (id, text) stands for the first echoed token, which has no log probability.
        """
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in entries:
            offsets.append(offset)
            if isinstance(entry, tuple):
                token_id, text = entry
                tokens.append(self._shown(token_id) if self._as_ids else text)
                token_logprobs.append(None)
                top_logprobs.append(None)
                offset += len(text)
                continue
            shown = self._actual(entry)
            tokens.append(shown)
            offset += len(entry.text)
            actual = floored(entry.logprobs.logprobs[0])
            token_logprobs.append(actual)
            top = {shown: actual}  # first, as vLLM has it
            for t, p in self._top(entry.logprobs):
                if t != entry.token_id:
                    top.setdefault(self._shown(t), floored(p))
            top_logprobs.append(top)
        block = {
            "text_offset": offsets,
            "token_logprobs": token_logprobs,
            "tokens": tokens,
            "top_logprobs": top_logprobs,
        }
        return block, offset

    def prompt(self, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: per position a map from token id to its figures, the token of
        the prompt first."""
        result: list[dict[str, Any] | None] = []
        for entry in entries:
            if entry is None:
                result.append(None)
                continue
            actual = entry.token_ids[0]
            figures = {str(actual): self._figure(actual, entry.logprobs[0], entry.rank)}
            ranked = enumerate(zip(entry.token_ids[1:], entry.logprobs[1:], strict=True), start=1)
            for rank, (token_id, logprob) in ranked:
                figures.setdefault(str(token_id), self._figure(token_id, logprob, rank))
            result.append(figures)
        return result

    def _figure(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        token = self._tokenizer.token_text(token_id)
        return {"logprob": floored(logprob), "rank": rank, "decoded_token": token}
