"""The journal's file format, and what the store keeps and forgets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.journal import Entry, Journal, JournalUnusable, digest_of
from server.journal_format import (
    MAGIC,
    Asked,
    Dropped,
    Ended,
    JobRecord,
    Joined,
    Made,
    Named,
    Record,
    WentOn,
    encode,
    frame,
    frames,
)
from server.journal_past import past_of
from spot.generation import SamplingParams, StructuredOutput, TokenDelta, TokenLogprobs

ids = st.integers(0, 2**31 - 1)
token_logprobs = st.builds(
    TokenLogprobs,
    token_ids=st.lists(ids, min_size=1, max_size=3),
    logprobs=st.lists(st.floats(allow_nan=False), min_size=1, max_size=3),
    rank=ids,
)
deltas = st.builds(
    TokenDelta,
    token_ids=st.lists(ids, max_size=4),
    finish_reason=st.sampled_from([None, "stop", "length"]),
    stop_token_id=st.none() | ids,
    logprobs=st.none() | st.lists(token_logprobs, max_size=2),
    prompt_logprobs=st.none() | st.lists(st.none() | token_logprobs, max_size=2),
    num_cached_tokens=st.none() | ids,
    queue_s=st.none() | st.floats(0, 1e6),
    num_migrations=st.integers(0, 3),
)
samplings = st.builds(
    SamplingParams,
    max_tokens=ids,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.none() | st.dictionaries(ids, st.floats(-100, 100), max_size=2),
    stop_token_ids=st.lists(ids, max_size=2),
    structured=st.none()
    | st.builds(StructuredOutput, json_schema=st.sampled_from([True, "{}", {"type": "object"}])),
)
records: st.SearchStrategy[Record] = st.one_of(
    st.builds(
        Asked,
        entry=ids,
        at_s=st.floats(0, 1e10),
        tenant=st.text(max_size=5),
        request_id=st.text(max_size=5),
        endpoint=st.sampled_from(["chat", "completions"]),
        body=st.binary(max_size=20),
        job=st.builds(
            JobRecord,
            model=st.text(max_size=5),
            id=st.text(max_size=5),
            created=ids,
            prompts=st.lists(st.lists(ids, max_size=3), max_size=2),
            samplings=st.lists(samplings, max_size=2),
        ),
    ),
    st.builds(Made, entry=ids, choice=ids, num_before=ids, delta=deltas),
    st.builds(Joined, entry=ids, choice=ids, start=ids, count=ids),
    st.builds(Named, entry=ids, choice=ids, call=ids, id=st.text(max_size=5)),
    st.builds(WentOn, entry=ids, at_s=st.floats(0, 1e10)),
    st.builds(Ended, entry=ids, at_s=st.floats(0, 1e10)),
    st.builds(Dropped, entry=ids),
)
batches = st.lists(st.lists(records, min_size=1, max_size=3), min_size=1, max_size=5)


def read(data: bytes) -> list[list[Record]]:
    return [found for _, _, found in frames(memoryview(data), 0, len(data))]


def written(batches: list[list[Record]]) -> list[bytes]:
    return [frame([encode(record) for record in batch]) for batch in batches]


@given(batches)
def test_what_is_written_is_read(batches: list[list[Record]]) -> None:
    assert read(b"".join(written(batches))) == batches


@given(batches, st.data())
def test_a_cut_costs_only_the_frame_that_it_cuts(batches: list[list[Record]], data: Any) -> None:
    parts = written(batches)
    whole = b"".join(parts)
    cut = data.draw(st.integers(0, len(whole)))
    num_whole = sum(1 for i in range(len(parts)) if len(b"".join(parts[: i + 1])) <= cut)
    assert read(whole[:cut]) == batches[:num_whole]


@given(batches, st.data())
def test_a_flipped_bit_costs_only_from_its_frame_on(batches: list[list[Record]], data: Any) -> None:
    parts = written(batches)
    whole = bytearray(b"".join(parts))
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] ^= 1 << data.draw(st.integers(0, 7))
    before = sum(1 for i in range(len(parts)) if len(b"".join(parts[: i + 1])) <= position)
    assert read(bytes(whole)) == batches[:before]


@given(batches, st.binary(max_size=40))
def test_rubbish_behind_the_end_is_no_record(batches: list[list[Record]], rubbish: bytes) -> None:
    found = read(b"".join(written(batches)) + rubbish)
    assert found[: len(batches)] == batches


# The store ---------------------------------------------------------------------------------

JOB = JobRecord("m", "chatcmpl-1", 1, [[1, 2]], [SamplingParams(max_tokens=9)])


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(folder: Path, clock: Clock, **options: Any) -> Journal:
    journal = Journal(folder, now_s=clock, **options)
    journal.open()
    return journal


def ask(journal: Journal, request_id: str, *, tenant: str = "t", body: bytes = b"{}") -> Entry:
    entry = journal.add(tenant, request_id, "chat", digest_of("chat", body))
    assert entry is not None
    journal.append(entry, Asked(entry.number, 1000.0, tenant, request_id, "chat", body, JOB))
    return entry


def make(journal: Journal, entry: Entry, *token_ids: int, before: int = 0) -> Made:
    record = Made(entry.number, 0, before, TokenDelta(list(token_ids)))
    journal.append(entry, record)
    return record


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*"))


def tokens(journal: Journal, request_id: str, tenant: str = "t") -> list[int]:
    entry = journal.find(tenant, request_id)
    assert entry is not None
    past = past_of(journal.read(entry))
    assert past is not None
    return past.choices[0].token_ids


def test_entries_are_found_by_tenant_and_id_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    first = opened(tmp_path, clock)
    one, two = ask(first, "a"), ask(first, "a", tenant="u")
    make(first, one, 1, 2)
    make(first, two, 7)
    make(first, one, 3, before=2)
    first.flush()
    assert tokens(first, "a") == [1, 2, 3]
    first.close()
    second = opened(tmp_path, clock)
    assert tokens(second, "a") == [1, 2, 3]
    assert tokens(second, "a", tenant="u") == [7]
    assert second.find("v", "a") is None
    found = second.find("t", "a")
    assert found is not None
    make(second, found, 4, before=3)
    second.flush()
    assert tokens(second, "a") == [1, 2, 3, 4]
    second.close()
    assert tokens(opened(tmp_path, clock), "a") == [1, 2, 3, 4]


def test_one_batch_is_one_frame(tmp_path: Path, clock: Clock) -> None:
    journal = opened(tmp_path, clock)
    entries = [ask(journal, str(number)) for number in range(5)]
    journal.flush()
    for entry in entries:
        make(journal, entry, 1)
    journal.flush()
    (segment,) = segments(tmp_path)
    data = segment.read_bytes()
    assert data.startswith(MAGIC)
    assert [len(found) for found in read(data[len(MAGIC) :])] == [5, 5]


def test_a_folder_belongs_to_one_server(tmp_path: Path, clock: Clock) -> None:
    journal = opened(tmp_path, clock)
    with pytest.raises(JournalUnusable, match="another server uses"):
        opened(tmp_path, clock)
    journal.close()
    opened(tmp_path, clock).close()


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalUnusable, match="file"):
        opened(tmp_path / "file", clock)


def test_files_are_for_their_owner_only(tmp_path: Path, clock: Clock) -> None:
    journal = opened(tmp_path / "new", clock)
    ask(journal, "a")
    journal.flush()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o600}


def test_what_is_past_its_time_is_forgotten_and_its_files_deleted(
    tmp_path: Path, clock: Clock
) -> None:
    journal = opened(tmp_path, clock, ttl_s=60.0)
    journal.end(ask(journal, "ended"))
    ask(journal, "left")
    journal.close()
    journal = opened(tmp_path, clock, ttl_s=60.0)
    os.utime(segments(tmp_path)[0], (clock.now_s, clock.now_s))
    journal.close()
    journal = opened(tmp_path, clock, ttl_s=60.0)
    assert journal.num_entries == 2
    clock.now_s += 61
    assert journal.find("t", "ended") is None
    journal.tidy()
    assert journal.num_entries == 0
    assert not segments(tmp_path)
    assert journal.num_bytes == 0


class Answering:
    async def end(self) -> None: ...


def test_who_is_being_answered_is_not_forgotten(tmp_path: Path, clock: Clock) -> None:
    journal = opened(tmp_path, clock, ttl_s=60.0)
    entry = ask(journal, "a")
    entry.answering = Answering()
    clock.now_s += 1000
    journal.tidy()
    assert journal.find("t", "a") is entry


def fill(journal: Journal, entry: Entry, num_bytes: int) -> None:
    past = 0
    while num_bytes > 0:
        make(journal, entry, *[2**31 - 1] * 100, before=past)
        past, num_bytes = past + 100, num_bytes - 500
        journal.flush()


def test_what_has_ended_goes_first_when_room_is_short(tmp_path: Path, clock: Clock) -> None:
    journal = opened(tmp_path, clock, max_bytes=160_000)
    kept = ask(journal, "left")
    fill(journal, kept, 12_000)
    for number in range(30):
        clock.now_s += 20
        entry = ask(journal, str(number))
        fill(journal, entry, 10_000)
        journal.end(entry)
        journal.flush()
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= 160_000 + 10_000
        assert journal.num_bytes == sum(path.stat().st_size for path in segments(tmp_path))
    assert journal.find("t", "0") is None
    assert journal.find("t", "29") is not None
    assert len(tokens(journal, "left")) == 2400
    names = {number for number in range(30) if journal.find("t", str(number))}
    journal.close()
    again = opened(tmp_path, clock, max_bytes=160_000)
    found = {number for number in range(30) if again.find("t", str(number))}
    assert names - {min(names)} <= found <= names


def test_running_answers_alone_fill_it_and_the_oldest_are_let_go_in_the_end(
    tmp_path: Path, clock: Clock
) -> None:
    journal = opened(tmp_path, clock, max_bytes=160_000)
    entries = []
    for number in range(4):
        entries.append(ask(journal, str(number)))
        entries[-1].answering = Answering()
    for _ in range(4):
        for entry in entries:
            fill(journal, entry, 9_700)
    assert journal.add("t", "new", "chat", b"") is None
    assert journal.is_full
    for entry in entries:
        fill(journal, entry, 20_000)
    assert any(entry.is_dropped for entry in entries)
    assert journal.num_bytes <= 160_000 + 3 * 10_000
    for entry in entries:
        entry.answering = None
    assert journal.add("t", "new", "chat", b"") is not None


def test_a_gap_ends_what_counts_until_somebody_went_on(tmp_path: Path, clock: Clock) -> None:
    journal = opened(tmp_path, clock)
    entry = ask(journal, "a")
    make(journal, entry, 1, 2)
    make(journal, entry, 9, before=5)
    make(journal, entry, 8, before=2)
    journal.append(entry, Named(entry.number, 0, 0, "call-9"))
    journal.append(entry, WentOn(entry.number, 0.0))
    make(journal, entry, 3, before=2)
    journal.append(entry, Named(entry.number, 0, 0, "call-1"))
    journal.flush()
    past = past_of(journal.read(entry))
    assert past is not None
    assert past.choices[0].token_ids == [1, 2, 3]
    assert past.choices[0].call_ids == {0: "call-1"}


def test_records_without_a_beginning_are_no_past() -> None:
    assert past_of([Made(1, 0, 0, TokenDelta([1]))]) is None
    assert past_of([]) is None


def test_deltas_that_were_taken_as_one_stay_one(tmp_path: Path, clock: Clock) -> None:
    journal = opened(tmp_path, clock)
    entry = ask(journal, "a")
    for position in range(5):
        make(journal, entry, position, before=position)
    journal.append(entry, Joined(entry.number, 0, 1, 3))
    journal.flush()
    for _ in range(2):
        past = past_of(journal.read(entry))
        assert past is not None
        pushes = [delta.token_ids for delta in past.choices[0].pushes()]
        assert pushes == [[0], [1, 2, 3], [4]]


def test_a_file_of_another_version_is_left_alone(tmp_path: Path, clock: Clock) -> None:
    stranger = tmp_path / "segment-0000000007.journal"
    stranger.write_bytes(b"SHYJRN99 and more")
    journal = opened(tmp_path, clock)
    ask(journal, "a")
    journal.flush()
    assert [path.stem for path in segments(tmp_path)] == [
        "segment-0000000007",
        "segment-0000000008",
    ]
    assert stranger.read_bytes() == b"SHYJRN99 and more"


def test_tenants_without_a_name_are_known_by_their_key(tmp_path: Path, clock: Clock) -> None:
    journal = opened(tmp_path, clock, identities={"key-1": "key:aa", "key-2": "key:bb"})
    entry = journal.add("key-1", "a", "chat", b"")
    assert entry is not None
    journal.append(entry, Asked(entry.number, 1.0, entry.tenant, "a", "chat", b"{}", JOB))
    journal.close()
    clock.now_s = 2.0
    swapped = opened(tmp_path, clock, identities={"key-1": "key:bb", "key-2": "key:aa"})
    assert swapped.find("key-2", "a") is not None
    assert swapped.find("key-1", "a") is None


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 400), flip=st.none() | st.integers(0, 7), data=st.data())
def test_whatever_happens_to_the_end_no_token_is_wrong(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int | None, data: Any
) -> None:
    folder, clock = tmp_path_factory.mktemp("journal"), Clock()
    journal = opened(folder, clock)
    entry = ask(journal, "a")
    for position in range(20):
        make(journal, entry, position, before=position)
        journal.flush()
    journal.close()
    (segment,) = segments(folder)
    raw = bytearray(segment.read_bytes())
    raw = raw[: max(0, len(raw) - cut)]
    if flip is not None and len(raw) > len(MAGIC):
        raw[data.draw(st.integers(len(MAGIC), len(raw) - 1))] ^= 1 << flip
    segment.write_bytes(raw)
    journal = opened(folder, clock)
    found = journal.find("t", "a")
    if found is not None:
        past = past_of(journal.read(found))
        known = [] if past is None else past.choices[0].token_ids
        assert known == list(range(len(known)))
    journal.close()
