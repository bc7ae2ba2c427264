"""All that can be set in the scheduler, with units, ranges and reasons; and the presets."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

PolicyName = Literal["hera", "fcfs", "srtf", "plas", "topology"]
PresetName = Literal["balanced", "short-first", "throughput", "tail-fairness"]

_RANGES: dict[str, tuple[float, float]] = {
    "srtf_weight": (0, 100), "contribution_weight": (0, 100), "heavy_weight": (0, 100),
    "min_remaining": (0.001, 10), "max_contribution": (0, 1000), "ageing": (0, 10_000),
    "priority_step": (0, 100), "deadline_slack": (0, 100), "engine_step": (0.001, 1000),
    "successor_work": (0, 100), "successor_depth": (0, 100), "successor_count": (0, 100),
    "correction_prior": (0.001, 100), "min_correction": (0.01, 1), "max_correction": (1, 100),
    "unfinished_share": (0, 1), "long_sigmas": (0, 10), "long_hysteresis": (0.1, 1),
    "min_long_sample": (1, 10_000), "reserved_share": (0, 1), "heavy_quantile": (0, 1),
    "min_heavy_share": (0, 1), "min_heavy_split": (1, 64), "heavy_wait": (0, 1000),
    "fairness_window": (0, 10_000), "full_load": (0.1, 100), "load_memory": (0.001, 1000),
    "tail_relief": (0, 10),
    "tail_ratio": (1, 100), "lambda_hysteresis": (0, 1), "split_gain": (0, 1),
    "window": (8, 100_000), "scale_drift": (0.01, 10), "sweep_tickets": (1, 10_000),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerParameters:
    """The scheduler's settings. Times are in *medians*: of the total service of recent runs.

    So no setting has a unit, and none needs to be changed when the models get faster. α, γ, δ and
    ρ are the paper's; values that it leaves open are ours.

    Priority, π = α/(Ŝ+ε) + γ·φ + δ·y:
    srtf_weight: α = 1. contribution_weight: γ = 0.3. heavy_weight: δ = 0.5.
    min_remaining: ε, medians; 0.1 bounds the first term by ten times that of a median run.
    max_contribution: φ of a fused node is a sum; cut here so that π is bounded.
    ageing: medians of waiting that one unit of π is worth. Large: shortest first, and long waits;
    0: first come, first served, by run. In simulation the median gains only from 8 on, and the tail
    loses from 0.5 on; so the default mostly decides among runs that came about together.
    priority_step: units of π for one step of declared priority.
    deadline_slack: a run with a deadline is due when so many times its Ŝ is left.
    engine_step: medians in one step of the engines' integer priority; too fine a step preempts
    for nothing.

    Contribution, φ = Σ over successors (ω1·w + ω2·d) + ω3·count, w in medians:
    successor_work: ω1. successor_depth: ω2, 0 since it favours starting over finishing.
    successor_count: ω3.

    Remaining service, Ŝ = clip((A+κ)/(ΣT̄+κ), min, max)·ΣT̄ of what remains:
    correction_prior: κ, medians: so much measured work weighs as much as the prediction.
    min_correction, max_correction: one bad estimate must not decide everything.
    unfinished_share: of a node's T̄; at least so much remains until it has really ended.

    Long runs, Ŝ > μ + η·σ over active runs, and heavy nodes:
    long_sigmas: η; about a sixth of the runs is long at 1.
    long_hysteresis: a long run is short again below this share of the threshold.
    min_long_sample: runs without which nobody is long.
    heavy_quantile: a node of a long run is heavy if it is an LLM's or above this quantile of T̄.
    reserved_share: ρ = 0.2. min_heavy_share, min_heavy_split, heavy_wait: η_long and κ_long; a
    heavy node may take that share of the slots and is cut at least so often, once it has waited so
    many medians.

    Tenants: fairness_window: medians of slot time per weight by which one tenant may run ahead of
    another that waits.

    λ = clip(load/full_load, 0, 1) − tail_relief·max(0, (p99/p50)/tail_ratio − 1):
    full_load: work that is there for each slot, at which throughput is all that counts; averaged
    over load_memory medians.
    lambda_hysteresis: smaller changes are ignored.
    split_gain: a split must win this share of ΔJ, since its prediction errs.

    Bookkeeping: window: samples in running quantiles. scale_drift: by which a quantile must have
    moved before all is ranked anew. sweep_tickets: ranked anew with each event after that.
    heavy_resources: whose nodes are always heavy in a long run.
    """

    policy: PolicyName = "hera"
    srtf_weight: float = 1.0
    contribution_weight: float = 0.3
    heavy_weight: float = 0.5
    min_remaining: float = 0.1
    max_contribution: float = 4.0
    ageing: float = 0.25
    priority_step: float = 1.0
    deadline_slack: float = 2.0
    engine_step: float = 0.25
    successor_work: float = 1.0
    successor_depth: float = 0.0
    successor_count: float = 0.1
    correction_prior: float = 0.25
    min_correction: float = 0.5
    max_correction: float = 4.0
    unfinished_share: float = 0.1
    long_sigmas: float = 1.0
    long_hysteresis: float = 0.8
    min_long_sample: int = 8
    heavy_quantile: float = 0.75
    reserved_share: float = 0.2
    min_heavy_share: float = 0.34
    min_heavy_split: int = 2
    heavy_wait: float = 2.0
    fairness_window: float = 4.0
    full_load: float = 2.0
    load_memory: float = 1.0
    tail_relief: float = 0.5
    tail_ratio: float = 4.0
    lambda_hysteresis: float = 0.1
    split_gain: float = 0.05
    window: int = 512
    scale_drift: float = 0.25
    sweep_tickets: int = 32
    heavy_resources: frozenset[str] = frozenset({"llm"})

    def __post_init__(self) -> None:
        """Raises ValueError for a value out of its range."""
        for one in fields(self):
            if one.name in _RANGES:
                low, high = _RANGES[one.name]
                value = getattr(self, one.name)
                if not low <= value <= high:
                    raise ValueError(f"{one.name} is {value}, not in {low}..{high}")

    @property
    def max_score(self) -> float:
        """The largest π there is; the smallest is 0."""
        return (
            self.srtf_weight / self.min_remaining
            + self.contribution_weight * self.max_contribution
            + self.heavy_weight
        )


_PRESETS: dict[PresetName, dict[str, float]] = {
    "balanced": {},
    "short-first": {"ageing": 8.0, "heavy_weight": 0.0, "reserved_share": 0.1},
    "throughput": {"contribution_weight": 0.6, "full_load": 1.0, "tail_relief": 0.0},
    "tail-fairness": {"ageing": 0.0, "heavy_weight": 0.8, "reserved_share": 0.3},
}


def preset(name: PresetName, *, policy: PolicyName = "hera") -> SchedulerParameters:
    """Table 3 of the paper names three presets without their values; these are ours.

    short-first: low median latency. throughput: nodes that many wait for, large batches early.
    tail-fairness: close to the order of arrival, more slots kept for long runs.
    """
    return replace(SchedulerParameters(policy=policy), **_PRESETS[name])  # type: ignore[arg-type]
