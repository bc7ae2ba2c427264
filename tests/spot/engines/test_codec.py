"""The wire between gateway and engine host."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot.engines.base import EngineCard, EngineStats
from spot.engines.codec import (
    MAX_FRAME_BYTES,
    Abort,
    Dead,
    Failed,
    FrameReader,
    HandleDelta,
    Ping,
    Pong,
    Progress,
    Ready,
    Refused,
    Step,
    Stop,
    Submit,
    encode_frame,
    to_gateway_decoder,
    to_host_decoder,
)
from spot.generation import (
    Generation,
    SamplingParams,
    StructuredOutput,
    TokenDelta,
    TokenLogprobs,
)

ids = st.lists(st.integers(0, 2**31), max_size=6)
handles = st.integers(0, 2**53)
reals = st.floats(allow_nan=False)
texts = st.text(max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
token_logprobs = st.builds(
    TokenLogprobs, token_ids=ids, logprobs=st.lists(reals, max_size=4), rank=st.integers(0, 2**20)
)
structured = st.one_of(
    st.builds(StructuredOutput, json_schema=st.dictionaries(texts, json_values, max_size=3)),
    st.builds(StructuredOutput, json_schema=st.booleans() | texts),
    st.builds(StructuredOutput, regex=texts, disable_any_whitespace=st.booleans()),
    st.builds(StructuredOutput, choice=st.lists(texts, max_size=3)),
)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**31),
    temperature=reals,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop_token_ids=ids,
    bad_words=st.lists(texts, max_size=2),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 2**31), reals, max_size=3),
    logprobs=st.none() | st.integers(-1, 20),
    structured=st.none() | structured,
    extra_args=st.none() | st.dictionaries(texts, json_values, max_size=3),
)
generations = st.builds(
    Generation,
    id=texts,
    prompt_token_ids=ids,
    sampling=sampling,
    priority=st.integers(-10, 10),
    cache_salt=st.none() | texts,
    reasoning_ended=st.none() | st.booleans(),
)
deltas = st.builds(
    TokenDelta,
    token_ids=ids,
    finish_reason=st.sampled_from([None, "stop", "length"]),
    stop_token_id=st.none() | st.integers(0, 2**31),
    logprobs=st.none() | st.lists(token_logprobs, max_size=3),
    prompt_logprobs=st.none() | st.lists(st.none() | token_logprobs, max_size=3),
    num_cached_tokens=st.none() | st.integers(0, 2**31),
)
stats = st.builds(EngineStats, running=st.integers(0, 9), kv_cache_usage=st.floats(0, 1))
to_host = st.one_of(
    st.builds(Submit, handle=handles, generation=generations),
    st.builds(Abort, handles=st.lists(handles, max_size=5)),
    st.builds(Ping, number=handles),
    st.just(Stop()),
)
cards = st.builds(EngineCard, max_model_len=handles, vocab_size=handles, dtype=texts)
to_gateway = st.one_of(
    st.builds(Progress, detail=texts),
    st.builds(Ready, card=cards, pids=ids),
    st.builds(
        Step,
        deltas=st.lists(st.builds(HandleDelta, handle=handles, delta=deltas), max_size=4),
        stats=st.none() | stats,
        num_tokens=handles,
    ),
    st.builds(Refused, handle=handles, message=texts, param=st.none() | texts),
    st.builds(Failed, handle=handles, message=texts, everywhere=st.booleans()),
    st.builds(Pong, number=handles),
    st.builds(Dead, message=texts, fatal=st.booleans(), is_misconfigured=st.booleans()),
)


def decode_in_pieces(
    data: bytes, cuts: list[int], decoder: msgspec.msgpack.Decoder[Any]
) -> list[Any]:
    """Feed `data` cut at `cuts`, and decode every payload that comes out."""
    reader = FrameReader()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(edges)]
    return [decoder.decode(payload) for piece in pieces for payload in reader.feed(piece)]


@given(st.lists(to_host, max_size=4), st.lists(st.integers(0, 10**6), max_size=8))
def test_messages_to_the_host_survive_any_split(messages: list[Any], cuts: list[int]) -> None:
    data = b"".join(map(encode_frame, messages))
    assert decode_in_pieces(data, cuts, to_host_decoder) == messages


@given(st.lists(to_gateway, max_size=4), st.lists(st.integers(0, 10**6), max_size=8))
def test_messages_to_the_gateway_survive_any_split(messages: list[Any], cuts: list[int]) -> None:
    data = b"".join(map(encode_frame, messages))
    assert decode_in_pieces(data, cuts, to_gateway_decoder) == messages


def test_a_reader_holds_back_an_unfinished_frame() -> None:
    frame = encode_frame(Ping(7))
    reader = FrameReader()
    assert list(reader.feed(frame[:-1])) == []
    assert list(reader.feed(frame[-1:])) == [frame[4:]]


def test_a_reader_refuses_an_impossible_length() -> None:
    too_long = (MAX_FRAME_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(ValueError, match="over"):
        list(FrameReader().feed(too_long))


def test_the_decoders_do_not_take_each_others_messages() -> None:
    with pytest.raises(msgspec.ValidationError):
        to_host_decoder.decode(encode_frame(Dead("gone"))[4:])


def test_a_number_beyond_64_bits_is_not_encoded() -> None:
    generation = Generation("g", [1], SamplingParams(max_tokens=1, seed=2**70))
    with pytest.raises(OverflowError):
        encode_frame(Submit(1, generation))
