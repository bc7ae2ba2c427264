"""Engine core outputs as steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from spot.engines.base import EngineStats
from spot.engines.codec import Failed, HandleDelta, Refused
from spot.engines.vllm_compat.outputs import MappedStep, StepMapper
from spot.generation import SamplingParams, StructuredOutput, TokenDelta, TokenLogprobs

PLAIN = SamplingParams(max_tokens=8)


def mapper(sampling: SamplingParams = PLAIN, handle: int = 1) -> StepMapper:
    mapped = StepMapper()
    mapped.begin(handle, sampling)
    return mapped


def step(
    source: StepMapper, *outputs: EngineCoreOutput, stats: SchedulerStats | None = None
) -> MappedStep:
    return source.map(EngineCoreOutputs(outputs=list(outputs), scheduler_stats=stats))


def output(token_ids: list[int], handle: int = 1, **options: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id=str(handle), new_token_ids=token_ids, **options)


def lists(rows: list[list[int]], values: list[list[float]], ranks: list[int]) -> LogprobsLists:
    return LogprobsLists(np.array(rows), np.array(values), np.array(ranks))


def tensors(rows: list[list[int]], values: list[list[float]], ranks: list[int]) -> LogprobsTensors:
    return LogprobsTensors(torch.tensor(rows), torch.tensor(values), torch.tensor(ranks))


def test_all_outputs_of_a_step_travel_together() -> None:
    source = mapper()
    source.begin(2, PLAIN)
    mapped = step(source, output([5]), output([6, 7], 2))
    assert mapped.step.deltas == [
        HandleDelta(1, TokenDelta([5])),
        HandleDelta(2, TokenDelta([6, 7])),
    ]
    assert mapped.ended == []


@pytest.mark.parametrize(
    ("reason", "ours"),
    [
        (FinishReason.STOP, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.REPETITION, "stop"),
    ],
)
def test_a_finish_is_named_and_final(reason: FinishReason, ours: str) -> None:
    source = mapper()
    (entry,) = step(source, output([5], finish_reason=reason)).step.deltas
    assert entry.delta.finish_reason == ours
    assert source.num_live == 0
    assert step(source, output([6])).step.deltas == []


def test_the_stop_token_that_was_hit_is_named() -> None:
    reason = FinishReason.STOP
    (entry,) = step(mapper(), output([5], finish_reason=reason, stop_reason=5)).step.deltas
    assert entry.delta.stop_token_id == 5
    (entry,) = step(mapper(), output([5], finish_reason=reason, stop_reason="eos")).step.deltas
    assert entry.delta.stop_token_id is None


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_a_bad_end_is_never_a_finish(reason: FinishReason) -> None:
    mapped = step(mapper(), output([5], finish_reason=reason))
    assert mapped.step.deltas == []
    assert [type(end) for end in mapped.ended] == [Failed]


def test_a_constraint_that_does_not_compile_is_the_requests_fault() -> None:
    constrained = SamplingParams(max_tokens=8, structured=StructuredOutput(regex="a"))
    mapped = step(mapper(constrained), output([], finish_reason=FinishReason.ERROR))
    (refusal,) = mapped.ended
    assert isinstance(refusal, Refused)
    assert refusal.param == "structured"


def test_a_constraint_that_fails_later_is_the_engines_fault() -> None:
    source = mapper(SamplingParams(max_tokens=8, structured=StructuredOutput(regex="a")))
    step(source, output([5]))
    (end,) = step(source, output([], finish_reason=FinishReason.ERROR)).ended
    assert isinstance(end, Failed)


def test_the_forgotten_are_not_heard() -> None:
    source = mapper()
    assert source.forget(1)
    assert not source.forget(1)
    mapped = step(source, output([5]), output([], finish_reason=FinishReason.ABORT))
    assert (mapped.step.deltas, mapped.ended) == ([], [])


def test_logprobs_are_cut_to_what_this_generation_asked_for() -> None:
    source = mapper(SamplingParams(max_tokens=8, logprobs=1))
    rows = lists([[5, 9, 5], [6, 6, 7]], [[-2.0, -1.0, -2.0], [-0.5, -0.5, -3.0]], [2, 1])
    (entry,) = step(source, output([5, 6], new_logprobs=rows)).step.deltas
    assert entry.delta.logprobs == [
        TokenLogprobs([5, 9], [-2.0, -1.0], 2),
        TokenLogprobs([6, 6], [-0.5, -0.5], 1),
    ]


def test_the_whole_vocabulary_is_kept_if_asked_for() -> None:
    source = mapper(SamplingParams(max_tokens=8, logprobs=-1))
    rows = lists([[5, 9, 5]], [[-2.0, -1.0, float("-inf")]], [2])
    (entry,) = step(source, output([5], new_logprobs=rows)).step.deltas
    assert entry.delta.logprobs == [TokenLogprobs([5, 9, 5], [-2.0, -1.0, float("-inf")], 2)]


def test_prompt_logprobs_are_gathered_over_the_pieces_of_a_prefill() -> None:
    source = mapper(SamplingParams(max_tokens=8, prompt_logprobs=0))
    first = output([], new_prompt_logprobs_tensors=tensors([[2, 9]], [[-1.0, -1.0]], [1]))
    assert step(source, first).step.deltas == []
    last = output([7], new_prompt_logprobs_tensors=tensors([[3, 9]], [[-2.0, -1.0]], [4]))
    (entry,) = step(source, last).step.deltas
    assert entry.delta.prompt_logprobs == [
        None,
        TokenLogprobs([2], [-1.0], 1),
        TokenLogprobs([3], [-2.0], 4),
    ]
    (entry,) = step(source, output([8])).step.deltas
    assert entry.delta.prompt_logprobs is None


def test_cached_tokens_are_told_with_the_first_token() -> None:
    stats = PrefillStats(num_prompt_tokens=40, num_cached_tokens=32)
    (entry,) = step(mapper(), output([5], prefill_stats=stats)).step.deltas
    assert entry.delta.num_cached_tokens == 32


def test_a_step_counts_its_output_and_what_was_computed_of_prompts() -> None:
    source = mapper()
    source.begin(2, PLAIN)
    stats = PrefillStats(num_prompt_tokens=40, num_computed_tokens=8, num_cached_tokens=32)
    assert step(source, output([5], prefill_stats=stats), output([6, 7], 2)).step.num_tokens == 11
    assert step(source, output([8])).step.num_tokens == 1


def test_the_wait_for_a_seat_is_told_with_the_first_token() -> None:
    events = [
        EngineCoreEvent(EngineCoreEventType.QUEUED, 10.0),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, 12.5),
        EngineCoreEvent(EngineCoreEventType.PREEMPTED, 13.0),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, 20.0),
    ]
    stats = PrefillStats(num_prompt_tokens=4, num_cached_tokens=0)
    (entry,) = step(mapper(), output([5], events=events, prefill_stats=stats)).step.deltas
    assert entry.delta.queue_s == 2.5


def scheduler_stats(running: int, hits: int) -> SchedulerStats:
    return SchedulerStats(
        num_running_reqs=running,
        num_waiting_reqs=2,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.5,
        prefix_cache_stats=PrefixCacheStats(queries=10, hits=hits),
    )


def test_stats_are_totals_and_sent_when_they_change() -> None:
    source = mapper()
    assert step(source, stats=scheduler_stats(1, 4)).step.stats == EngineStats(
        1, 3, 0.5, prefix_cache_queries=10, prefix_cache_hits=4
    )
    assert step(source, stats=scheduler_stats(2, 5)).step.stats == EngineStats(
        2, 3, 0.5, prefix_cache_queries=20, prefix_cache_hits=9
    )
    unchanged = scheduler_stats(2, 0)
    unchanged.prefix_cache_stats = PrefixCacheStats()
    assert step(source, stats=unchanged).step.stats is None


def test_preemptions_are_counted_also_of_the_forgotten() -> None:
    source = StepMapper()
    preempted = EngineCoreEvent.new_event(EngineCoreEventType.PREEMPTED)
    queued = EngineCoreEvent.new_event(EngineCoreEventType.QUEUED)
    mapped = step(source, output([], events=[queued, preempted]), stats=scheduler_stats(0, 0))
    assert mapped.step.stats is not None
    assert mapped.step.stats.num_preemptions == 1


def test_an_idle_engine_has_no_load_but_keeps_its_totals() -> None:
    source = mapper()
    step(source, stats=scheduler_stats(2, 5))
    assert source.idle_stats() == EngineStats(prefix_cache_queries=10, prefix_cache_hits=5)
