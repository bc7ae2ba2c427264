"""One answer and the journal: writes it while it is made, or goes on where an earlier one ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

import anyio
import anyio.lowlevel
import msgspec
import orjson

from server.asgi import ClientGone
from server.errors import Conflict
from server.journal import Journal
from server.journal_entry import Entry, digest_of
from server.journal_format import Asked, JobRecord, Joined, Made, Named, WentOn
from server.journal_past import ChoicePast, Past, past_of
from server.record import RequestRecord
from server.text.assembler import ChoiceAssembler, Piece
from spot.errors import InvalidRequest, ShuntyardError
from spot.generation import Generation, TokenDelta

_REPLAYED_AT_ONCE = 64
ID_HEADER = "x-request-id"


class Job(Protocol):
    """What an endpoint makes of a request, as far as the journal is concerned."""

    id: str
    created: int
    generations: list[Generation]
    assemblers: list[ChoiceAssembler]


class Journaling:
    """Writes one answer into its entry, or replays what is there and goes on.

    last_event_id: what the client has already; None for nothing.
    finished: choices of which everything is in the journal.
    replay: pieces that are in the journal and still to be answered with, at most one per choice
        at a time, each with the delta that it was made from.
    """

    def __init__(
        self, journal: Journal, entry: Entry, body: bytes, last_event_id: str | None
    ) -> None:
        self._journal = journal
        self._entry = entry
        self._body = body
        self._past: Past | None = None
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self._num_tokens: list[int] = []
        self._num_taken: list[int] = []
        self._num_pending: list[int] = []
        self._call_ids: list[dict[int, str]] = []
        self.last_event_id = last_event_id
        self.finished: set[int] = set()
        self.replay: deque[list[tuple[int, TokenDelta, Piece]]] = deque()
        self.num_replayed_tokens = 0

    async def answer(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work of answering. Raises ClientGone when another takes the answer over."""
        journal, entry = self._journal, self._entry
        entry.answering = self
        try:
            with self._scope:
                self._past = await read_past(journal, entry)
                if self._past is None and self.last_event_id is not None:
                    raise nothing_to_continue()
                await work()
        except ShuntyardError:
            # What an earlier round made stays, whatever this one ran into.
            if self._past is None and not any(self._num_tokens):
                journal.drop(entry)
            raise
        finally:
            entry.answering = None
            journal.touch(entry)
            self._ended.set()
        if self._scope.cancelled_caught:
            raise ClientGone

    async def end(self) -> None:
        self._scope.cancel()
        await self._ended.wait()

    # Before the run ------------------------------------------------------------------------

    def prompt(self, index: int, token_ids: list[int]) -> list[int]:
        """The prompt as it was at first; a template may look at the date."""
        return token_ids if self._past is None else self._past.job.prompts[index]

    async def begin(self, job: Job, *, prompts: list[list[int]], model: str) -> None:
        """Write what the request became, or make of it what it was: the same ids, the same
        generations with their output so far. `replay` is ready then.

        model: what is served. Raises Conflict if that is not what it was.
        """
        past = self._past
        if past is None:
            samplings = [generation.sampling for generation in job.generations]
            record = JobRecord(model, job.id, job.created, prompts, samplings)
            self._start([ChoicePast() for _ in samplings])
            self._append(_asked(self._entry, self._body, record))
            return
        job.id, job.created = past.job.id, past.job.created
        self._start(past.choices)
        pieces = [await self._pushed(job, index) for index in range(len(past.choices))]
        self.num_replayed_tokens = sum(len(p.token_ids) for made in pieces for _, p in made)
        for position in range(max(map(len, pieces))):
            self.replay.append(
                [(i, *made[position]) for i, made in enumerate(pieces) if position < len(made)]
            )
        if len(self.finished) < len(pieces) and past.job.model != model:
            raise Conflict(
                f"The answer was begun by the model {past.job.model[:200]}, which is not served "
                "here now: it cannot be continued."
            )
        for index, choice in enumerate(past.choices):
            job.generations[index] = msgspec.structs.replace(
                job.generations[index],
                sampling=past.job.samplings[index],
                output_token_ids=choice.token_ids,
            )
        self._append(WentOn(self._entry.number, self._entry.last_s))
        self._journal.num_resumed += 1

    def check_has(self, index: int, num_tokens: int, *, is_finished: bool) -> None:
        """Raises Conflict unless the journal has as much of a choice as the client."""
        known = self._num_tokens[index]
        if index not in self.finished and (is_finished or num_tokens > known):
            raise Conflict(
                f"The client has {num_tokens} tokens of choice {index}, the journal {known}: "
                "its end was lost. Without Last-Event-ID the answer comes from its start."
            )

    def _start(self, choices: list[ChoicePast]) -> None:
        self._num_tokens = [choice.num_tokens for choice in choices]
        self._num_taken = [len(choice.deltas) for choice in choices]
        self._num_pending = [0] * len(choices)
        self._call_ids = [choice.call_ids for choice in choices]

    async def _pushed(self, job: Job, index: int) -> list[tuple[TokenDelta, Piece]]:
        """The pieces of what the journal has of a choice."""
        assert self._past is not None
        made: list[tuple[TokenDelta, Piece]] = []
        for delta in self._past.choices[index].pushes():
            piece = job.assemblers[index].push(delta)
            self._name_calls(index, piece)
            made.append((delta, piece))
            if piece.finish_reason is not None:
                self.finished.add(index)
                break
            if len(made) % _REPLAYED_AT_ONCE == 0:
                await anyio.lowlevel.checkpoint()
        return made

    # During the run ------------------------------------------------------------------------

    def made(self, index: int, delta: TokenDelta) -> None:
        num_tokens = self._num_tokens
        self._append(Made(self._entry.number, index, num_tokens[index], delta))
        num_tokens[index] += len(delta.token_ids)
        self._num_pending[index] += 1

    def taken(self, index: int) -> None:
        start, count = self._num_taken[index], self._num_pending[index]
        self._num_taken[index], self._num_pending[index] = start + count, 0
        if count > 1:
            self._append(Joined(self._entry.number, index, start, count))

    def written(self, pieces: Iterable[tuple[int, Piece]], *, is_done: bool) -> None:
        """Pieces are about to be answered with: all that they come from is written now."""
        for index, piece in pieces:
            self._name_calls(index, piece)
        if is_done:
            self._journal.end(self._entry)
        self._journal.flush()

    def _name_calls(self, index: int, piece: Piece) -> None:
        """Tool calls keep the ids that they were given first: parsers invent them."""
        for call in piece.tool_calls:
            if call.id is None:
                continue
            known = self._call_ids[index].get(call.index)
            if known is not None:
                call.id = known
            else:
                self._call_ids[index][call.index] = call.id
                self._append(Named(self._entry.number, index, call.index, call.id))

    def _append(self, record: Any) -> None:
        self._journal.append(self._entry, record)


