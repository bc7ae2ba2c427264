"""A plan for people: a table, and its stages as bars."""

from __future__ import annotations

import io
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from placement.estimator import StageEstimate
from placement.explanation import Binding, Change, EntryPrice, Explanation
from placement.model import ModelSpec
from placement.plan import Objective, Plan, PlannedPipeline
from placement.workload import Workload

if TYPE_CHECKING:
    from placement.optimizer import Replan
    from server.running_plan import Stop

_GB = 1e9
_WIDTH = 24
_MIN_WIDTH, _NO_WIDTH = 140, 10_000
_WORDS = {
    "throughput-per-dollar": "requests per dollar",
    "throughput": "requests per second",
    "cost-for-load": "dollars per hour",
}


_QUESTIONS = {
    "one_less": "a machine less of",
    "one_more": "a machine more of",
    "entry_prices": "the price below which to rent",
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
    """A console that keeps each row on one line, also where the output is narrow or has no width,
    and that writes in place of what the output cannot show."""
    out = stream or sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")
    console = Console(file=out, highlight=False, soft_wrap=True)
    console.width = max(console.width, _MIN_WIDTH) if out.isatty() else _NO_WIDTH
    return console


def plan_view(plan: Plan, model: ModelSpec, workload: Workload, console: Console) -> Group:
    """Table, picture and summary of a plan."""
    blocks = _blocks(console)
    parts: list[RenderableType] = [_heading(plan, model, workload), "", _table(plan), ""]
    for name, pipeline in _alike(plan.pipelines):
        parts += [_picture(name, pipeline, blocks), ""]
    return Group(*parts, _legend(blocks), "", *summary(plan, workload))


def summary(plan: Plan, workload: Workload) -> list[Text]:
    """Throughput, price, price of tokens, the bound, and what the workload's rate means."""
    rps, price = plan.throughput_rps, plan.known_price_usd_per_hour
    tokens = workload.input_tokens + workload.output_tokens
    lines = [
        f"{'throughput':<12}{rps:.3f} requests/s = {rps * tokens:,.0f} tokens/s (input + output)",
        f"{'price':<12}${price:.2f} an hour = ${usd_per_million_tokens(plan, workload):.3f} for a "
        "million tokens (input + output)"
        if price
        else f"{'price':<12}not known",
        f"{'optimum':<12}{amount(plan.value, plan.goal.objective)}; {_bound(plan)}",
        f"{'solved':<12}in {plan.solve_s:.2f} s by the solver {plan.solver}",
    ]
    counted = sum(plan.goal.effective_rps(one.estimate, one.offers) for one in plan.pipelines)
    if counted < rps * (1 - 1e-9):
        lines.insert(
            1,
            f"{'':<12}of which {counted:.3f} requests/s count, after interruptions and missed SLOs",
        )
    texts = [Text(line) for line in lines]
    rate = workload.rate_rps
    if rate is not None and rps < rate and plan.goal.objective != "cost-for-load":
        texts.append(
            Text(
                f"note: the workload brings {rate:g} requests/s, more than this plan serves; "
                "--objective cost-for-load finds the cheapest fleet that serves them, if one does",
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
    bindings = dict(zip(plan.pipelines, explanation.bindings, strict=True))
    for name, pipeline in _alike(plan.pipelines):
        parts.append(f"  {name}: {_binding(bindings[pipeline], pipeline)}")
    objective = plan.goal.objective
    for title, changes in (
        ("Runner-ups: the best fleets with a machine less of", explanation.one_less),
        ("With a machine more of", explanation.one_more),
    ):
        if changes:
            parts += ["", Text(title, style="bold"), _changes(changes, objective)]
    if explanation.entry_prices:
        parts += ["", Text("Unused offers would be rented at this price or less", style="bold")]
        parts += [f"  {_entry(one)}" for one in explanation.entry_prices]
    if not explanation.is_whole:
        parts += ["", Text("note: --time-limit left no time for", style="yellow")]
        for name, question in _QUESTIONS.items():
            offers = ", ".join(offer.label for offer in explanation.left_out[name])
            if offers:
                parts.append(Text(f"  {question} {offers}", style="yellow"))
    return Group(*parts)


def replan_view(found: Replan, running: str, stops: Sequence[Stop]) -> Group:
    """`--running`: what goes on, stops and starts, and what that costs and gains against staying.

    running: the name of the running plan's file.
    """
    start, goal = found.start_up_s, found.plan.goal
    kept = [f"{index + 1} (here {here})" for here, index in enumerate(found.kept, start=1)]
    started = range(len(found.kept) + 1, len(found.plan.pipelines) + 1)
    lines = [
        f"{'go on':<12}{', '.join(kept) or 'none'}",
        *(f"{'stops':<12}{one.pipeline + 1}: {_why(one)}" for one in stops),
        f"{'start':<12}{', '.join(map(str, started)) or 'none'}",
    ]
    if found.started:
        lines.append(
            f"{'costs':<12}{found.missed_requests:,.0f} requests not served and "
            f"${found.start_up_usd:,.2f} paid in the {start:g} s of starting"
        )
    rps = found.effective_rps
    lines += [
        f"{'serves':<12}{rps:.3f} requests/s on average over {found.horizon_s:,.0f} s: "
        f"{rps * found.horizon_s:,.0f} requests",
        f"{'staying':<12}" + _staying(found, goal.objective),
    ]
    title = Text(f"Pipelines of {running}, from now on", style="bold")
    return Group(title, *(Text(line) for line in lines))


def _why(stop: Stop) -> str:
    return {
        "lost": "has lost a machine",
        "not_offered": f"{stop.machine} is not offered any more",
        "fewer_machines": "fewer of its machines are offered than run",
        "moved": "its machines do better otherwise, or are not worth their price",
    }[stop.reason]


def _staying(found: Replan, objective: Objective) -> str:
    if found.stay_value is None or found.gain is None:
        return "nothing that runs meets the goal by itself"
    better = f"{found.gain:.1%} better" if found.gain >= 5e-4 else "the same"
    return f"{amount(found.stay_value, objective)} without starting anything; this is {better}"


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
    for name, pipeline in _alike(plan.pipelines):
        for index, one in enumerate(pipeline.estimate.stages, start=1):
            stage = one.stage
            offer = pipeline.offers[stage.node]
            table.add_row(
                name.partition(" ")[2] if index == 1 else "",
                str(index),
                stage.shape.name + (f" #{stage.node + 1}" if len(pipeline.offers) > 1 else ""),
                offer.market + (f" {offer.zone}" if offer.zone else ""),
                f"{stage.tp}x {stage.shape.gpu.name}",
                str(stage.num_layers),
                f"{one.prefill_s:.2f}",
                f"{one.decode_s:.2f}",
                f"{one.weights_bytes / _GB:.1f}",
                f"{one.kv_bytes / _GB:.1f}",
                f"{_free(one) / _GB:.1f}",
            )
    return table


def _alike(pipelines: Sequence[PlannedPipeline]) -> list[tuple[str, PlannedPipeline]]:
    """Runs of equal pipelines, with their numbers: `pipeline 1`, `pipelines 2 to 4`."""
    found = []
    number = 1
    for pipeline, equal in itertools.groupby(pipelines):
        count = len(list(equal))
        name = f"pipelines {number} to {number + count - 1}" if count > 1 else f"pipeline {number}"
        found.append((name, pipeline))
        number += count
    return found


def _picture(name: str, pipeline: PlannedPipeline, blocks: _Blocks) -> Group:
    estimate = pipeline.estimate
    stages = estimate.stages
    price = pipeline.known_price_usd_per_hour
    of_each = "each " if name.startswith("pipelines") else ""
    title = Text.assemble(
        (name, "bold"),
        f": {of_each}{estimate.batch} request{_s(estimate.batch)} in flight, "
        f"{estimate.throughput_rps:.3f} requests/s, {estimate.latency_s:.1f} s a request"
        + (f", ${price:.2f} an hour" if price else ""),
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "LAYERS", "MEMORY", "PREFILL", "DECODE"):
        table.add_column(column, no_wrap=True)
    most_layers = max(one.stage.num_layers for one in stages)
    slowest = [max(map(seconds_of, stages)) for seconds_of in _PHASES]
    for index, one in enumerate(stages, start=1):
        stage = one.stage
        table.add_row(
            f"  {index} {stage.tp}x {stage.shape.gpu.name}",
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
    if not math.isfinite(plan.bound):
        return "a heuristic's answer: no bound is known"
    if plan.gap <= 1e-6:
        return "proven optimal"
    better = "below" if plan.goal.objective == "cost-for-load" else "above"
    bound = amount(plan.bound, plan.goal.objective)
    return f"no fleet is {better} {bound} (gap {plan.gap:.1%})"


def amount(value: float, objective: Objective) -> str:
    """A value of an objective, in its unit."""
    if objective == "throughput-per-dollar":
        return f"{value * 3600:,.1f} {_WORDS[objective]}"
    return f"{value:,.3f} {_WORDS[objective]}"


def _binding(one: Binding, pipeline: PlannedPipeline) -> str:
    stages = pipeline.estimate.stages

    def name(index: int) -> str:
        stage = stages[index].stage
        return f"stage {index + 1} ({stage.tp}x {stage.shape.gpu.name})"

    limit = {
        "memory": f"memory of {name(one.memory_stage)} limits the batch",
        "engine": "the most sequences of an engine limit the batch",
        "slo": "the SLO limits the batch",
        "pace": "a larger batch would serve no faster",
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
            f"{amount(plan.value, objective)}: {plan.throughput_rps:.3f} requests/s, "
            f"{_price(plan)}, {machines(plan)}",
        )
    return table


def _price(plan: Plan) -> str:
    price = plan.known_price_usd_per_hour
    return "price not known" if price is None else f"${price:.2f} an hour"


def machines(plan: Plan) -> str:
    """What a plan rents, by pipelines: `2x (g6.12xlarge + g5.12xlarge), 4x g6e.xlarge`."""
    fleets: Counter[str] = Counter()
    for pipeline in plan.pipelines:
        rented = Counter(offer.shape.name for offer in pipeline.offers)
        names = [name if num == 1 else f"{num} {name}" for name, num in sorted(rented.items())]
        together = " + ".join(names)
        fleets[f"({together})" if pipeline.offers[1:] else together] += 1
    return ", ".join(name if num == 1 else f"{num}x {name}" for name, num in fleets.items())


def _entry(one: EntryPrice) -> str:
    if one.price_usd_per_hour is None:
        return f"{one.offer.label}: no price, not even for nearly nothing"
    # Rounded down: at the price that is shown it is rented.
    price = math.floor(one.price_usd_per_hour * 1000) / 1000
    return (
        f"{one.offer.label}: ${price:.3f} an hour (offered at ${one.offer.price_usd_per_hour:.2f})"
    )


def _free(one: StageEstimate) -> float:
    return one.available_bytes - one.weights_bytes - one.kv_bytes


def _blocks(console: Console) -> _Blocks:
    return _FINE if console.encoding.lower().startswith("utf") else _ASCII


def _s(count: int) -> str:
    return "" if count == 1 else "s"
