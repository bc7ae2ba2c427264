"""Time, memory, batch, throughput and latency of pipelines.

Sources: ShuntServe equations 1 to 6. Two readings of the batch B (trap: equation 5 says nothing of
micro-batches):
- `batch` (the paper's): all B requests pass a stage together. L(B) = max prefill + max decode, the
  two maxima over the stages apart; the latency of a request is the sum over the stages.
- `continuous`: B requests are in flight, spread over the D_PP stages as B / D_PP at each, as a
  continuously batching engine does. A stage serves both phases in turn, so
  L(B) = max over stages of (prefill of all B + D_PP · S_out steps of B / D_PP each), and by
  Little's law L is also the latency of a request when the pipeline is saturated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from placement.errors import Infeasible
from placement.hardware import Shape
from placement.model import ModelSpec
from placement.roofline import (
    Array,
    EngineTraits,
    OperationTime,
    Pass,
    Quantity,
    all_reduce_s,
    decode_pass,
    hop_s,
    layer_operations,
    logits_operation,
    mean_decode_context,
    prefill_pass,
    roofline_s,
)
from placement.workload import Workload

Reading = Literal["batch", "continuous"]


class AllReduceTime(Protocol):
    """Seconds of the all-reduces of one layer over `tp` GPUs of a machine."""

    def __call__(self, model: ModelSpec, tp: int, work: Pass, shape: Shape, /) -> Quantity: ...


def ring_all_reduces_s(model: ModelSpec, tp: int, work: Pass, shape: Shape) -> Quantity:
    """Equation 3, by the link between the machine's GPUs."""
    return all_reduce_s(model, tp, work, shape.intra)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """Which formulas an estimate takes.

    usable_memory: share of a GPU's memory for weights, activations and KV (vLLM's
    gpu_memory_utilization). reserved_bytes: taken from each GPU besides (CUDA context, graphs).
    max_tokens_per_pass: new tokens in one pass; bounds the activations (vLLM's
    max_num_batched_tokens). max_batch: sequences in flight on one pipeline.
    """

    name: str
    reading: Reading
    traits: EngineTraits
    operation_time: OperationTime = roofline_s
    all_reduce_time: AllReduceTime = ring_all_reduces_s
    usable_memory: float = 1.0
    reserved_bytes: float = 0.0
    max_tokens_per_pass: int = 8192
    max_batch: int = 1024


