"""The steps of one pipeline: which are under way, and when each leaves it.

A pure core; the caller has the clock. As in vLLM's `EngineCore.step_with_batch_queue` (0.32,
`v1/engine/core.py`), up to as many steps as stages are under way, and a new one is planned as soon
as fewer are, from the sequences that take part in none. A step enters a stage when it has left the
stage before and the step before it has left this one. So a token's latency is the sum over the
stages, and at saturation a step completes each time that the slowest stage takes; stages idle when
steps are uneven or missing (the bubbles). Like vLLM it does not spread sequences over the steps:
those admitted together stay together, and few of them leave stages idle
(`ContinuousBatcher.max_seqs_per_step` limits that).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from placement.simulator.batching import ContinuousBatcher, Step
from placement.simulator.step_time import StepTime


class StepPipeline:
    """Takes steps from a batcher through the stages.

    speed: how fast the machine is, as a share of what `stages` say. Holds from the next step on.
    busy_s: by stage, the time in which it computed, or will have with the steps under way.
    """

    def __init__(self, batcher: ContinuousBatcher, stages: Sequence[StepTime]) -> None:
        if not stages:
            raise ValueError("stages must not be empty")
        self.batcher = batcher
        self.speed = 1.0
        self.busy_s = [0.0] * len(stages)
        self._stages = list(stages)
        self._free_at_s = [0.0] * len(stages)
        self._under_way: deque[tuple[float, Step]] = deque()

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    @property
    def due_s(self) -> float:
        """When the first step under way leaves the last stage; infinite if there is none."""
        return self._under_way[0][0] if self._under_way else math.inf

    def begin(self, now_s: float) -> None:
        """Plan as many steps as may be under way and have sequences to compute."""
        while len(self._under_way) < len(self._stages):
            step = self.batcher.plan(now_s=now_s)
            if step is None:
                break
            self._under_way.append((self._pass_stages(step, now_s), step))

    def take_due(self, now_s: float) -> Step | None:
        """The first step, if it has left the last stage by now; it is the caller's to complete."""
        return self._under_way.popleft()[1] if self.due_s <= now_s else None

    def _pass_stages(self, step: Step, now_s: float) -> float:
        """Take each stage's time for a step that begins now. Returns when it leaves the last."""
        at_s = now_s
        for index, stage in enumerate(self._stages):
            step_s = stage.step_s(step.work) / self.speed
            self.busy_s[index] += step_s
            at_s = max(at_s, self._free_at_s[index]) + step_s
            self._free_at_s[index] = at_s
        return at_s
