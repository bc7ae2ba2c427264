"""Limits of a pipeline's latency, as the search sees them.

Sums over the stages (reading `batch`: all limits; `continuous`: the first token, at batch 1) depend
on which stage holds how many layers; they are bounded for boxes, and exact in `arrangements`. In
reading `continuous`, the latency is B · Σ θ, and so is the time per token times S_out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.estimator import Estimator, StageKind
from placement.hardware import Shape
from placement.optimizer.boxes import Boxes
from placement.optimizer.capacity import StageLayers
from placement.optimizer.rates import LAYER, LOGITS, Ints, Rates, allowed_tps
from placement.plan import Goal
from placement.roofline import Array

# As in Goal.latency_factor: rounding must not make a plan at the limit miss it.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyLimits:
    """weights: [limit, resource], by which seconds of a whole batch count, as shares of a limit.

    alone: [part, shape, tp], the time to a first token without others as a share of its limit;
    None where that is not limited so. per_batch_s: a share of the limit for a second of L(B).
    penalty: γ of equation 7.
    """

    weights: Array
    alone: Array | None
    per_batch_s: float
    penalty: float

    @property
    def has_sums(self) -> bool:
        return len(self.weights) > 0 or self.alone is not None

    def part_shares(self, times: Array, batch: Ints) -> Array:
        """[box, limit, part, shape, tp]: what each part of a stage adds, as shares of the limits.

        times: [box, resource, part, shape, tp], seconds per request of `batch`.
        """
        seconds = times * batch[:, None, None, None, None]
        if self.alone is not None:
            return np.broadcast_to(self.alone, (len(times), 1, *self.alone.shape))
        finite = np.where(np.isfinite(seconds), seconds, 1e300)
        return np.asarray(np.einsum("qr,brpst->bqpst", self.weights, finite))

    def factor(self, share: Array) -> Array:
        """Equation 7's factor for the largest share of any limit."""
        excess = np.maximum(share * (1 - _ROUNDING) - 1, 0.0)
        if np.isinf(self.penalty):
            return np.where(excess > 0, 0.0, 1.0)
        return np.maximum(0.0, 1 - self.penalty * excess)

    @property
    def max_share(self) -> float:
        """Above this share of any limit a pipeline counts for nothing."""
        if np.isinf(self.penalty):
            return (1 + _ROUNDING) * (1 + 1e-15)
        return (1 + 1 / self.penalty) * (1 + 1e-11) if self.penalty else np.inf

    def batch_factor(self, batch: Ints, limits: Array) -> Array:
        """The factor for L(B) = B · Σ θ alone."""
        return self.factor(self.per_batch_s * batch * limits.sum(axis=1))

    def bound(
        self, boxes: Boxes, rates: Rates, stages: StageLayers, used: NDArray[np.bool_]
    ) -> Array:
        """[box]: no pipeline meant has a larger factor.

        All layers on the stages that are fastest for each limit, and the cheapest logits.
        """
        factor = self.batch_factor(boxes.low, boxes.least)
        if not self.has_sums:
            return factor
        shares = self.part_shares(stages.times, boxes.low)
        is_usable = ((stages.layers >= 1).any(axis=1) & used[:, :, None])[:, None]
        layer = np.where(is_usable, shares[:, :, LAYER], np.inf).min(axis=(2, 3))
        logits = np.where(is_usable, shares[:, :, LOGITS], np.inf).min(axis=(2, 3))
        total = rates.num_layers * layer + logits
        return np.minimum(factor, self.factor(total.max(axis=1)))


def latency_limits(
    goal: Goal, estimator: Estimator, shapes: tuple[Shape, ...]
) -> LatencyLimits | None:
    """The goal's limits in the estimator's reading; None where there are none or they are free."""
    ttft, tpot, whole = goal.slo_ttft_s, goal.slo_tpot_s, goal.slo_latency_s
    if (ttft is None and tpot is None and whole is None) or goal.latency_penalty == 0:
        return None
    output = estimator.workload.output_tokens
    if estimator.fidelity.reading == "batch":
        rows = []
        if ttft is not None:
            rows.append([1 / ttft, 0.0])
        if tpot is not None:
            rows.append([0.0, 1 / (tpot * output)])
        if whole is not None:
            rows.append([1 / whole, 1 / whole])
        weights = np.array(rows)
        return LatencyLimits(
            weights=weights, alone=None, per_batch_s=0.0, penalty=goal.latency_penalty
        )
    per_batch = max(1 / (tpot * output) if tpot else 0.0, 1 / whole if whole else 0.0)
    return LatencyLimits(
        weights=np.zeros((0, 1)),
        alone=None if ttft is None else _alone(estimator, shapes) / ttft,
        per_batch_s=per_batch,
        penalty=goal.latency_penalty,
    )


def _alone(estimator: Estimator, shapes: tuple[Shape, ...]) -> Array:
    """[part, shape, tp]: prefill of one request, in seconds."""
    tps = allowed_tps(estimator, shapes)
    seconds = np.full((4, len(shapes), len(tps)), 1e300)
    for column, shape in enumerate(shapes):
        for row, tp in enumerate(tps):
            if tp <= shape.num_gpus:
                times = estimator.prefill_times(StageKind(shape=shape, tp=tp), np.ones(1))
                parts = (times.layer_s, times.near_s, times.far_s, times.logits_s)
                seconds[:, column, row] = [float(part[0]) for part in parts]
    return seconds