PAPER = Fidelity(
    name="paper",
    reading="batch",
    traits=EngineTraits(is_attention_causal=False, computes_all_logits=True),
    max_tokens_per_pass=2048,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """`tp` GPUs of one shape that run consecutive layers together."""

    shape: Shape
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """Seconds of one kind of stage for one phase of all requests of a batch (arrays, by batch).

    layer_s: per layer, all-reduces included. logits_s: on the last stage. near_s, far_s: sending
    the result to a stage on the same machine, on another.
    """

    layer_s: Array
    logits_s: Array
    near_s: Array
    far_s: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on each GPU of one kind of stage.

    available: for weights and KV, activations and reserves taken off.
    """

    available: float
    layer_weights: float
    vocabulary: float
    layer_kv_per_request: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive layers on `tp` GPUs of one machine. node: which machine of its pipeline."""

    shape: Shape
    tp: int
    num_layers: int
    node: int

    @property
    def kind(self) -> StageKind:
        return StageKind(shape=self.shape, tp=self.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """What one stage takes: seconds for a whole batch by phase, bytes over all of its GPUs."""

    stage: Stage
    prefill_s: float
    decode_s: float
    weights_bytes: float
    kv_bytes: float
    available_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineEstimate:
    """batch: requests in flight. batch_s: L(B). The latencies: see `Estimator.evaluate`."""

    stages: tuple[StageEstimate, ...]
    batch: int
    batch_s: float
    throughput_rps: float
    ttft_s: float
    tpot_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Estimates for one model, workload and fidelity. Pure; the memory of stages is cached."""

    model: ModelSpec
    workload: Workload
    fidelity: Fidelity = PAPER
    _memory: dict[StageKind, StageMemory] = field(default_factory=dict, repr=False, compare=False)

    def prefill_times(self, kind: StageKind, batch: Array) -> PhaseTimes:
        """The prefill of each batch, in one pass."""
        tokens, traits = self.workload.input_tokens, self.fidelity.traits
        return self._phase_times(
            kind, prefill_pass(self.model, batch, tokens, traits), 1.0 + 0 * batch
        )

    def decode_times(self, kind: StageKind, batch: Array, depth: int) -> PhaseTimes:
        """All S_out decode steps of each batch in a pipeline of `depth` stages.

        Reading `continuous`: `depth` micro-batches of batch / depth, each with S_out passes.
        """
        num_micro = depth if self.fidelity.reading == "continuous" else 1
        workload = self.workload
        context = mean_decode_context(self.model, workload.input_tokens, workload.output_tokens)
        num_passes = num_micro * workload.output_tokens + 0 * batch
        return self._phase_times(kind, decode_pass(batch / num_micro, context), num_passes)

    def operation_times_s(self, kind: StageKind, work: Pass) -> dict[str, Quantity]:
        """Seconds of one layer for one pass, by operation, `all_reduce` among them."""
        times: dict[str, Quantity] = {
            operation.name: self.fidelity.operation_time(operation, work, kind.shape.gpu)
            for operation in layer_operations(self.model, kind.tp, work)
        }
        times["all_reduce"] = self.fidelity.all_reduce_time(self.model, kind.tp, work, kind.shape)
        return times

    def logits_s(self, kind: StageKind, work: Pass) -> Quantity:
        """Seconds of the LM head for one pass."""
        operation = logits_operation(self.model, kind.tp, work)
        return self.fidelity.operation_time(operation, work, kind.shape.gpu)

    def stage_memory(self, kind: StageKind) -> StageMemory:
        """The memory of each GPU of a kind of stage. Cached."""
        if kind not in self._memory:
            self._memory[kind] = self._stage_memory(kind)
        return self._memory[kind]

    def weight_bytes(
        self, kind: StageKind, num_layers: int, *, is_first: bool, is_last: bool
    ) -> float:
        """Weights on each GPU of a stage: its layers, embedding and LM head (one if tied)."""
        memory = self.stage_memory(kind)
        is_shared = self.model.tie_word_embeddings and is_first and is_last
        num_ends = 1 if is_shared else is_first + is_last
        return num_layers * memory.layer_weights + num_ends * memory.vocabulary

    def max_batch(self, stages: Sequence[Stage]) -> int:
        """Equation 6: the most requests whose KV fits every stage at full length; 0 if none."""
        limits = [self.fidelity.max_batch]
        for stage, (is_first, is_last) in _with_ends(stages):
            memory = self.stage_memory(stage.kind)
            free = memory.available - self.weight_bytes(
                stage.kind, stage.num_layers, is_first=is_first, is_last=is_last
            )
            limits.append(math.floor(free / (stage.num_layers * memory.layer_kv_per_request)))
        return max(0, min(limits))

    def evaluate(self, stages: Sequence[Stage], batch: int | None = None) -> PipelineEstimate:
        """What a pipeline does with `batch` requests in flight (default: as many as fit).

        Stages stand in order; those of one machine must be adjacent. A stage that hands on pays for
        the hop over its own machine's link. Without queueing:
        ttft_s: in reading `batch`, Σ prefill of the whole batch; in `continuous`, of one request.
        tpot_s: in `batch`, Σ decode / S_out; in `continuous`, L / S_out (with others' prefills).
        latency_s: in `batch`, Σ of both phases; in `continuous`, L.
        Raises Infeasible if layers do not add up, TP is impossible or the batch does not fit.
        """
        self._check(stages)
        limit = self.max_batch(stages)
        size = limit if batch is None else batch
        if not 1 <= size <= limit:
            raise Infeasible(f"a batch of {size} does not fit: at most {limit}")
        prefill, decode = self.phase_s(stages, size)
        output = self.workload.output_tokens
        if self.fidelity.reading == "batch":
            batch_s = max(prefill) + max(decode)
            ttft_s, tpot_s = sum(prefill), sum(decode) / output
            latency_s = sum(prefill) + sum(decode)
        else:
            batch_s = max(map(sum, zip(prefill, decode, strict=True)))
            ttft_s, tpot_s = sum(self.phase_s(stages, 1)[0]), batch_s / output
            latency_s = batch_s
        return PipelineEstimate(
            stages=self._stage_estimates(stages, size, prefill, decode),
            batch=size,
            batch_s=batch_s,
            throughput_rps=size / batch_s,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            latency_s=latency_s,
        )

    def phase_s(self, stages: Sequence[Stage], batch: int) -> tuple[list[float], list[float]]:
        """Prefill and decode seconds of each stage for a whole batch, hops included."""
        sizes = np.array([float(batch)])
        prefill: list[float] = []
        decode: list[float] = []
        for index, stage in enumerate(stages):
            phases = (
                self.prefill_times(stage.kind, sizes),
                self.decode_times(stage.kind, sizes, len(stages)),
            )
            for times, seconds in zip(phases, (prefill, decode), strict=True):
                total = stage.num_layers * times.layer_s
                if index == len(stages) - 1:
                    total = total + times.logits_s
                elif stages[index + 1].node == stage.node:
                    total = total + times.near_s
                else:
                    total = total + times.far_s
                seconds.append(float(total[0]))
        return prefill, decode

    def _phase_times(self, kind: StageKind, work: Pass, num_passes: Array) -> PhaseTimes:
        return PhaseTimes(
            layer_s=num_passes * sum(self.operation_times_s(kind, work).values()),
            logits_s=num_passes * self.logits_s(kind, work),
            near_s=num_passes * hop_s(self.model, work, kind.shape.intra),
            far_s=num_passes * hop_s(self.model, work, kind.shape.inter),
        )

    def _stage_memory(self, kind: StageKind) -> StageMemory:
        model, fidelity, workload = self.model, self.fidelity, self.workload
        total = kind.shape.gpu.memory_bytes * fidelity.usable_memory - fidelity.reserved_bytes
        length = workload.input_tokens + workload.output_tokens
        return StageMemory(
            available=total - activation_bytes(model, kind.tp, fidelity.max_tokens_per_pass),
            layer_weights=model.layer_weight_bytes(kind.tp),
            vocabulary=model.vocabulary_bytes(kind.tp),
            layer_kv_per_request=model.kv_bytes_per_token(kind.tp) * model.cached_tokens(length),
        )

    def _stage_estimates(
        self, stages: Sequence[Stage], batch: int, prefill: list[float], decode: list[float]
    ) -> tuple[StageEstimate, ...]:
        estimates = []
        for (stage, (is_first, is_last)), prefill_s, decode_s in zip(
            _with_ends(stages), prefill, decode, strict=True
        ):
            memory = self.stage_memory(stage.kind)
            weights = self.weight_bytes(
                stage.kind, stage.num_layers, is_first=is_first, is_last=is_last
            )
            estimates.append(
                StageEstimate(
                    stage=stage,
                    prefill_s=prefill_s,
                    decode_s=decode_s,
                    weights_bytes=stage.tp * weights,
                    kv_bytes=stage.tp * stage.num_layers * batch * memory.layer_kv_per_request,
                    available_bytes=stage.tp * memory.available,
                )
            )
        return tuple(estimates)

    def _check(self, stages: Sequence[Stage]) -> None:
        num_layers = sum(stage.num_layers for stage in stages)
        if num_layers != self.model.num_layers:
            raise Infeasible(f"{num_layers} layers are placed of {self.model.num_layers}")
        for stage in stages:
            if stage.num_layers < 1 or not self.model.allows_tp(stage.tp):
                raise Infeasible(f"{stage.num_layers} layers at TP {stage.tp} cannot run")


def activation_bytes(model: ModelSpec, tp: int, num_tokens: int) -> float:
    """The most that activations of a pass take on one GPU: a row in and out, and the widest product
    between them, in bytes."""
    widest = max(
        model.query_size + 2 * model.kv_size,
        (2 if model.is_ffn_gated else 1) * model.ffn_size,
    )
    return num_tokens * (2 * model.hidden_size + widest / tp) * model.activation_bytes


def _with_ends(stages: Sequence[Stage]) -> list[tuple[Stage, tuple[bool, bool]]]:
    """Each stage, with whether it is the first and the last."""
    last = len(stages) - 1
    return [(stage, (index == 0, index == last)) for index, stage in enumerate(stages)]
