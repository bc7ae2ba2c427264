"""One step of vLLM's engine core as one `Step` of ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import SchedulerStats

from spot.engines.base import EngineStats
from spot.engines.codec import Failed, HandleDelta, Refused, Step
from spot.generation import FinishReason as OurFinishReason
from spot.generation import SamplingParams, TokenDelta, TokenLogprobs

_FINISHES: dict[int, OurFinishReason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.REPETITION: "stop",
}


@dataclass(slots=True)
class _Live:
    """What must be remembered of a running generation to read its outputs.

    prompt_logprobs: gathered over the prefill's pieces; None once delivered or never asked for.
    constrained: its output is constrained and has not begun.
    """

    num_logprobs: int | None
    num_prompt_logprobs: int | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    constrained: bool
    queued_s: float | None = None
    queue_s: float | None = None


@dataclass(slots=True)
class MappedStep:
    """What one engine step says: one Step, and the generations that it ended badly."""

    step: Step
    ended: list[Refused | Failed] = field(default_factory=list)


class StepMapper:
    """Reads engine core outputs. Request ids are the wire's handles, in decimal."""

    def __init__(self) -> None:
        self._live: dict[int, _Live] = {}
        self._stats = EngineStats()

    @property
    def num_live(self) -> int:
        return len(self._live)

    def begin(self, handle: int, sampling: SamplingParams, *, resumed: bool = False) -> None:
        """Expect outputs for a generation from now on. resumed: it has output from elsewhere."""
        asked = sampling.prompt_logprobs is not None and not resumed
        self._live[handle] = _Live(
            num_logprobs=sampling.logprobs,
            num_prompt_logprobs=sampling.prompt_logprobs,
            prompt_logprobs=[None] if asked else None,
            constrained=sampling.structured is not None and not resumed,
        )

    def is_live(self, handle: int) -> bool:
        return handle in self._live

    def forget(self, handle: int) -> bool:
        """Ignore a generation's outputs from now on. Returns whether it was live."""
        return self._live.pop(handle, None) is not None

    def idle_stats(self) -> EngineStats:
        """The stats after the last generation was aborted: the engine reports none then."""
        self._stats = EngineStats(
            prefix_cache_queries=self._stats.prefix_cache_queries,
            prefix_cache_hits=self._stats.prefix_cache_hits,
            num_preemptions=self._stats.num_preemptions,
        )
        return self._stats

    def map(self, outputs: EngineCoreOutputs) -> MappedStep:
        """One Step for everything that the engine says about live generations."""
        mapped = MappedStep(Step([]))
        num_preemptions = 0
        for output in outputs.outputs:
            mapped.step.num_tokens += len(output.new_token_ids)
            if output.prefill_stats is not None:
                mapped.step.num_tokens += output.prefill_stats.num_computed_tokens
            if output.events:
                num_preemptions += _num_preemptions(output.events)
                self._note_queue(output)
            self._map_output(output, mapped)
        mapped.step.stats = self._new_stats(outputs.scheduler_stats, num_preemptions)
        return mapped

    def _note_queue(self, output: EngineCoreOutput) -> None:
        """Remember how long a generation waited until it was scheduled for the first time."""
        live = self._live.get(int(output.request_id))
        if live is None or live.queue_s is not None:
            return
        for event in output.events or ():
            if event.type == EngineCoreEventType.QUEUED:
                live.queued_s = event.timestamp
            elif event.type == EngineCoreEventType.SCHEDULED and live.queued_s is not None:
                live.queue_s = event.timestamp - live.queued_s
                return

    def _map_output(self, output: EngineCoreOutput, mapped: MappedStep) -> None:
        handle = int(output.request_id)
        live = self._live.get(handle)
        if live is None:
            return
        reason = output.finish_reason
        if reason is not None:
            del self._live[handle]
            if reason not in _FINISHES:
                mapped.ended.append(_bad_end(handle, live, reason))
                return
        if output.new_prompt_logprobs_tensors is not None and live.prompt_logprobs is not None:
            live.prompt_logprobs += _prompt_logprobs(
                output.new_prompt_logprobs_tensors, live.num_prompt_logprobs
            )
        if output.new_token_ids or reason is not None:
            mapped.step.deltas.append(HandleDelta(handle, _delta(output, live)))

    def _new_stats(
        self, scheduler: SchedulerStats | None, num_preemptions: int
    ) -> EngineStats | None:
        """The totals after this step, or None if nothing changed."""
        if scheduler is None:
            return None
        stats = EngineStats(
            running=scheduler.num_running_reqs,
            waiting=scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs,
            kv_cache_usage=scheduler.kv_cache_usage,
            prefix_cache_queries=(
                self._stats.prefix_cache_queries + scheduler.prefix_cache_stats.queries
            ),
            prefix_cache_hits=self._stats.prefix_cache_hits + scheduler.prefix_cache_stats.hits,
            num_preemptions=self._stats.num_preemptions + num_preemptions,
        )
        if stats == self._stats:
            return None
        self._stats = stats
        return stats


def _num_preemptions(events: list[Any]) -> int:
    return sum(event.type == EngineCoreEventType.PREEMPTED for event in events)


def _bad_end(handle: int, live: _Live, reason: FinishReason) -> Refused | Failed:
    """An end that is not a finish. A constraint that fails before its first token is the request's
    fault: it passed validation, but could not be compiled."""
    if reason == FinishReason.ERROR and live.constrained:
        return Refused(handle, "the output constraint could not be compiled", "structured")
    return Failed(handle, f"the engine ended this generation ({reason})")


def _delta(output: EngineCoreOutput, live: _Live) -> TokenDelta:
    delta = TokenDelta(output.new_token_ids)
    live.constrained = False
    if output.finish_reason is not None:
        delta.finish_reason = _FINISHES[output.finish_reason]
        if isinstance(output.stop_reason, int):
            delta.stop_token_id = output.stop_reason
    if output.new_logprobs is not None and live.num_logprobs is not None:
        lists = output.new_logprobs
        delta.logprobs = _rows(
            lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks, live.num_logprobs
        )
    if live.prompt_logprobs is not None:
        delta.prompt_logprobs, live.prompt_logprobs = live.prompt_logprobs, None
    if output.prefill_stats is not None:
        delta.num_cached_tokens = output.prefill_stats.num_cached_tokens
        delta.queue_s = live.queue_s
    return delta


def _prompt_logprobs(tensors: Any, num_logprobs: int | None) -> list[TokenLogprobs]:
    return _rows(
        tensors.logprob_token_ids, tensors.logprobs, tensors.selected_token_ranks, num_logprobs
    )


def _rows(
    token_ids: Any, logprobs: Any, ranks: Any, num_logprobs: int | None
) -> list[TokenLogprobs]:
    """One entry per row of the arrays, cut to the number asked for.

    The engine fills rows to the widest request of the batch. -1 keeps the whole vocabulary.
    """
    width = None if num_logprobs is None or num_logprobs < 0 else num_logprobs + 1
    return [
        TokenLogprobs(ids, values, rank)
        for ids, values, rank in zip(
            token_ids[:, :width].tolist(),
            logprobs[:, :width].tolist(),
            ranks.tolist(),
            strict=True,
        )
    ]
