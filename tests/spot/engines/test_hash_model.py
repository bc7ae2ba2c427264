"""Both token models continue a prefix alike wherever it was cut; the rolling one never ends it."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot.engines.hash_model import HashModel, RollingModel, TokenModel, finish_of
from spot.generation import Generation, SamplingParams

EOS = 3
MODELS: list[TokenModel] = [HashModel(100, EOS), RollingModel(100, EOS)]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 5},
    {"seed": 5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
]


def generation(prompt: list[int], output: list[int] | None = None, **sampling: Any) -> Generation:
    params = SamplingParams(**{"max_tokens": 50, "temperature": 0.0, **sampling})
    return Generation("g", prompt, params, output_token_ids=output or [])


def tokens(model: TokenModel, start: Generation, num_tokens: int) -> list[int]:
    continuation = model.begin(start)
    return [continuation.next_token()[0] for _ in range(num_tokens)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_continuation_is_the_same_at_every_cut(
    model: TokenModel, sampling: dict[str, Any]
) -> None:
    start = generation([1, 2, 3], **sampling)
    whole = tokens(model, start, 12)
    for cut in range(12):
        rest = msgspec.structs.replace(start, output_token_ids=whole[:cut])
        assert whole[:cut] + tokens(model, rest, 12 - cut) == whole


@pytest.mark.parametrize("model", MODELS)
def test_what_is_prompt_and_what_is_output_makes_no_difference(model: TokenModel) -> None:
    assert tokens(model, generation([1, 2], [3, 4]), 8) == tokens(
        model, generation([1, 2, 3, 4]), 8
    )


@given(st.lists(st.integers(0, 999), min_size=1, max_size=20), st.integers(0, 999))
def test_the_rolling_model_says_everything_but_the_end(prompt: list[int], eos: int) -> None:
    said = tokens(RollingModel(1000, eos), generation(prompt), 50)
    assert eos not in said
    assert all(0 <= token_id < 1000 for token_id in said)


def test_the_rolling_model_depends_on_each_token() -> None:
    model = RollingModel(50_000, EOS)
    prompts = itertools.product(range(5), repeat=3)
    outputs = {tuple(tokens(model, generation(list(prompt)), 4)) for prompt in prompts}
    assert len(outputs) == 125


def test_the_rolling_model_has_logprobs_where_they_are_asked_for() -> None:
    continuation = RollingModel(100, EOS).begin(generation([1, 2], logprobs=0, prompt_logprobs=0))
    token_id, entry = continuation.next_token()
    assert entry is not None
    assert entry.token_ids == [token_id]
    first, second = continuation.prompt_logprobs()
    assert first is None
    assert second is not None
    assert second.token_ids == [2]


@pytest.mark.parametrize(
    ("token_id", "num_output", "sampling", "expected"),
    [
        (EOS, 1, {}, ("stop", None)),
        (EOS, 1, {"ignore_eos": True}, (None, None)),
        (EOS, 1, {"min_tokens": 2}, (None, None)),
        (7, 1, {"stop_token_ids": [7]}, ("stop", 7)),
        (7, 5, {"max_tokens": 5}, ("length", None)),
        (7, 8, {}, ("length", None)),
        (7, 7, {}, (None, None)),
    ],
)
def test_ends(
    token_id: int, num_output: int, sampling: dict[str, Any], expected: tuple[Any, Any]
) -> None:
    start = generation([1, 2], **sampling)
    found = finish_of(token_id, num_output, start, eos_token_id=EOS, max_model_len=10)
    assert found == expected
