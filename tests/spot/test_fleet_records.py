"""A pipeline's states, and a generation's seat on it."""

from __future__ import annotations

import itertools

import pytest

from spot.fleet_records import IllegalTransition, Live, Pipeline, PipelineState
from spot.generation import Generation, SamplingParams

STATES: tuple[PipelineState, ...] = ("starting", "serving", "draining", "gone")
LEGAL = {
    ("starting", "serving"),
    ("starting", "draining"),
    ("starting", "gone"),
    ("serving", "starting"),
    ("serving", "draining"),
    ("serving", "gone"),
    ("draining", "gone"),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(STATES, STATES)))
def test_only_these_transitions_are_legal(before: PipelineState, after: PipelineState) -> None:
    pipeline = Pipeline("p", state=before)
    if (before, after) in LEGAL:
        pipeline.become(after)
        assert pipeline.state == after
    else:
        with pytest.raises(IllegalTransition):
            pipeline.become(after)
        assert pipeline.state == before


def test_a_seat_counts_a_migration_once() -> None:
    live = Live(Generation("g", [1, 2], SamplingParams(max_tokens=9)), 1, output=[7])
    first, second = Pipeline("p"), Pipeline("q")
    first.seat(live, 1.0)
    assert (live.pipeline_id, live.leg, live.next_boundary) == ("p", 1, 2)
    assert (first.progress_s, first.num_migrated_in) == (1.0, 0)
    first.unseat(live)
    assert live.pipeline_id is None
    assert not first.legs
    live.is_moving = True
    second.seat(live, 2.0)
    second.unseat(live)
    second.seat(live, 3.0)
    assert second.num_migrated_in == 1
    assert live.leg == 3


def test_what_goes_on_elsewhere_brings_its_output() -> None:
    generation = Generation("g", [1, 2], SamplingParams(max_tokens=9))
    live = Live(generation, 1)
    assert live.remaining is generation
    live.output += [7, 8]
    assert live.remaining.output_token_ids == [7, 8]
    assert live.num_context == 4
