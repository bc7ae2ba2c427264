"""Choices made of prompts: whose they are, and what each may do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from server.endpoints.choices import Choices, formatter_for, sampling_for
from server.protocol.sampling import SamplingBody
from server.record import RequestRecord
from server.sampling import SamplingDefaults
from spot.errors import ContextLengthExceeded, InvalidRequest
from spot.generation import SamplingParams
from tests.harness import demo_tokenizer

MODEL: Any = SimpleNamespace(
    tokenizer=demo_tokenizer(), max_model_len=100, vocab_size=49152, defaults=SamplingDefaults()
)


def choices_of(**fields: Any) -> Choices:
    gateway: Any = SimpleNamespace(model=MODEL, cache_salt=lambda tenant, salt: f"{tenant}/{salt}")
    record = RequestRecord("r", "POST", "/", 0.0, tenant="alice")
    return Choices(gateway, record, SamplingBody(**fields))


def limited(body: SamplingBody, *, num_prompt: int, max_tokens: int | None) -> SamplingParams:
    return sampling_for(
        MODEL,
        body,
        num_prompt_tokens=num_prompt,
        prompt_param="prompt",
        max_tokens=max_tokens,
        limit_param="max_tokens",
        default_max_tokens=None,
        num_logprobs=None,
        prompt_logprobs=None,
        constraint=None,
    )


def test_each_prompt_has_its_choices_in_order() -> None:
    choices = choices_of(n=2, priority=3, cache_salt="s", allow_inexact_resume=True)
    sampling = SamplingParams(max_tokens=5, seed=10)
    choices.add([1, 2], sampling)
    choices.add([3], sampling)
    made = choices.generations
    assert [g.prompt_token_ids for g in made] == [[1, 2], [1, 2], [3], [3]]
    assert [g.sampling.seed for g in made] == [10, 11, 10, 11]
    assert [g.id for g in made] == [f"{choices.key}-{index}" for index in range(4)]
    assert {(g.priority, g.cache_salt, g.allow_inexact_resume) for g in made} == {
        (3, "alice/s", True)
    }
    assert len(set(map(id, choices.assemblers))) == 4


def test_no_two_requests_share_ids() -> None:
    assert choices_of().key != choices_of().key


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "limit"), [(90, None, 10), (90, 50, 10), (10, 5, 5), (10, 0, 1)]
)
def test_the_output_is_limited_by_what_the_context_leaves(
    num_prompt: int, max_tokens: int | None, limit: int
) -> None:
    sampling = limited(SamplingBody(), num_prompt=num_prompt, max_tokens=max_tokens)
    assert sampling.max_tokens == limit


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(ContextLengthExceeded):
        limited(SamplingBody(), num_prompt=100, max_tokens=0)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        limited(SamplingBody(), num_prompt=10, max_tokens=101)


def test_log_probabilities_are_rendered_if_any_were_asked_for() -> None:
    assert formatter_for(MODEL, SamplingBody(), None) is None
    assert formatter_for(MODEL, SamplingBody(), 0) is not None
    assert formatter_for(MODEL, SamplingBody(prompt_logprobs=1), None) is not None
