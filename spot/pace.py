"""How fast pipelines are seen to be, and what follows from it: weights, sub-nodes, stalls."""

from __future__ import annotations

from collections.abc import Collection

from spot.failover_policy import FailoverPolicy
from spot.fleet_records import Live, Pipeline


def observe_tokens(live: Live, pipeline: Pipeline, num_tokens: int, now_s: float) -> None:
    """Learn from tokens that a generation put out there. Called for each delta."""
    if not live.num_leg_tokens:
        _observe_prefill(live, pipeline, now_s)
    else:
        step_s = (now_s - live.progress_s) / max(1, num_tokens)
        pipeline.step_s += 0.05 * (step_s - pipeline.step_s) if pipeline.step_s else step_s


def _observe_prefill(live: Live, pipeline: Pipeline, now_s: float) -> None:
    """Learn how fast prompts are read there, waiting and cached ones included."""
    elapsed_s = now_s - live.started_s
    if live.num_context >= 256 and elapsed_s > 0:
        rate = live.num_context / elapsed_s
        known = pipeline.prefill_tokens_per_s or rate
        pipeline.prefill_tokens_per_s = known + 0.1 * (rate - known)


class ThroughputWatch:
    """Observes each pipeline's tokens per second, and corrects weights by what is seen.

    Only a pipeline whose seats are taken shows what it can do. The correction is what it does in
    relation to its weight, against the mean of those that show it.
    """

    def __init__(self) -> None:
        self._counted_s: float | None = None

    def count(self, pipelines: Collection[Pipeline], now_s: float) -> None:
        """Call about once a second; what comes sooner changes nothing."""
        if self._counted_s is None:
            self._counted_s = now_s
        elapsed_s = now_s - self._counted_s
        if elapsed_s < 1.0:
            return
        self._counted_s = now_s
        for pipeline in pipelines:
            rate = (pipeline.num_tokens - pipeline.num_counted) / elapsed_s
            pipeline.num_counted = pipeline.num_tokens
            pipeline.tokens_per_s += 0.3 * (rate - pipeline.tokens_per_s)
        busy = [p for p in pipelines if p.load >= 0.8 and p.tokens_per_s > 0]
        if len(busy) > 1:
            mean = sum(p.tokens_per_s for p in busy) / sum(p.weight for p in busy)
            for pipeline in busy:
                target = pipeline.tokens_per_s / pipeline.weight / mean
                corrected = pipeline.correction + 0.2 * (target - pipeline.correction)
                pipeline.correction = min(4.0, max(0.25, corrected))


def boundary_after(live: Live, pipeline: Pipeline, policy: FailoverPolicy) -> int:
    """Number of output tokens at which the next sub-node ends: on a KV block's end."""
    tokens = subnode_tokens(pipeline, policy)
    prompt = len(live.generation.prompt_token_ids)
    end = prompt + len(live.output) + tokens
    aligned = end - end % pipeline.block_size if tokens >= pipeline.block_size else end
    return max(len(live.output) + 1, aligned - prompt)


def subnode_tokens(pipeline: Pipeline, policy: FailoverPolicy) -> int:
    """Output tokens of a whole sub-node: those of `subnode_s`, but a KV block at least."""
    if policy.subnode_tokens is not None:
        return policy.subnode_tokens
    step_s = pipeline.step_s or 0.02
    return min(256, max(pipeline.block_size, int(policy.subnode_s / step_s)))


def subnode_s(pipeline: Pipeline, policy: FailoverPolicy) -> float:
    """How long a sub-node takes there."""
    return max(policy.subnode_s, subnode_tokens(pipeline, policy) * pipeline.step_s)


def stall_limit_s(pipeline: Pipeline, policy: FailoverPolicy) -> float:
    """Silence that is a fault: more than what is being computed can explain.

    Prompts may be read ten times slower than usual, but no slower than the policy's worst.
    """
    slowest = policy.slowest_prefill_tokens_per_s
    starting = (live for live in pipeline.legs.values() if not live.num_leg_tokens)
    num_prefill = sum(live.num_context for live in starting)
    return (
        policy.stall_base_s
        + policy.stall_steps * pipeline.step_s
        + num_prefill / max(slowest, pipeline.prefill_tokens_per_s / 10)
    )


def why_stalled(pipeline: Pipeline, policy: FailoverPolicy, now_s: float) -> str | None:
    """In words, if a pipeline owes tokens and has been silent for longer than can be explained."""
    limit_s = stall_limit_s(pipeline, policy)
    silent_s = now_s - pipeline.progress_s
    if pipeline.legs and silent_s > limit_s:
        return f"no token for {silent_s:.1f} s (limit {limit_s:.1f} s)"
    return None
