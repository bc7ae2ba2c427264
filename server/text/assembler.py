"""One choice of an answer, assembled from token deltas: text, parsed parts, logprobs, finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from server.text.detokenizer import Detokenizer
from server.text.stop_strings import StopStrings
from spot.generation import FinishReason, TokenDelta, TokenLogprobs
from spot.parsed import OutputParser, ToolCallDelta


@dataclass(slots=True)
class TokenEntry:
    """One output token with its log probabilities. `text` is what the token added to the text."""

    token_id: int
    text: str
    logprobs: TokenLogprobs


@dataclass(slots=True)
class Piece:
    """What one delta adds to a choice.

    token_ids: all of them, as they are counted. shown_ids, entries: without those of reasoning that
        is hidden.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    shown_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class ChoiceAssembler:
    """Turns one generation's deltas into pieces.

    Stop strings look at visible content only: not at reasoning, not at tool calls. The token that
    completes a stop string is the last one that counts, however many came in the same delta.

    hide_reasoning: ids and log probabilities of tokens that became reasoning are left out, too.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        parser: OutputParser | None = None,
        hide_reasoning: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include=include_stop) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._parser = parser
        self._hide_reasoning = hide_reasoning and parser is not None
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.called_tools = False

    def push(self, delta: TokenDelta) -> Piece:
        """The piece that a delta makes. After a piece with a finish reason nothing may follow."""
        piece = Piece(finish_reason=delta.finish_reason, stop_reason=delta.stop_token_id)
        hidden = int(
            delta.finish_reason == "stop" and not self._include_stop and bool(delta.token_ids)
        )
        if self._stops is None and delta.logprobs is None and not self._hide_reasoning:
            self._push_all(piece, delta.token_ids, hidden)
        else:
            self._push_each(piece, delta, hidden)
        if (
            self._stops is not None
            and piece.finish_reason
            and not isinstance(piece.stop_reason, str)
        ):
            piece.content += self._stops.flush()
        self.num_tokens += len(piece.token_ids)
        self.finish_reason = piece.finish_reason
        self.called_tools = self.called_tools or bool(piece.tool_calls)
        return piece

    def _push_all(self, piece: Piece, token_ids: list[int], hidden: int) -> None:
        visible = token_ids[: len(token_ids) - hidden] if hidden else token_ids
        text = self._detokenizer.push_many(visible)
        piece.token_ids = piece.shown_ids = token_ids
        self._parse(piece, text, token_ids, finished=piece.finish_reason is not None)

    def _push_each(self, piece: Piece, delta: TokenDelta, hidden: int) -> None:
        last = len(delta.token_ids) - 1
        if delta.logprobs is not None:
            piece.entries = []
        for position, token_id in enumerate(delta.token_ids):
            is_hidden = hidden and position == last
            text = "" if is_hidden else self._detokenizer.push(token_id)
            piece.token_ids.append(token_id)
            finished = position == last and delta.finish_reason is not None
            num_reasoning = len(piece.reasoning)
            is_over = self._parse(piece, text, [token_id], finished=finished)
            if not (self._hide_reasoning and len(piece.reasoning) > num_reasoning):
                piece.shown_ids.append(token_id)
                if piece.entries is not None and delta.logprobs is not None:
                    piece.entries.append(TokenEntry(token_id, text, delta.logprobs[position]))
            if is_over:
                return
        if not delta.token_ids:
            self._parse(piece, "", [], finished=delta.finish_reason is not None)

    def _parse(self, piece: Piece, text: str, token_ids: list[int], *, finished: bool) -> bool:
        """Sort text into the piece; True if a stop string ended the choice."""
        content = text
        if self._parser is not None:
            parsed = self._parser.feed(text, token_ids, finished)
            content = parsed.content
            piece.reasoning += parsed.reasoning
            piece.tool_calls += parsed.tool_calls
        if self._stops is None or self.num_tokens + len(piece.token_ids) <= self._min_tokens:
            piece.content += content
            return False
        match = self._stops.push(content)
        piece.content += match.text
        if match.stop is None:
            return False
        piece.finish_reason, piece.stop_reason = "stop", match.stop
        return True
