"""An upstream's answer as token deltas: pure, event by event.

`upstream_protocol` says what was asked for, and where the two endpoints differ.
"""

from __future__ import annotations

import msgspec

from spot.engines.upstream_errors import (
    ErrorBody,
    Malformed,
    constraint_failed,
    error_for,
    status_of,
)
from spot.engines.upstream_protocol import Endpoint
from spot.errors import EngineFailed, ShuntyardError
from spot.generation import FinishReason, Generation, TokenDelta, TokenLogprobs

_END_OF_STREAM = b"[DONE]"
_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
_NEVER = -9999.0


class _TokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _TokensDetails | None = None


class _Figure(msgspec.Struct):
    """A token's log probability; the token's id is a key elsewhere if it is not here."""

    logprob: float | None = None
    rank: int | None = None
    token_id: int = -1


class _Position(_Figure):
    top_logprobs: list[_Figure] = []


class _GenerateLogprobs(msgspec.Struct):
    content: list[_Position] | None = None


class _CompletionLogprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]


class _GenerateChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _GenerateLogprobs | None = None


class _CompletionChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _CompletionLogprobs | None = None
    prompt_logprobs: list[dict[str, _Figure] | None] | None = None


class _GenerateChunk(msgspec.Struct):
    choices: list[_GenerateChoice] = []
    usage: _Usage | None = None
    error: ErrorBody | None = None
    prompt_logprobs: list[dict[str, _Figure] | None] | None = None


class _CompletionChunk(msgspec.Struct):
    choices: list[_CompletionChoice] = []
    usage: _Usage | None = None
    error: ErrorBody | None = None


_DECODERS: dict[Endpoint, msgspec.json.Decoder[_GenerateChunk | _CompletionChunk]] = {
    "generate": msgspec.json.Decoder(_GenerateChunk),
    "completions": msgspec.json.Decoder(_CompletionChunk),
}


class AnswerReader:
    """Reads the answer to one generation, event by event.

    The last delta is held until the upstream has told the usage, which follows at once.
    """

    def __init__(self, generation: Generation, endpoint: Endpoint) -> None:
        self._sampling = generation.sampling
        self._num_prompt_tokens = len(generation.prompt_token_ids)
        self._decoder = _DECODERS[endpoint]
        self._last: TokenDelta | None = None
        self._has_begun = False
        self.is_complete = False

    def read(self, event: bytes) -> TokenDelta | None:
        """The delta that an event brings, if any.

        After the last one `is_complete` is set. Raises InvalidRequest, EngineUnavailable or
        EngineFailed.
        """
        if event == _END_OF_STREAM:
            return self.end()
        try:
            chunk = self._decoder.decode(event)
            if chunk.error is not None:
                raise self._error(chunk.error)
            delta = self._delta(chunk)
        except (msgspec.DecodeError, Malformed) as error:
            raise EngineFailed(f"the upstream sent something else than tokens: {error}") from error
        if delta is not None and delta.finish_reason is not None:
            self._last = delta
        if self._last is not None:
            return self._finish(chunk.usage)
        if delta is not None and delta.token_ids:
            self._has_begun = True
            return delta
        return None

    def end(self) -> TokenDelta:
        """The held last delta, when nothing more comes. Raises EngineFailed if there is none."""
        if self._last is None:
            raise EngineFailed("the upstream's answer ended without a finish reason")
        self.is_complete = True
        return self._last

    def _finish(self, usage: _Usage | None) -> TokenDelta | None:
        """The last delta, once the usage is there."""
        if usage is None:
            return None
        delta = self.end()
        details = usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            delta.num_cached_tokens = min(details.cached_tokens, self._num_prompt_tokens)
        return delta

    def _error(self, error: ErrorBody) -> ShuntyardError:
        status = status_of(error)
        if self._sampling.structured is not None and not self._has_begun and status == 500:
            return constraint_failed()
        return error_for(status, error, is_constrained=self._sampling.structured is not None)

    def _delta(self, chunk: _GenerateChunk | _CompletionChunk) -> TokenDelta | None:
        if not chunk.choices:
            return None
        choice = chunk.choices[0]
        if choice.token_ids is None:
            raise Malformed("no token ids")
        delta = TokenDelta(choice.token_ids)
        if choice.finish_reason is not None:
            _set_finish(delta, choice.finish_reason, choice.stop_reason)
        if self._sampling.logprobs is not None:
            delta.logprobs = _output_logprobs(choice, self._sampling.logprobs)
        if self._sampling.prompt_logprobs is not None:
            found = choice.prompt_logprobs if isinstance(choice, _CompletionChoice) else None
            if isinstance(chunk, _GenerateChunk):
                found = chunk.prompt_logprobs
            delta.prompt_logprobs = _prompt_logprobs(found, self._sampling.prompt_logprobs)
        return delta


