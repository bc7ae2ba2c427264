"""What the journal's records say of a request: what it became, and what was made of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from server.journal_format import Asked, JobRecord, Joined, Made, Named, Record, WentOn
from spot.generation import TokenDelta


@dataclass(slots=True)
class ChoicePast:
    """One choice. joins: by the position of a delta, how many from there became text as one.

    call_ids: of its tool calls, by their index.
    """

    deltas: list[TokenDelta] = field(default_factory=list)
    num_tokens: int = 0
    joins: dict[int, int] = field(default_factory=dict)
    call_ids: dict[int, str] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    def pushes(self) -> Iterator[TokenDelta]:
        """The deltas as the assembler got them: what it gave out depends on how they were cut.

        Each is a copy that the caller owns.
        """
        position = 0
        while position < len(self.deltas):
            joined = _copy(self.deltas[position])
            end = position + self.joins.get(position, 1)
            for later in self.deltas[position + 1 : end]:
                joined.merge(later)
            position = end
            yield joined


@dataclass(slots=True)
class Past:
    """A request of which this is known. `choices` has one for each sampling of the job."""

    body: bytes
    job: JobRecord
    choices: list[ChoicePast]


def past_of(records: Iterable[Record]) -> Past | None:
    """The past that an entry's records tell, in order; None without its beginning.

    After a gap nothing counts until somebody went on from there.
    """
    past: Past | None = None
    has_gap = False
    for record in records:
        if isinstance(record, Asked):
            past = Past(record.body, record.job, [ChoicePast() for _ in record.job.samplings])
            continue
        if past is None:
            return None
        if isinstance(record, WentOn):
            has_gap = False
        if has_gap or not isinstance(record, Made | Joined | Named):
            continue
        choice = past.choices[record.choice]
        if isinstance(record, Made):
            if record.num_before != choice.num_tokens:
                has_gap = True
                continue
            choice.deltas.append(record.delta)
            choice.num_tokens += len(record.delta.token_ids)
        elif isinstance(record, Joined):
            choice.joins[record.start] = record.count
        else:
            choice.call_ids[record.call] = record.id
    return past


def _copy(delta: TokenDelta) -> TokenDelta:
    return msgspec.structs.replace(
        delta,
        token_ids=list(delta.token_ids),
        logprobs=None if delta.logprobs is None else list(delta.logprobs),
    )
