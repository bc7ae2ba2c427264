"""What of a pipeline decides its times in simulation: its stages' step times and its limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from placement.errors import Infeasible
from placement.estimator import Estimator, Stage
from placement.simulator.batching import ContinuousBatcher
from placement.simulator.stage_time import stage_times
from placement.simulator.step_pipeline import StepPipeline
from placement.simulator.step_time import StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPipeline:
    """stages: the step time of each. The limits are vLLM's: see `ContinuousBatcher`."""

    stages: tuple[StepTime, ...]
    num_kv_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_seqs_per_step: int | None = None
    enable_prefix_caching: bool = False

    @property
    def num_kv_tokens(self) -> int:
        return self.num_kv_blocks * self.block_size

    def start(self) -> StepPipeline:
        """An empty pipeline."""
        batcher = ContinuousBatcher(
            num_blocks=self.num_kv_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_seqs_per_step=self.max_seqs_per_step,
            enable_prefix_caching=self.enable_prefix_caching,
        )
        return StepPipeline(batcher, self.stages)


def simulated_pipeline(
    estimator: Estimator,
    stages: Sequence[Stage],
    *,
    max_num_seqs: int | None = None,
    block_size: int = 16,
    spread_over_stages: bool = False,
) -> SimulatedPipeline:
    """The pipeline that an estimate is of, with the estimate's memory and limits.

    max_num_seqs: requests in flight, by default the estimator's largest batch.
    spread_over_stages: give each step at most its equal share of them.
    Raises Infeasible if the weights do not fit or leave no room for KV.
    """
    fidelity = estimator.fidelity
    num_blocks = math.floor(num_kv_tokens(estimator, stages) / block_size)
    if num_blocks < 1:
        raise Infeasible("the weights leave no room for the KV cache")
    seats = max_num_seqs or max(1, estimator.max_batch(stages))
    return SimulatedPipeline(
        stages=tuple(stage_times(estimator, stages)),
        num_kv_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=seats,
        max_num_batched_tokens=fidelity.max_tokens_per_pass,
        max_seqs_per_step=math.ceil(seats / len(stages)) if spread_over_stages else None,
    )


def num_kv_tokens(estimator: Estimator, stages: Sequence[Stage]) -> float:
    """Tokens whose KV fits every stage; negative if the weights do not.

    With sliding windows a token takes what it takes on average in a sequence of the workload.
    """
    model, length = estimator.model, estimator.workload.mean_held_tokens
    share = model.cached_tokens(length) / length
    limits = []
    for index, stage in enumerate(stages):
        weights = estimator.weight_bytes(
            stage.kind,
            stage.num_layers,
            is_first=index == 0,
            is_last=index == len(stages) - 1,
        )
        free = estimator.stage_memory(stage.kind).available - weights
        limits.append(free / (stage.num_layers * share * model.kv_bytes_per_token(stage.tp)))
    return min(limits)
