"""Executes dispatches in simulated time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from workflows.scheduling.messages import Dispatch, Size
from workflows.simulation.llm_pipeline import LlmPipeline
from workflows.simulation.testbed import Testbed
from workflows.simulation.timeline import Timeline

OnProgress = Callable[[float, float], None]
OnEnd = Callable[[float], None]


@dataclass(slots=True)
class Usage:
    """Calls and busy seconds of one resource."""

    num_calls: int = 0
    busy_s: float = 0.0


class Machines:
    """The resources of a testbed. Times vary by `noise`, the same way in every system's run."""

    def __init__(self, testbed: Testbed, timeline: Timeline, seed: int) -> None:
        self._testbed = testbed
        self._timeline = timeline
        self._random = random.Random(seed)
        self._pipelines = [
            LlmPipeline(timeline, testbed.llm, subnode_tokens=testbed.subnode_tokens)
            for _ in range(testbed.num_llm)
        ]
        self._costs = testbed.costs()
        self.usage = {name: Usage() for name in testbed.slots}

    def run(
        self, dispatch: Dispatch, profile: str, size: Size, on_progress: OnProgress, on_end: OnEnd
    ) -> None:
        """on_progress: seconds so far and output made; on_end: seconds in all."""
        started_s = self._timeline.now_s
        usage = self.usage[dispatch.resource]
        usage.num_calls += 1

        def end() -> None:
            service_s = self._timeline.now_s - started_s
            usage.busy_s += service_s
            on_end(service_s)

        if dispatch.resource != "llm":
            self._timeline.after(self._call_s(profile, size), end)
            return
        pipeline = min(self._pipelines, key=len)
        pipeline.add(
            size.inputs,
            size.outputs,
            priority=dispatch.priority,
            on_subnode=lambda made: on_progress(self._timeline.now_s - started_s, made),
            on_end=end,
        )

    def _call_s(self, profile: str, size: Size) -> float:
        if profile == "web":
            return self._testbed.web_median_s * self._random.lognormvariate(
                0.0, self._testbed.web_sigma
            )
        factor = max(0.3, self._random.gauss(1.0, self._testbed.noise))
        return self._costs[profile].of(size) * factor
