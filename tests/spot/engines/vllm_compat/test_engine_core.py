"""What is refused before it reaches the engine."""

from __future__ import annotations

import pytest

from spot.engines.vllm_compat.engine_core import EngineCore
from spot.engines.vllm_compat.refusal import Unservable
from spot.generation import Generation, SamplingParams


class Accepting:
    """Takes every request."""

    arrival_time = 0.0

    def process_inputs(self, request_id: str, *args: object, **options: object) -> Accepting:
        return self


@pytest.fixture
def chunking_on_cpu() -> EngineCore:
    core = EngineCore.__new__(EngineCore)
    core._refuse_seeds = True
    core._inputs = Accepting()
    core._tasks = ()
    return core


def test_seeds_are_refused_where_they_would_end_the_engine(chunking_on_cpu: EngineCore) -> None:
    seeded = Generation("g", [1], SamplingParams(max_tokens=1, seed=3))
    with pytest.raises(Unservable, match="chunked prefill") as caught:
        chunking_on_cpu.prepare("1", seeded)
    assert caught.value.param == "seed"


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, seed=3, temperature=0.0)],
    ids=["no seed", "greedy"],
)
def test_what_draws_no_seeded_numbers_is_taken(
    chunking_on_cpu: EngineCore, sampling: SamplingParams
) -> None:
    assert chunking_on_cpu.prepare("1", Generation("g", [1], sampling)) is not None
