"""`shuntyard plan`, `estimate` and `hardware`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.table import Table

from placement.catalogue import Catalogue
from placement.errors import InvalidInput, PlacementError, Unmet, user_path
from placement.estimator import StageKind
from placement.explanation import explain
from placement.part_estimate import Part, PartEstimate, estimate_part
from placement.workload import Workload
from server import plan_inputs
from server.clean_stdout import OutputFailed, answering, check_stdout, clean_stdout
from server.plan_file import FORMATS, write_plan
from server.plan_json import (
    estimate_answer,
    explanation_answer,
    plan_answer,
    replan_answer,
)
from server.plan_notes import plan_notes
from server.plan_picture import explanation_view, plan_view, printer, replan_view
from server.plan_progress import progress
from server.plan_search import read_search, silent
from server.running_plan import read_running


def run(command: str, flags: Mapping[str, Any]) -> int:
    """Run one of the commands. Returns the exit code: 0, or with one line of error 2 for wrong
    input, 1 for an output that takes no answer, 130 for an interrupt."""
    try:
        check_stdout()
        plan_inputs.check_values(flags)
        {"plan": planned, "estimate": estimated, "hardware": listed}[command](flags)
    except PlacementError as error:
        print(f"shuntyard: {plan_inputs.shown(error)}", file=sys.stderr)
        if isinstance(error, Unmet) and flags["json"]:
            print(json.dumps(plan_inputs.unmet_answer(error)))
        return 2
    except OutputFailed as error:
        print(f"shuntyard: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("shuntyard: stopped; there is no answer", file=sys.stderr)
        return 130
    return 0


def planned(flags: Mapping[str, Any]) -> None:
    """Plan a fleet, and say it."""
    plan_inputs.check_output(flags)
    workload = plan_inputs.read_workload(flags)
    goal = plan_inputs.read_goal(flags, workload)
    time_limit_s = plan_inputs.duration_s(flags, "time_limit") or 0.0
    if time_limit_s <= 0:
        raise InvalidInput("--time-limit", "must be above 0 s")
    catalogue = plan_inputs.read_catalogue(flags)
    model = plan_inputs.read_model(flags)
    estimator, figures = plan_inputs.read_estimator(flags, model, workload, catalogue)
    offers = plan_inputs.read_offers(flags, catalogue, figures, goal)
    running = read_running(flags, estimator, offers)
    explanation = None
    with clean_stdout(), progress(sys.stderr) as say:
        search = read_search(flags, estimator, goal, running, say)
        try:
            plan, moves = search.find(offers, time_limit_s)
        except Unmet as error:
            raise search.unmet(error, offers, time_limit_s) from None
        if flags["explain"]:
            quiet = replace(search, say=silent)
            explanation = explain(
                plan, offers, estimator, quiet.plan, time_limit_s=time_limit_s, on_progress=say
            )
    if flags["output"] is not None:
        formats = {name: flags.get(name) for name in FORMATS}
        write_plan(user_path(flags["output"]), plan, model, workload, formats)
    notes = plan_notes(plan, catalogue, flags["dtype"])
    with answering():
        if flags["json"]:
            answer = plan_answer(plan)
            if notes:
                answer["notes"] = notes
            if running is not None and moves is not None:
                answer["replan"] = replan_answer(moves, running.stops(moves, offers))
            if explanation is not None:
                answer["explanation"] = explanation_answer(explanation)
            print(json.dumps(answer))
            return
        console = printer()
        console.print(plan_view(plan, model, workload, console))
        for note in notes:
            console.print(f"note: {note}", style="yellow")
        if running is not None and moves is not None:
            console.print("")
            console.print(replan_view(moves, running.name, running.stops(moves, offers)))
        if explanation is not None:
            console.print("")
            console.print(explanation_view(explanation, plan))


def estimated(flags: Mapping[str, Any]) -> None:
    """Estimate some layers on one kind of GPU, and say it."""
    lengths = {name: plan_inputs.count(flags, name) or 1 for name in ("input", "output")}
    workload = Workload(input_tokens=lengths["input"], output_tokens=lengths["output"])
    catalogue = plan_inputs.read_catalogue(flags)
    model = plan_inputs.read_model(flags)
    estimator, figures = plan_inputs.read_estimator(
        flags, model, workload, catalogue, lengths_from="--input and --output"
    )
    tp = plan_inputs.count(flags, "tp") or 1
    num_layers = plan_inputs.count(flags, "layers") or model.num_layers
    if num_layers > model.num_layers:
        raise InvalidInput("--layers", f"{model.name} has {model.num_layers}, not {num_layers}")
    part = Part(
        kind=StageKind(shape=catalogue.bare_shape(flags["gpu"], tp, figures, at="gpu"), tp=tp),
        num_layers=num_layers,
        is_bare=flags["bare"],
        num_prefill_tokens=plan_inputs.count(flags, "tokens"),
        context=plan_inputs.count(flags, "context"),
    )
    answer = estimate_part(estimator, part, plan_inputs.count(flags, "batch"))
    with answering():
        if flags["json"]:
            print(json.dumps(estimate_answer(answer)))
        else:
            _print_estimate(answer, part, workload)


def _print_estimate(answer: PartEstimate, part: Part, workload: Workload) -> None:
    console = printer()
    requests = f"{answer.batch} request{'' if answer.batch == 1 else 's'}"
    layers = f"{part.num_layers} layer{'' if part.num_layers == 1 else 's'}"
    console.print(
        f"{layers} on {part.kind.tp}x {part.kind.shape.gpu.name}, "
        f"{requests} ({workload.input_tokens} in, {workload.output_tokens} out)"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("OPERATION")
    for title in ("PREFILL MS", "DECODE STEP MS"):
        table.add_column(title, justify="right")
    for name, one in answer.by_operation.items():
        table.add_row(name, f"{one.prefill_s * 1e3:.3f}", f"{one.decode_step_s * 1e3:.4f}")
    table.add_row(
        "all", f"{answer.prefill_s * 1e3:.3f}", f"{answer.decode_step_s * 1e3:.4f}", style="bold"
    )
    console.print(table)
    console.print(
        f"decode {answer.decode_s:.3f} s in all; {answer.throughput_rps:.3f} requests/s; "
        f"largest batch {answer.max_batch}"
    )
    if answer.batch > answer.max_batch:
        console.print(f"note: the KV cache of {requests} does not fit", style="yellow")


def listed(flags: Mapping[str, Any]) -> None:
    """List the catalogue."""
    catalogue = plan_inputs.read_catalogue(flags)
    with answering():
        if flags["json"]:
            print(json.dumps(catalogue_answer(catalogue)))
        else:
            _print_catalogue(catalogue)


def _print_catalogue(catalogue: Catalogue) -> None:
    console = printer()
    console.print(_gpu_table(catalogue))
    console.print("")
    console.print(_shape_table(catalogue))
    console.print("")
    for name, entry in catalogue.gpus.items():
        console.print(f"{name:<14}spec: {entry.spec.source}")
        console.print(f"{'':<14}calibrated: {entry.calibrated.source}")
    for kind in (catalogue.fabrics, catalogue.networks):
        for name, link in kind.items():
            console.print(f"{name:<14}spec: {link.spec.source}")
            console.print(f"{'':<14}calibrated: {link.calibrated.source}")


def catalogue_answer(catalogue: Catalogue) -> dict[str, Any]:
    """`hardware --json`: the catalogue in the form of a --hardware file, with spot prices."""
    return {
        **{
            kind: {name: entry.model_dump(mode="json") for name, entry in entries.items()}
            for kind, entries in (
                ("gpus", catalogue.gpus),
                ("fabrics", catalogue.fabrics),
                ("networks", catalogue.networks),
                ("shapes", catalogue.shapes),
            )
        },
        "corrections": catalogue.corrections,
        "spot_prices_usd_per_hour": catalogue.spot_prices,
    }


def _gpu_table(catalogue: Catalogue) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("GPU")
    table.add_column("TYPE")
    for title in ("GIB", "TFLOPS", "CALIBRATED", "GB/S", "CALIBRATED"):
        table.add_column(title, justify="right")
    table.add_column("CALIBRATED BY", no_wrap=True)
    for name, entry in catalogue.gpus.items():
        source = entry.calibrated.source
        table.add_row(
            name,
            entry.arithmetic,
            f"{entry.memory_mib / 1024:.1f}",
            f"{entry.spec.tflops:g}",
            f"{entry.calibrated.tflops:g}",
            f"{entry.spec.bandwidth_gb_per_s:g}",
            f"{entry.calibrated.bandwidth_gb_per_s:g}",
            source if len(source) < 60 else source[:59] + "…",
        )
    return table


def _shape_table(catalogue: Catalogue) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("MACHINE", "CLOUD", "GPUS", "FABRIC", "NETWORK"):
        table.add_column(title, no_wrap=True)
    for title in ("USD/H", "SPOT USD/H"):
        table.add_column(title, justify="right")
    table.add_column("PRICE FROM", no_wrap=True)
    for name, entry in catalogue.shapes.items():
        spot = catalogue.spot_zones(name).values()
        network = f" {entry.network_gbit_per_s:g} Gbit/s" if entry.network_gbit_per_s else ""
        price = entry.price_usd_per_hour
        table.add_row(
            name,
            entry.provider,
            f"{entry.num_gpus}x {entry.gpu}",
            entry.fabric or "",
            entry.network + network,
            f"{price:.3f}" if price is not None else "not known",
            f"{min(spot):.2f} to {max(spot):.2f}" if spot else "",
            (entry.price_source or "the user's file") if price is not None else "",
        )
    return table
