"""A plan for people: a table, and its stages as bars."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from placement.estimator import StageEstimate
from placement.explanation import Binding, Change, EntryPrice, Explanation
from placement.model import ModelSpec
from placement.plan import Objective, Plan, PlannedPipeline
from placement.workload import Workload

_GB = 1e9
_WIDTH = 24
_WORDS = {
    "throughput-per-dollar": "requests per dollar",
    "throughput": "requests per second",
    "cost-for-load": "dollars per hour",
}


@dataclass(frozen=True, slots=True)
class _Blocks:
    """What bars are drawn with."""

    full: str
    half: str
    empty: str
    mark: str


_FINE = _Blocks("█", "▒", "░", "◀")
_ASCII = _Blocks("#", "=", ".", "<")


def printer(stream: TextIO | None = None) -> Console:
    """A console that keeps each row on one line, also where the output has no width."""
    out = stream or sys.stdout
    return Console(file=out, highlight=False, soft_wrap=True, width=None if out.isatty() else 200)


def plan_view(plan: Plan, model: ModelSpec, workload: Workload, console: Console) -> Group:
    """Table, picture and summary of a plan."""
    blocks = _blocks(console)
    parts: list[RenderableType] = [_heading(plan, model, workload), "", _table(plan), ""]
    for number, pipeline in enumerate(plan.pipelines, start=1):
        parts += [_picture(number, pipeline, blocks), ""]
    return Group(*parts, _legend(blocks), "", *summary(plan, workload))


def summary(plan: Plan, workload: Workload) -> list[Text]:
    """Throughput, price, price of tokens, the bound, and what the workload's rate means."""
    rps, price = plan.throughput_rps, plan.price_usd_per_hour
    tokens = workload.input_tokens + workload.output_tokens
    lines = [
        f"{'throughput':<12}{rps:.3f} requests/s = {rps * tokens:,.0f} tokens/s (input + output)",
        f"{'price':<12}${price:.2f} an hour = ${usd_per_million_tokens(plan, workload):.3f} for a "
        "million tokens (input + output)",
        f"{'optimum':<12}{_amount(plan.value, plan.goal.objective)}; {_bound(plan)}",
        f"{'solved':<12}in {plan.solve_s:.2f} s by the solver {plan.solver}",
    ]
    texts = [Text(line) for line in lines]
    rate = workload.rate_rps
    if rate is not None and rps < rate and plan.goal.objective != "cost-for-load":
        texts.append(
            Text(
                f"note: the workload brings {rate:g} requests/s, more than this plan serves; "
                "--objective cost-for-load finds the cheapest fleet that serves them",
                style="yellow",
            )
        )
    return texts


def usd_per_million_tokens(plan: Plan, workload: Workload) -> float:
    """Dollars for a million tokens, prompts and output together, when the fleet is full."""
    tokens = workload.input_tokens + workload.output_tokens
    return plan.price_usd_per_hour / (plan.throughput_rps * 3600 * tokens) * 1e6


def explanation_view(explanation: Explanation, plan: Plan) -> Group:
    """`--explain`: what holds the plan back, the runner-ups, and what would change the answer."""
    parts: list[RenderableType] = [Text("What holds each pipeline back", style="bold")]
    for number, (pipeline, one) in enumerate(
        zip(plan.pipelines, explanation.bindings, strict=True), start=1
    ):
        parts.append(f"  pipeline {number}: {_binding(one, pipeline)}")
    objective = plan.goal.objective
    for title, changes in (
        ("Runner-ups: the best fleets with a machine less of", explanation.one_less),
        ("With a machine more of", explanation.one_more),
    ):
        if changes:
            parts += ["", Text(title, style="bold"), _changes(changes, objective)]
    if explanation.entry_prices:
        parts += ["", Text("Unused offers would be rented below", style="bold")]
        parts += [f"  {_entry(one)}" for one in explanation.entry_prices]
    if not explanation.is_whole:
        parts += ["", Text("note: --time-limit ended the search for more reasons", style="yellow")]
    return Group(*parts)


def _heading(plan: Plan, model: ModelSpec, workload: Workload) -> Text:
    num_machines = sum(len(pipeline.offers) for pipeline in plan.pipelines)
    return Text.assemble(
        (model.name, "bold"),
        f": {len(plan.pipelines)} pipeline{_s(len(plan.pipelines))} on {num_machines} "
        f"machine{_s(num_machines)} for {workload.name} ({workload.input_tokens} in, "
        f"{workload.output_tokens} out), objective {plan.goal.objective}",
    )


def _table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("PIPELINE", "STAGE", "MACHINE", "MARKET"):
        table.add_column(title, no_wrap=True)
    for title in ("GPUS", "LAYERS", "PREFILL S", "DECODE S", "WEIGHTS GB", "KV GB", "FREE GB"):
        table.add_column(title, justify="right", no_wrap=True)
    for number, pipeline in enumerate(plan.pipelines, start=1):
        for index, one in enumerate(pipeline.estimate.stages, start=1):
            stage = one.stage
            offer = pipeline.offers[stage.node]
            table.add_row(
                str(number) if index == 1 else "",
                str(index),
                f"{stage.shape.name} #{stage.node + 1}",
                offer.market + (f" {offer.zone}" if offer.zone else ""),
                f"{stage.tp} × {stage.shape.gpu.name}",
                str(stage.num_layers),
                f"{one.prefill_s:.2f}",
                f"{one.decode_s:.2f}",
                f"{one.weights_bytes / _GB:.1f}",
                f"{one.kv_bytes / _GB:.1f}",
                f"{_free(one) / _GB:.1f}",
            )
    return table


