"""Time, memory, batch, throughput and latency of pipelines.

Sources: ShuntServe equations 1 to 6. Two readings of the batch B (trap: equation 5 says nothing of
micro-batches):
- `batch` (the paper's): all B requests pass a stage together. L(B) = max prefill + max decode, the
  two maxima over the stages apart; the latency of a request is the sum over the stages. Equation 6
  counts the KV of each at full length.
- `continuous`: B requests are in flight in D_PP groups, as in a continuously batching engine. In
  each of S_out rounds every group passes every stage once, so
  L(B) = max over stages of D_PP · S_out · (a decoding step + mixed steps per step · what their
  prompts add), where `placement.pacing` says how many mixed steps and how often each counts. By
  Little's law L is also the latency of a request when the pipeline is saturated. A request counts
  in memory with what it holds on average (`Workload.mean_held_tokens`), and KV_MARGIN is left free.

`placement.simulator` is the judge of both: see docs/simulator.md for how far each is from it. The
maximum over stages takes them as equally fast for the bubbles, which is pessimistic where they are
not; `Estimator.paced_batch_s` does without that, but is no maximum over stages any more, which the
optimizer's proof needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Protocol

import numpy as np

from placement.errors import Infeasible
from placement.hardware import Shape
from placement.model import ModelSpec
from placement.pacing import pace
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

# Share of the KV space that the mean of all requests in flight may fill, in reading `continuous`:
# with more, an engine that admits prompts as they fit preempts and computes again what it admitted.
# In simulation 0.95 is the best of 0.85 to 1.05, by 8 to 14 % over no limit
# (benchmarks.placement_formulas).
KV_MARGIN = 0.95


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
    max_num_batched_tokens). max_batch: sequences in flight on one pipeline. is_monotone: whether no
    operation and no all-reduce takes less time for more requests in the pass, those that decode or
    those whose prompts it computes. The optimizer is exact without, and faster with it.
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
    is_monotone: bool = True


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

    @property
    def parts(self) -> tuple[Array, Array, Array, Array]:
        """Of a layer, and of what may follow the last one: near, far, logits."""
        return self.layer_s, self.near_s, self.far_s, self.logits_s


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

        Reading `continuous`: all of L(B) but `prefill_times`: what decodes, and what waits while
        other groups' prompts pass (see `placement.pacing`).
        """
        workload = self.workload
        if self.fidelity.reading == "batch":
            context = mean_decode_context(self.model, workload.input_tokens, workload.output_tokens)
            return self._phase_times(
                kind, decode_pass(batch, context), workload.output_tokens + 0 * batch
            )
        return _combine(
            lambda both, alone: both - alone,
            self.continuous_times(kind, batch, depth),
            self.prefill_times(kind, batch),
        )

    def continuous_times(self, kind: StageKind, batch: Array, depth: int | Array) -> PhaseTimes:
        """Both phases together in reading `continuous`: their sum alone is a time there.

        depth: one for all batches, or one for each.
        """
        num_steps = depth * self.workload.output_tokens
        return _combine(
            lambda decode, added: num_steps * (decode + added),
            *self._step_times(kind, batch, depth),
        )

    def _step_times(
        self, kind: StageKind, batch: Array, depth: int | Array
    ) -> tuple[PhaseTimes, PhaseTimes]:
        """One step of a group that decodes, and what prompts add to it on average."""
        groups = pace(batch, depth, self.workload, self.fidelity.max_tokens_per_pass)
        decode_s, mixed_s = self.group_times(kind, batch / depth, groups.num_prompts)
        added_s = _combine(
            # A kernel may do more tokens faster; no step goes faster for having more to do.
            lambda mixed, decode: groups.num_mixed * np.maximum(mixed - decode, 0.0),
            mixed_s,
            decode_s,
        )
        return decode_s, added_s

    def group_times(
        self, kind: StageKind, group: Array, num_prompts: Array
    ) -> tuple[PhaseTimes, PhaseTimes]:
        """One step of groups of so many requests: one that decodes only, and one with prompts.

        Reading `continuous`: all that depends on operations there. Both grow with both arguments
        where the fidelity `is_monotone`.
        """
        context = self.model.cached_tokens(self.workload.mean_held_tokens)
        decode = decode_pass(group, context)
        prompts = prefill_pass(
            self.model, num_prompts, self.workload.input_tokens, self.fidelity.traits
        )
        # Matrix products and messages see all tokens at once; attention runs over each kind apart.
        mixed = replace(
            prompts,
            num_tokens=prompts.num_tokens + decode.num_tokens,
            logit_rows=prompts.logit_rows + decode.logit_rows,
        )
        attention_s = self.attention_s(kind, decode)
        return (
            self._pass_times(kind, decode, attention_s),
            self._pass_times(kind, mixed, attention_s + self.attention_s(kind, prompts)),
        )

    def attention_s(self, kind: StageKind, work: Pass) -> Quantity:
        """Seconds of one layer's attention for one pass."""
        operations = layer_operations(self.model, kind.tp, work)
        attention = next(one for one in operations if one.name == "attention")
        return self.fidelity.operation_time(attention, work, kind.shape.gpu)

    def other_operations_s(self, kind: StageKind, work: Pass) -> Quantity:
        """Seconds of all the rest of one layer for one pass: it depends on the tokens alone."""
        seconds = self.fidelity.all_reduce_time(self.model, kind.tp, work, kind.shape)
        for operation in layer_operations(self.model, kind.tp, work):
            if operation.name != "attention":
                seconds = seconds + self.fidelity.operation_time(operation, work, kind.shape.gpu)
        return seconds

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
        """Equation 6: the most requests whose KV fits every stage; 0 if none.

        Reading `batch`: at full length; `continuous`: see the top.
        """
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

    def paced_batch_s(self, stages: Sequence[Stage], batch: int) -> float:
        """L(B) of reading `continuous` for stages that are not equally fast, in seconds.

        The recursion of `placement.pacing` grows along the slower of two ways: past the slowest
        stage alone, where a prompt counts once; or with a group past all stages at each prompt, for
        a share ν = D / (D − 1 + 1/q) of the steps, q being the share of mixed steps, and past the
        slowest stage between. Then prompts count as in stages of mean speed.
        """
        depth, sizes = len(stages), np.array([float(batch)])
        groups = pace(sizes, depth, self.workload, self.fidelity.max_tokens_per_pass)
        decode_s, added_s = np.array(
            [
                [self._stage_s(stages, index, times) for times in steps]
                for index, stage in enumerate(stages)
                for steps in [self._step_times(stage.kind, sizes, depth)]
            ]
        ).T
        mixed = float(groups.share_mixed[0])
        once_s = (decode_s + added_s * (mixed / float(groups.num_mixed[0]))).max()
        nu = depth / (depth - 1 + 1 / min(mixed, 1.0))
        lap_s = (1 - nu) * decode_s.max() + nu * decode_s.mean() + added_s.mean()
        return self.workload.output_tokens * depth * float(max(once_s, lap_s))

    def phase_s(self, stages: Sequence[Stage], batch: int) -> tuple[list[float], list[float]]:
        """Prefill and decode seconds of each stage for a whole batch, hops included."""
        sizes = np.array([float(batch)])
        kinds = {stage.kind for stage in stages}
        prefill = {kind: self.prefill_times(kind, sizes) for kind in kinds}
        decode = {kind: self.decode_times(kind, sizes, len(stages)) for kind in kinds}
        return (
            [self._stage_s(stages, i, prefill[one.kind]) for i, one in enumerate(stages)],
            [self._stage_s(stages, i, decode[one.kind]) for i, one in enumerate(stages)],
        )

    def _stage_s(self, stages: Sequence[Stage], index: int, times: PhaseTimes) -> float:
        """The time of one stage for one batch: its layers, and the logits or the hop."""
        stage = stages[index]
        total = stage.num_layers * times.layer_s
        if index == len(stages) - 1:
            total = total + times.logits_s
        elif stages[index + 1].node == stage.node:
            total = total + times.near_s
        else:
            total = total + times.far_s
        return float(total[0])

    def _phase_times(self, kind: StageKind, work: Pass, num_passes: Array) -> PhaseTimes:
        times = self._pass_times(kind, work, self.attention_s(kind, work))
        return _combine(lambda one: num_passes * one, times)

    def _pass_times(self, kind: StageKind, work: Pass, attention_s: Quantity) -> PhaseTimes:
        """Of one pass, its attention given."""
        none = 0.0 * np.asarray(work.num_tokens)
        return PhaseTimes(
            layer_s=none + self.other_operations_s(kind, work) + attention_s,
            logits_s=none + self.logits_s(kind, work),
            near_s=none + hop_s(self.model, work, kind.shape.intra),
            far_s=none + hop_s(self.model, work, kind.shape.inter),
        )

    def _stage_memory(self, kind: StageKind) -> StageMemory:
        model, fidelity, workload = self.model, self.fidelity, self.workload
        total = kind.shape.gpu.memory_bytes * fidelity.usable_memory - fidelity.reserved_bytes
        length: float = workload.input_tokens + workload.output_tokens
        if fidelity.reading == "continuous":
            length = workload.mean_held_tokens / KV_MARGIN
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


def _combine(function: Callable[..., Array], *times: PhaseTimes) -> PhaseTimes:
    """A function of the same time of each."""
    return PhaseTimes(
        **{
            one.name: function(*(getattr(part, one.name) for part in times))
            for one in fields(PhaseTimes)
        }
    )


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
