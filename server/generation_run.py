"""One request's generations, from submission to the last piece, with its accounting."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel

from server.collector import Collector
from server.gateway import Gateway
from server.journaling import Journaling
from server.record import RequestRecord
from server.text.assembler import ChoiceAssembler, Piece
from spot.errors import InvalidRequest, ShuntyardError
from spot.generation import Generation, TokenDelta, TokenLogprobs

_REPLAYED_AT_ONCE = 32


class GenerationRun:
    """A context manager around the generations of one request; leaving it aborts the rest.

    num_prompt_tokens: counted once per prompt, however many choices share it.
    num_choices: of each prompt. What the later ones find in the prefix cache is the first one's.
    constraint_param: the request's field that constrains the output, for the engine's complaints.
    prompt_logprobs: per generation, from its first delta on, if they were asked for.
    A record with a journaling makes it a run that is journaled, and that begins with what the
    journal has of it.
    """

    def __init__(
        self,
        gateway: Gateway,
        record: RequestRecord,
        generations: list[Generation],
        assemblers: list[ChoiceAssembler],
        *,
        num_prompt_tokens: int,
        num_choices: int = 1,
        stream_interval: int = 1,
        constraint_param: str | None = None,
    ) -> None:
        self._gateway = gateway
        self._num_choices = num_choices
        self._record = record
        self._constraint_param = constraint_param
        self._assemblers = assemblers
        self._journaling = journaling = record.journaling
        self._collector = Collector(
            gateway.generations,
            generations,
            stream_interval=stream_interval,
            finished=() if journaling is None else journaling.finished,
            log=journaling,
        )
        card = gateway.model.engine.card
        num_finished = 0 if journaling is None else len(journaling.finished)
        self._admission = gateway.admission.generations(
            len(generations) - num_finished, num_seats=card.max_num_seqs if card else 0
        )
        self.prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        record.num_prompt_tokens = num_prompt_tokens
        record.num_choices = len(generations)
        record.n = num_choices
        record.max_tokens = generations[0].sampling.max_tokens
        if journaling is not None and journaling.num_replayed_tokens:
            # Those were counted when they were made.
            record.is_prompt_counted = True
            record.num_counted_tokens = journaling.num_replayed_tokens

    def __enter__(self) -> Self:
        self._admission.__enter__()
        try:
            self._collector.__enter__()
        except BaseException:
            self._admission.__exit__(None, None, None)
            raise
        self._record.num_shared = self._collector.num_shared
        self._record.num_from_cache = self._collector.num_from_cache
        self._record.submitted_s = anyio.current_time()
        self._gateway.metrics.begin(self._record)
        self._gateway.live.add(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._gateway.live.discard(self)
        self._collector.__exit__(exc_type, exc, traceback)
        self._admission.__exit__(None, None, None)

    @property
    def is_done(self) -> bool:
        return self._collector.is_done and not (self._journaling and self._journaling.replay)

    def fail(self, error: ShuntyardError) -> None:
        """End the run from outside; `pieces` raises this."""
        self._collector.fail(error)

    def poke(self) -> None:
        """Make `pieces` return early and empty."""
        self._collector.poke()

    async def pieces(self) -> list[tuple[int, Piece]]:
        """The next pieces, at most one per choice; empty after `poke`.

        Raises the engine's error once everything before it was returned.
        """
        journaling = self._journaling
        if journaling is not None and journaling.replay:
            return await self._replayed(journaling)
        try:
            deltas = await self._collector.receive()
        except InvalidRequest as error:
            if (
                error.param == "structured"
            ):  # the engine's name for what the request calls otherwise
                error.param = self._constraint_param
            raise
        result: list[tuple[int, Piece]] = []
        if not deltas:
            return result
        now_s = asyncio.get_running_loop().time()
        for index, delta in deltas:
            if (
                delta.num_cached_tokens is not None
                or delta.queue_s is not None
                or delta.prompt_logprobs is not None
                or delta.num_migrations
            ):
                self._note(index, delta)
            piece = self._assemblers[index].push(delta)
            self._record.num_output_tokens += len(piece.token_ids)
            if piece.finish_reason is not None:
                self._collector.abort([index])
            result.append((index, piece))
        self._note_time(now_s)
        if journaling is not None:
            journaling.written(result, is_done=self.is_done)
        return result

    async def _replayed(self, journaling: Journaling) -> list[tuple[int, Piece]]:
        """The next pieces that were made before the answer was interrupted."""
        result: list[tuple[int, Piece]] = []
        for index, delta, piece in journaling.replay.popleft():
            self._note(index, delta)
            self._record.num_output_tokens += len(piece.token_ids)
            result.append((index, piece))
        journaling.written((), is_done=self.is_done)
        if len(journaling.replay) % _REPLAYED_AT_ONCE == 0:
            await anyio.lowlevel.checkpoint()
        return result

    def _note(self, index: int, delta: TokenDelta) -> None:
        """Keep what a delta says beside its tokens."""
        record = self._record
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs[index] = delta.prompt_logprobs
        if delta.queue_s is not None:
            record.queue_s = max(record.queue_s or 0.0, delta.queue_s)
        if delta.num_cached_tokens is not None and index % self._num_choices == 0:
            record.num_cached_tokens += delta.num_cached_tokens
        record.num_migrations += delta.num_migrations

    def _note_time(self, now_s: float) -> None:
        record, metrics = self._record, self._gateway.metrics
        if record.first_token_s is None:
            record.first_token_s = now_s
            metrics.observe_first_token(now_s - record.arrived_s)
        elif record.last_token_s is not None:
            metrics.inter_token.observe(now_s - record.last_token_s)
        record.last_token_s = now_s


def usage(record: RequestRecord, *, num_output_tokens: int | None = None) -> dict[str, object]:
    """OpenAI's usage object. num_output_tokens: if not those of the record."""
    if num_output_tokens is None:
        num_output_tokens = record.num_output_tokens
    return {
        "prompt_tokens": record.num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": record.num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": record.num_cached_tokens},
    }