def _picture(number: int, pipeline: PlannedPipeline, blocks: _Blocks) -> Group:
    estimate = pipeline.estimate
    stages = estimate.stages
    title = Text.assemble(
        (f"pipeline {number}", "bold"),
        f"  {estimate.batch} requests in flight, {estimate.throughput_rps:.3f} requests/s, "
        f"{estimate.latency_s:.1f} s each, ${pipeline.price_usd_per_hour:.2f} an hour",
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "LAYERS", "MEMORY", "PREFILL", "DECODE"):
        table.add_column(name, no_wrap=True)
    most_layers = max(one.stage.num_layers for one in stages)
    slowest = [max(map(seconds_of, stages)) for seconds_of in _PHASES]
    for index, one in enumerate(stages, start=1):
        stage = one.stage
        table.add_row(
            f"  {index} {stage.tp} × {stage.shape.gpu.name}",
            _bar(stage.num_layers / most_layers, blocks, "cyan", width=12)
            + f" {stage.num_layers:>3}",
            _memory(one, blocks),
            *(
                _phase(seconds_of(one), most, blocks, is_alone=len(stages) == 1)
                for seconds_of, most in zip(_PHASES, slowest, strict=True)
            ),
        )
    return Group(title, table)


_PHASES: tuple[Callable[[StageEstimate], float], ...] = (
    lambda one: one.prefill_s,
    lambda one: one.decode_s,
)


def _memory(one: StageEstimate, blocks: _Blocks) -> Text:
    weights = round(_WIDTH * min(1.0, one.weights_bytes / one.available_bytes))
    used = round(_WIDTH * min(1.0, (one.weights_bytes + one.kv_bytes) / one.available_bytes))
    share = (one.weights_bytes + one.kv_bytes) / one.available_bytes
    return Text.assemble(
        (blocks.full * weights, "blue"),
        (blocks.half * (used - weights), "green"),
        (blocks.empty * (_WIDTH - used), "dim"),
        f" {share:>4.0%}",
    )


def _phase(seconds: float, most: float, blocks: _Blocks, *, is_alone: bool) -> Text:
    is_slowest = seconds >= most and not is_alone
    bar = _bar(seconds / most, blocks, "red" if is_slowest else "magenta", width=12)
    return bar + f" {seconds:8.2f} s" + (f" {blocks.mark}" if is_slowest else "  ")


def _bar(share: float, blocks: _Blocks, style: str, *, width: int) -> Text:
    filled = max(1, round(width * share))
    return Text.assemble((blocks.full * filled, style), " " * (width - filled))


def _legend(blocks: _Blocks) -> Text:
    return Text(
        f"memory: {blocks.full} weights {blocks.half} KV {blocks.empty} free; "
        f"{blocks.mark} the slowest stage of its phase; times of all requests in flight together",
        style="dim",
    )


def _bound(plan: Plan) -> str:
    if plan.solver == "paper":
        return "a heuristic: no bound is known" if plan.gap > 0 else "proven optimal"
    if plan.gap <= 1e-6:
        return "proven optimal"
    better = "below" if plan.goal.objective == "cost-for-load" else "above"
    bound = _amount(plan.bound, plan.goal.objective)
    return f"no fleet is {better} {bound} (gap {plan.gap:.1%})"


def _amount(value: float, objective: Objective) -> str:
    if objective == "throughput-per-dollar":
        return f"{value * 3600:,.1f} {_WORDS[objective]}"
    return f"{value:,.3f} {_WORDS[objective]}"


def _binding(one: Binding, pipeline: PlannedPipeline) -> str:
    stages = pipeline.estimate.stages

    def name(index: int) -> str:
        stage = stages[index].stage
        return f"stage {index + 1} ({stage.tp} × {stage.shape.gpu.name})"

    limit = {
        "memory": f"memory of {name(one.memory_stage)} limits the batch",
        "engine": "the most sequences of an engine limit the batch",
        "slo": "the SLO limits the batch",
    }[one.batch_limit]
    return (
        f"{limit}; slowest in prefill is {name(one.prefill_stage)}, "
        f"in decode {name(one.decode_stage)}"
    )


def _changes(changes: Sequence[Change], objective: Objective) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(no_wrap=True)
    for change in changes:
        if change.plan is None:
            table.add_row(f"  {change.offer.label}", "nothing fits", "")
            continue
        plan = change.plan
        gain = f"{change.gain:+.1%}" if abs(change.gain) >= 5e-4 else "the same"
        table.add_row(
            f"  {change.offer.label}",
            gain,
            f"{_amount(plan.value, objective)}: {plan.throughput_rps:.3f} requests/s, "
            f"${plan.price_usd_per_hour:.2f} an hour, {machines(plan)}",
        )
    return table


def machines(plan: Plan) -> str:
    """What a plan rents: `3 g6.12xlarge, 1 g5.12xlarge`, pipelines apart."""
    found = []
    for pipeline in plan.pipelines:
        counts: dict[str, int] = {}
        for offer in pipeline.offers:
            counts[offer.shape.name] = counts.get(offer.shape.name, 0) + 1
        found.append(" + ".join(f"{count} {name}" for name, count in counts.items()))
    return " | ".join(found)


def _entry(one: EntryPrice) -> str:
    if one.price_usd_per_hour is None:
        return f"{one.offer.label}: no price, not even for nearly nothing"
    return (
        f"{one.offer.label}: ${one.price_usd_per_hour:.2f} an hour "
        f"(offered at ${one.offer.price_usd_per_hour:.2f})"
    )


def _free(one: StageEstimate) -> float:
    return one.available_bytes - one.weights_bytes - one.kv_bytes


def _blocks(console: Console) -> _Blocks:
    return _FINE if console.encoding.lower().startswith("utf") else _ASCII


def _s(count: int) -> str:
    return "" if count == 1 else "s"