async def journaled(
    journal: Journal,
    record: RequestRecord,
    endpoint: str,
    raw: dict[str, Any],
    last_event_id: str | None,
    work: Callable[[], Awaitable[None]],
) -> None:
    """Do the work of answering a request, with a journaling in its record.

    Who answers from the same entry already is ended: a client whose connection broke without a
    sign comes back before the server knows of it.
    Raises InvalidRequest if the request id belongs to another request.
    """
    body = orjson.dumps(raw, option=orjson.OPT_SORT_KEYS)
    digest = digest_of(endpoint, body)
    last_event_id = last_event_id or None
    while (entry := journal.find(record.tenant, record.request_id)) is not None:
        if entry.digest != digest:
            raise await _differs(journal, entry, endpoint, body)
        if entry.answering is None:
            break
        await entry.answering.end()
    if entry is None:
        if last_event_id is not None:
            raise nothing_to_continue()
        entry = journal.add(record.tenant, record.request_id, endpoint, digest)
    if entry is None:
        await work()
        return
    record.journaling = Journaling(journal, entry, body, last_event_id)
    await record.journaling.answer(work)


async def read_past(journal: Journal, entry: Entry) -> Past | None:
    """What the journal has of an entry."""
    journal.flush()
    if not entry.spans:
        return None
    return past_of(await anyio.to_thread.run_sync(journal.read, entry))


def nothing_to_continue() -> Conflict:
    return Conflict(
        "There is no answer to continue under this request id: it was not journaled, or that is "
        "too long ago. Without Last-Event-ID it is made anew."
    )


async def _differs(journal: Journal, entry: Entry, endpoint: str, body: bytes) -> InvalidRequest:
    """Says what another request under the same id has different."""
    words, param = "another path", None
    if entry.endpoint == endpoint:
        past = await read_past(journal, entry)
        earlier = {} if past is None else orjson.loads(past.body)
        now = orjson.loads(body)
        names = sorted(
            name for name in {*earlier, *now} if earlier.get(name, ...) != now.get(name, ...)
        )
        words = f"other values of {', '.join(names[:10])}" if names else "another body"
        param = names[0] if names else None
    return InvalidRequest(
        f"The request id '{entry.request_id}' belongs to a request with {words}; a new request "
        f"needs a new {ID_HEADER}.",
        param=param,
        code="request_id_in_use",
    )


def _asked(entry: Entry, body: bytes, job: JobRecord) -> Asked:
    return Asked(
        entry.number, entry.last_s, entry.tenant, entry.request_id, entry.endpoint, body, job
    )
