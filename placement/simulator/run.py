"""Requests through one simulated pipeline: when each got its first token, when its last.

Event-driven, without an event loop: a second of serving costs what its tokens cost to count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from placement.simulator.batching import BatchedSequence
from placement.simulator.simulated_pipeline import SimulatedPipeline
from placement.simulator.step_pipeline import StepPipeline


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A prompt of `input_tokens` that is answered with exactly `output_tokens`, both positive."""

    arrival_s: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When a request came, got its first token and its last."""

    request: SimulatedRequest
    first_token_s: float
    end_s: float

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens; None with only one."""
        gaps = self.request.output_tokens - 1
        return (self.end_s - self.first_token_s) / gaps if gaps else None

    @property
    def latency_s(self) -> float:
        return self.end_s - self.request.arrival_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a simulation saw.

    requests: in the order of their ends.
    makespan_s: from the first arrival to the last end.
    backlog_s: the last time at which a request still waited for its seat.
    busy_shares: by stage, of the makespan.
    mean_running: requests that held a seat, over the time until `backlog_s`.
    """

    requests: tuple[RequestTimes, ...]
    makespan_s: float
    backlog_s: float
    busy_shares: tuple[float, ...]
    mean_running: float
    num_preemptions: int
    num_steps: int

    @property
    def throughput_rps(self) -> float:
        """Requests over the makespan, with its beginning and its end."""
        return len(self.requests) / self.makespan_s

    def saturated_rps(self, warmup: float = 0.25) -> float:
        """Requests per second while others wait, after a share of the backlog's time.

        nan if the backlog was too short to say.
        """
        since_s = warmup * self.backlog_s
        num = sum(since_s < times.end_s <= self.backlog_s for times in self.requests)
        return num / (self.backlog_s - since_s) if num else math.nan


def simulate(
    pipeline: SimulatedPipeline, requests: Iterable[SimulatedRequest], *, speed: float = 1.0
) -> Simulation:
    """Serve requests, in the order of their arrival, until all have ended.

    Raises ValueError for a request that the KV cache cannot hold.
    """
    run = _Run(pipeline, sorted(requests, key=lambda request: request.arrival_s), speed)
    return run.to_end()


@dataclass(slots=True, eq=False)
class _Progress:
    request: SimulatedRequest
    end_length: int
    first_token_s: float | None = None


class _Run:
    def __init__(
        self, pipeline: SimulatedPipeline, requests: Sequence[SimulatedRequest], speed: float
    ) -> None:
        for request in requests:
            length = request.input_tokens + request.output_tokens
            if request.input_tokens < 1 or request.output_tokens < 1:
                raise ValueError(f"a request needs tokens: {request}")
            if length > pipeline.num_kv_tokens:
                raise ValueError(f"{length} tokens do not fit {pipeline.num_kv_tokens} of KV")
        self._requests = requests
        self._steps: StepPipeline = pipeline.start()
        self._steps.speed = speed
        self._progress: dict[BatchedSequence, _Progress] = {}
        self._ended: list[RequestTimes] = []
        self._num_arrived = 0
        self._num_steps = 0
        self._backlog_s = self._running_s = self._backlog_running_s = 0.0

    def to_end(self) -> Simulation:
        start_s = now_s = self._requests[0].arrival_s if self._requests else 0.0
        batcher = self._steps.batcher
        while True:
            self._arrive(now_s)
            self._steps.begin(now_s)
            if batcher.num_waiting:
                self._backlog_s, self._backlog_running_s = now_s, self._running_s
            next_s = min(self._steps.due_s, self._next_arrival_s())
            if next_s == math.inf:
                break
            self._running_s += len(batcher.running) * (next_s - now_s)
            now_s = next_s
            self._complete_due(now_s)
        makespan_s = now_s - start_s
        backlog_s = self._backlog_s - start_s
        return Simulation(
            requests=tuple(self._ended),
            makespan_s=makespan_s,
            backlog_s=backlog_s,
            busy_shares=tuple(busy / makespan_s for busy in self._steps.busy_s)
            if makespan_s
            else (),
            mean_running=self._backlog_running_s / backlog_s if backlog_s > 0 else 0.0,
            num_preemptions=batcher.num_preemptions,
            num_steps=self._num_steps,
        )

    def _next_arrival_s(self) -> float:
        if self._num_arrived == len(self._requests):
            return math.inf
        return self._requests[self._num_arrived].arrival_s

    def _arrive(self, now_s: float) -> None:
        while self._next_arrival_s() <= now_s:
            request = self._requests[self._num_arrived]
            sequence = self._steps.batcher.add(str(self._num_arrived), [0] * request.input_tokens)
            end_length = request.input_tokens + request.output_tokens
            self._progress[sequence] = _Progress(request, end_length)
            self._num_arrived += 1

    def _complete_due(self, now_s: float) -> None:
        batcher = self._steps.batcher
        while (step := self._steps.take_due(now_s)) is not None:
            self._num_steps += 1
            for sequence in batcher.complete(step):
                progress = self._progress[sequence]
                if progress.first_token_s is None:
                    progress.first_token_s = now_s
                if len(sequence.token_ids) + 1 < progress.end_length:
                    sequence.token_ids.append(0)
                    continue
                batcher.finish(sequence)
                del self._progress[sequence]
                times = RequestTimes(progress.request, progress.first_token_s, now_s)
                self._ended.append(times)
