"""Who can go on with what."""

from __future__ import annotations

from typing import Any

import pytest

from spot.engines.base import Resume
from spot.generation import Generation, SamplingParams, StructuredOutput
from spot.resume import as_prompt, can_resume


def begun(**sampling: Any) -> Generation:
    params = SamplingParams(max_tokens=10, **sampling)
    return Generation("g", [1, 2], params, output_token_ids=[3, 4])


@pytest.mark.parametrize(
    ("sampling", "where"),
    [
        ({"temperature": 0.0}, {"prompt", "unseeded", "exact"}),
        ({"temperature": 0.0, "seed": 1}, {"prompt", "unseeded", "exact"}),
        ({"repetition_penalty": 1.2}, {"prompt", "unseeded", "exact"}),
        ({"seed": 1}, {"exact"}),
        ({"presence_penalty": 1.0}, {"unseeded", "exact"}),
        ({"structured": StructuredOutput(json_object=True)}, {"unseeded", "exact"}),
        ({"bad_words": ["x"]}, {"unseeded", "exact"}),
    ],
)
def test_what_looks_back_needs_an_engine_that_can(
    sampling: dict[str, Any], where: set[Resume]
) -> None:
    kinds: list[Resume] = ["prompt", "unseeded", "exact"]
    assert {kind for kind in kinds if can_resume(begun(**sampling), kind)} == where


def test_without_output_everyone_can() -> None:
    generation = begun(seed=1)
    generation.output_token_ids = []
    assert can_resume(generation, "prompt")


def test_a_client_may_allow_what_is_not_exact() -> None:
    generation = begun(seed=1)
    generation.allow_inexact_resume = True
    assert can_resume(generation, "prompt")


def test_output_as_prompt_keeps_the_limits() -> None:
    moved = as_prompt(begun(min_tokens=5, prompt_logprobs=1))
    assert moved.prompt_token_ids == [1, 2, 3, 4]
    assert moved.output_token_ids == []
    assert (moved.sampling.max_tokens, moved.sampling.min_tokens) == (8, 3)
    assert moved.sampling.prompt_logprobs is None


def test_a_generation_that_has_not_begun_stays_as_it_is() -> None:
    generation = begun()
    generation.output_token_ids = []
    assert as_prompt(generation) is generation
