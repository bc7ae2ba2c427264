"""What some layers of a model take on one kind of GPU: one part of a pipeline, on its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

from placement.errors import Infeasible, InvalidInput
from placement.estimator import Estimator, StageKind
from placement.model import ModelSpec
from placement.roofline import Pass, Quantity, decode_pass, mean_decode_context, prefill_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive layers on `kind`, as a pipeline of their own.

    is_bare: without embedding, LM head and links (all-reduces), as in measurements of single
    layers. num_prefill_tokens: of the prefill, in prompts of the workload's length, instead of
    batch · S_in. context: tokens in the KV cache in every decode step, instead of their mean over
    the output.
    """

    kind: StageKind
    num_layers: int
    is_bare: bool = False
    num_prefill_tokens: int | None = None
    context: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEstimate:
    """Seconds of one operation in all layers: of the prefill, and of one decode step."""

    prefill_s: float
    decode_step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEstimate:
    """prefill_s: of the whole batch. decode_s: of all its output, S_out steps of decode_step_s."""

    batch: int
    prefill_s: float
    decode_s: float
    decode_step_s: float
    max_batch: int
    throughput_rps: float
    by_operation: dict[str, OperationEstimate]


def estimate_part(estimator: Estimator, part: Part, batch: int | None = None) -> PartEstimate:
    """Time, memory and throughput of a part with `batch` requests (default: as many as fit).

    A batch above `max_batch` is estimated all the same. Raises InvalidInput if TP is impossible,
    Infeasible if no batch is given and none fits.
    """
    model, workload = estimator.model, estimator.workload
    if not model.allows_tp(part.kind.tp):
        raise InvalidInput(
            "tp",
            f"{part.kind.tp} cannot split {model.name} ({model.num_heads} heads, "
            f"{model.num_kv_heads} for keys and values); {_allowed_tps(model)} can",
        )
    limit = max_part_batch(estimator, part)
    size = limit if batch is None else batch
    if size < 1:
        raise Infeasible(_why_nothing_fits(estimator, part))
    prefill = _prefill(estimator, part, size)
    context = part.context or mean_decode_context(
        model, workload.input_tokens, workload.output_tokens
    )
    prefill_by = _by_operation(estimator, part, prefill)
    decode_by = _by_operation(estimator, part, decode_pass(size, context))
    prefill_s, decode_step_s = sum(prefill_by.values()), sum(decode_by.values())
    decode_s = workload.output_tokens * decode_step_s
    return PartEstimate(
        batch=size,
        prefill_s=prefill_s,
        decode_s=decode_s,
        decode_step_s=decode_step_s,
        max_batch=limit,
        throughput_rps=size / (prefill_s + decode_s),
        by_operation={
            name: OperationEstimate(prefill_s=prefill_by[name], decode_step_s=decode_by[name])
            for name in prefill_by
        },
    )


def _allowed_tps(model: ModelSpec) -> str:
    """`1, 2 and 4`"""
    allowed = [str(tp) for tp in range(1, model.num_heads + 1) if model.allows_tp(tp)]
    return " and ".join(filter(None, [", ".join(allowed[:-1]), allowed[-1]]))


def max_part_batch(estimator: Estimator, part: Part) -> int:
    """The most requests whose KV fits beside the part's weights; 0 if none."""
    memory = estimator.stage_memory(part.kind)
    free = memory.available - _weights(estimator, part)
    fitting = math.floor(free / (part.num_layers * memory.layer_kv_per_request))
    return max(0, min(estimator.fidelity.max_batch, fitting))


def _weights(estimator: Estimator, part: Part) -> float:
    """Bytes on each GPU."""
    has_ends = not part.is_bare
    return estimator.weight_bytes(part.kind, part.num_layers, is_first=has_ends, is_last=has_ends)


def _why_nothing_fits(estimator: Estimator, part: Part) -> str:
    memory = estimator.stage_memory(part.kind)
    one = part.num_layers * memory.layer_kv_per_request
    missing = _weights(estimator, part) + one - memory.available
    return (
        f"{part.num_layers} layers of {estimator.model.name} do not fit "
        f"{part.kind.tp} × {part.kind.shape.gpu.name}: {missing / 1e9:.2f} GB are missing on each "
        "for weights and the KV of one request"
    )


def _prefill(estimator: Estimator, part: Part, batch: int) -> Pass:
    input_tokens = estimator.workload.input_tokens
    tokens = part.num_prefill_tokens
    prompts = batch if tokens is None else tokens / input_tokens
    return prefill_pass(estimator.model, prompts, input_tokens, estimator.fidelity.traits)


def _by_operation(estimator: Estimator, part: Part, work: Pass) -> dict[str, float]:
    times: dict[str, Quantity] = estimator.operation_times_s(part.kind, work)
    if part.is_bare:
        times.pop("all_reduce")
    seconds = {name: part.num_layers * float(one) for name, one in times.items()}
    if not part.is_bare:
        seconds["logits"] = float(estimator.logits_s(part.kind, work))
    return seconds
