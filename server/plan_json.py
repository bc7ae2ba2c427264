"""Plans and estimates as scripts read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from placement.estimator import StageEstimate
from placement.explanation import Change, Explanation
from placement.part_estimate import PartEstimate
from placement.plan import Plan, PlannedPipeline

if TYPE_CHECKING:
    from placement.optimizer import Replan
    from server.running_plan import Stop


def plan_answer(plan: Plan) -> dict[str, Any]:
    """`plan --json`. objective: the value of what was optimised, in the unit of bound.

    bound, gap: null where a heuristic knows none. price_usd_per_hour: null where that of one of the
    machines is not known.
    """
    return {
        "pipelines": [pipeline_answer(pipeline) for pipeline in plan.pipelines],
        "throughput_rps": plan.throughput_rps,
        "price_usd_per_hour": plan.known_price_usd_per_hour,
        "objective": plan.value,
        "bound": _finite(plan.bound),
        "gap": _finite(plan.gap),
        "solve_s": plan.solve_s,
        "solver": plan.solver,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def pipeline_answer(pipeline: PlannedPipeline) -> dict[str, Any]:
    estimate = pipeline.estimate
    return {
        "stages": [stage_answer(stage) for stage in estimate.stages],
        "batch": estimate.batch,
        "throughput_rps": estimate.throughput_rps,
        "latency_s": estimate.latency_s,
        "price_usd_per_hour": pipeline.known_price_usd_per_hour,
    }


def stage_answer(estimate: StageEstimate) -> dict[str, Any]:
    stage = estimate.stage
    return {
        "shape": stage.shape.name,
        "gpu": stage.shape.gpu.name,
        "tp": stage.tp,
        "layers": stage.num_layers,
        "prefill_s": estimate.prefill_s,
        "decode_s": estimate.decode_s,
        "weights_bytes": estimate.weights_bytes,
        "kv_bytes": estimate.kv_bytes,
    }


def replan_answer(found: Replan, stops: Sequence[Stop]) -> dict[str, Any]:
    """`plan --json --running`, under `replan`.

    Pipelines are counted from 0: in `kept` and `stopped` those of the running plan, in `started`
    those of the answer, in which the kept ones come first.

    stay_objective: null where nothing that runs meets the goal. start_up_usd: null where the price
    of a machine is not known.
    """
    is_known = all(one.known_price_usd_per_hour is not None for one in found.started)
    return {
        "start_up_s": found.start_up_s,
        "horizon_s": found.horizon_s,
        "kept": list(found.kept),
        "stopped": [
            {"pipeline": one.pipeline, "reason": one.reason, "machine": one.machine}
            for one in stops
        ],
        "started": list(range(len(found.kept), len(found.plan.pipelines))),
        "throughput_rps": found.effective_rps,
        "missed_requests": found.missed_requests,
        "start_up_usd": found.start_up_usd if is_known else None,
        "stay_objective": found.stay_value,
        "gain": found.gain,
    }


def estimate_answer(estimate: PartEstimate) -> dict[str, Any]:
    """`estimate --json`."""
    return {
        "prefill_s": estimate.prefill_s,
        "decode_s": estimate.decode_s,
        "decode_step_s": estimate.decode_step_s,
        "max_batch": estimate.max_batch,
        "throughput_rps": estimate.throughput_rps,
        "by_operation": {
            name: {"prefill_s": one.prefill_s, "decode_step_s": one.decode_step_s}
            for name, one in estimate.by_operation.items()
        },
    }


def explanation_answer(explanation: Explanation) -> dict[str, Any]:
    """`plan --json --explain`, under `explanation`. gain: relative, for the better.

    left_out: the offers that there was no time for, by question.
    """
    return {
        "pipelines": [
            {
                "batch_limit": one.batch_limit,
                "memory_stage": one.memory_stage,
                "prefill_stage": one.prefill_stage,
                "decode_stage": one.decode_stage,
            }
            for one in explanation.bindings
        ],
        "one_more": [_change(one) for one in explanation.one_more],
        "runner_ups": [_change(one) for one in explanation.one_less],
        "entry_prices": [
            {"offer": one.offer.label, "price_usd_per_hour": one.price_usd_per_hour}
            for one in explanation.entry_prices
        ],
        "is_whole": explanation.is_whole,
        "left_out": {
            key: [offer.label for offer in explanation.left_out[name]]
            for key, name in (
                ("one_more", "one_more"),
                ("runner_ups", "one_less"),
                ("entry_prices", "entry_prices"),
            )
        },
    }


def _change(change: Change) -> dict[str, Any]:
    plan = change.plan
    return {
        "offer": change.offer.label,
        "gain": None if plan is None else change.gain,
        "objective": None if plan is None else plan.value,
        "throughput_rps": None if plan is None else plan.throughput_rps,
        "price_usd_per_hour": None if plan is None else plan.known_price_usd_per_hour,
    }