def _set_finish(delta: TokenDelta, finish_reason: str, stop_reason: int | str | None) -> None:
    if finish_reason not in _FINISHES:
        raise EngineFailed(f"the upstream ended this generation ({finish_reason[:40]})")
    delta.finish_reason = _FINISHES[finish_reason]
    if delta.finish_reason == "stop" and isinstance(stop_reason, int):
        delta.stop_token_id = stop_reason


def _output_logprobs(
    choice: _GenerateChoice | _CompletionChoice, num_top: int
) -> list[TokenLogprobs]:
    """One entry per token of the choice."""
    token_ids = choice.token_ids or []
    if choice.logprobs is None:
        if token_ids:
            raise Malformed("no log probabilities")
        return []
    if isinstance(choice.logprobs, _GenerateLogprobs):
        entries = [_from_position(position, num_top) for position in choice.logprobs.content or []]
    else:
        entries = _from_completion(token_ids, choice.logprobs, num_top)
    if [entry.token_ids[0] for entry in entries] != token_ids:
        raise Malformed("log probabilities of other tokens than those that came")
    return entries


def _from_position(position: _Position, num_top: int) -> TokenLogprobs:
    top = {figure.token_id: _value(figure.logprob) for figure in position.top_logprobs}
    return _entry(position.token_id, _value(position.logprob), position.rank, top, num_top)


def _from_completion(
    token_ids: list[int], logprobs: _CompletionLogprobs, num_top: int
) -> list[TokenLogprobs]:
    if not len(token_ids) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs):
        raise Malformed("more or fewer log probabilities than tokens")
    entries = []
    for token_id, own, named in zip(
        token_ids, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        top = {_named_id(name): _value(value) for name, value in (named or {}).items()}
        entries.append(_entry(token_id, _value(own), None, top, num_top))
    return entries


def _prompt_logprobs(
    positions: list[dict[str, _Figure] | None] | None, num_top: int
) -> list[TokenLogprobs | None]:
    """One entry per prompt token. The actual token stands first at each position."""
    if positions is None:
        raise Malformed("no prompt log probabilities")
    entries: list[TokenLogprobs | None] = []
    for figures in positions:
        if not figures:
            entries.append(None)
            continue
        top = {_named_id(name): _value(figure.logprob) for name, figure in figures.items()}
        actual = next(iter(top))
        rank = next(iter(figures.values())).rank
        entries.append(_entry(actual, top[actual], rank, top, num_top))
    return entries


def _entry(
    actual: int, own: float, rank: int | None, top: dict[int, float], num_top: int
) -> TokenLogprobs:
    """One position's figures in our order.

    top: the most likely tokens in falling order, but the actual token anywhere among them, whether
        it is that likely or not. num_top: how many were asked for, -1 for all.
    """
    others = [(token_id, value) for token_id, value in top.items() if token_id != actual]
    is_among = num_top < 0 or len(others) < num_top or (rank is not None and rank <= num_top)
    if not rank:
        is_higher = sum(value > own for _, value in others)
        rank = is_higher + 1 if is_among else num_top + 1
    if is_among:
        others.insert(rank - 1, (actual, own))
    if num_top >= 0:
        others = others[:num_top]
    return TokenLogprobs(
        [actual, *(token_id for token_id, _ in others)],
        [own, *(value for _, value in others)],
        rank,
    )


def _value(logprob: float | None) -> float:
    """JSON has no infinity: null, or a very low number."""
    return _NEVER if logprob is None else logprob


def _named_id(name: str) -> int:
    """The id in `token_id:17`, or in `17`."""
    try:
        return int(name.removeprefix("token_id:"))
    except ValueError:
        raise Malformed(f"a token without its id: {name[:40]!r}") from None
