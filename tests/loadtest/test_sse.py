"""The load test's reader of event streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadtest.sse import EventReader, StreamBroken, StreamTimes


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def piece(content: str = "", *, finish: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": content, **delta}, "finish_reason": finish}
    return event({"choices": [choice]})


def usage(prompt: int, completion: int) -> bytes:
    return event(
        {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}
    )


DONE = b"data: [DONE]\n\n"
STREAM = (
    piece(role="assistant") + piece("Hel") + b": keep-alive\n\n" + piece("lö 日本")
    + piece(finish="length") + usage(12, 5) + DONE
)  # fmt: skip


def read(stream: bytes, *, cut: int = 0) -> StreamTimes:
    """Fed in pieces of `cut` bytes (0: at once), one second apart, from second 1 on."""
    times = StreamTimes(started_s=0.0)
    step = cut or len(stream) or 1
    for number, start in enumerate(range(0, len(stream), step), start=1):
        times.feed(stream[start : start + step], now_s=float(number))
    return times


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 50, 0])
def test_any_cut_of_the_bytes_reads_alike(cut: int) -> None:
    reader = EventReader()
    step = cut or len(STREAM)
    chunks = [STREAM[i : i + step] for i in range(0, len(STREAM), step)]
    found = [data for chunk in chunks for data in reader.feed(chunk)]
    assert len(found) == 6
    assert "lö 日本" in json.loads(found[2])["choices"][0]["delta"]["content"]
    assert found[-1] == b"[DONE]"


def test_carriage_returns_and_missing_blanks_are_fine() -> None:
    assert list(EventReader().feed(b"data:a\r\n\r\nevent: x\r\ndata: b\r\n\r\n")) == [b"a", b"b"]


def test_comments_and_unfinished_events_are_no_events() -> None:
    assert list(EventReader().feed(b": hello\n\ndata: half")) == []


def test_token_counts_come_from_the_usage() -> None:
    times = read(STREAM)
    times.check_complete()
    assert (times.num_prompt_tokens, times.num_output_tokens, times.num_pieces) == (12, 5, 2)
    assert times.finish_reason == "length"


def test_without_usage_pieces_count() -> None:
    assert read(piece("a") + piece("b") + piece(finish="stop") + DONE).num_output_tokens == 2


def test_the_role_is_no_first_token() -> None:
    times = StreamTimes(started_s=1.0)
    times.feed(piece(role="assistant"), now_s=2.0)
    assert times.ttft_s is None
    times.feed(piece("a"), now_s=4.0)
    assert times.ttft_s == 3.0


def test_tpot_is_the_mean_after_the_first_token() -> None:
    times = StreamTimes(started_s=0.0)
    times.feed(piece("a"), now_s=10.0)
    assert times.tpot_s is None
    times.feed(piece("b c"), now_s=12.0)
    times.feed(usage(3, 5), now_s=13.0)
    assert times.tpot_s == 0.5


@pytest.mark.parametrize(
    "frame",
    [
        event({"error": {"message": "the engine died"}}),
        event({"error": "the engine died"}),
        b"data: the engine died\n\n",
        b'data: ["the engine died"]\n\n',
    ],
)
def test_an_error_event_breaks_the_stream(frame: bytes) -> None:
    with pytest.raises(StreamBroken, match="the engine died"):
        read(piece("a") + frame)


def test_a_stream_without_done_is_not_complete() -> None:
    with pytest.raises(StreamBroken, match="DONE"):
        read(piece("a") + piece(finish="stop")).check_complete()


def test_a_stream_without_a_finish_reason_is_not_complete() -> None:
    with pytest.raises(StreamBroken, match="finish reason"):
        read(piece("a") + DONE).check_complete()
