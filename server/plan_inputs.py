"""From the flags of `plan` and `estimate` to what the optimizer and the estimator take.

Every wrong value ends in one InvalidInput that names the flag.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from placement.catalogue import Catalogue, Figures, shipped_catalogue
from placement.cluster import read_cluster
from placement.corrections import CALIBRATED, calibrated_fidelity
from placement.errors import (
    InvalidInput,
    OutOfTime,
    PlacementError,
    Unmet,
    UnreadableFile,
    shortened,
    unknown_name,
    user_path,
)
from placement.estimator import PAPER, Estimator, Fidelity
from placement.hardware import Offer
from placement.kernel_corrections import corrections_from_json
from placement.model import ModelSpec
from placement.model_catalogue import find_model, known_models, local_config
from placement.model_config import model_spec
from placement.plan import Goal, Objective
from placement.workload import Workload, find_workload
from server.fleet_client import seconds
from server.model_source import ModelUnavailable, hub_config
from server.output_file import why_unwritable

Flags = Mapping[str, Any]

FIDELITIES = ("paper", "calibrated")
FIGURES = get_args(Figures)
SOLVERS = ("exact", "paper")

# No flag means more; what is, is a slip.
_MOST, _MOST_OF = 10_000_000, {"tp": 64, "batch": 1_000_000, "beam": 1000, "layers": 1000}
_MOST_NUMBER, _MOST_S = 1e9, 1e9
_LONGEST_NAME, _LONGEST_LINE = 200, 1500
_QUOTE = "'"

# What a field of the inputs is called on the command line.
_FLAGS = {
    "load_rps": "--load",
    "slo_ttft_s": "--slo-ttft",
    "slo_tpot_s": "--slo-tpot",
    "slo_latency_s": "--slo-latency",
    "max_price_usd_per_hour": "--max-price",
    "recovery_s": "--recovery",
    "start_up_s": "--start-up",
    "input_tokens": "--workload",
    "output_tokens": "--workload",
    "rate_rps": "--workload",
    **{
        name: f"--{name.replace('_', '-')}"
        for name in (
            *("latency_penalty", "on_demand_share", "max_zone_share", "workload", "model", "gpu"),
            *("dtype", "quantization", "kv_cache_dtype", "objective", "solver", "tp", "layers"),
        )
    },
}


def shown(error: PlacementError) -> str:
    """An error as one line, with the flag in place of the field's name."""
    message = error.message
    if isinstance(error, InvalidInput) and error.field in _FLAGS:
        message = _FLAGS[error.field] + message.removeprefix(error.field)
    if isinstance(error, Unmet):
        for name in error.nearest:
            message = message.replace(f"{name} ", f"{_FLAGS[name]} ")
    if isinstance(error, OutOfTime):
        message = message.replace("time limit", "--time-limit")
    line = " ".join(message.split())
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}..."


def unmet_answer(error: Unmet) -> dict[str, Any]:
    """`plan --json` where no fleet meets the goal. nearest: by field of the goal, what could be."""
    return {"error": {"message": shown(error), "nearest": error.nearest}}


def check_values(flags: Flags) -> None:
    """Raises InvalidInput for `--flag=--`, of which argparse makes an empty list."""
    for name, value in flags.items():
        if isinstance(value, list):
            raise _wrong(name, "needs a value")


def check_output(flags: Flags) -> None:
    """Raises InvalidInput for an --output that cannot be written, or would overwrite what the plan
    is made from."""
    if flags["output"] is None:
        return
    output = user_path(flags["output"])
    if reason := why_unwritable(output):
        raise _wrong("output", reason)
    for name in ("cluster", "hardware", "running", "model"):
        if flags[name] is None:
            continue
        path = user_path(flags[name])
        for read in (path, path / "config.json"):
            with contextlib.suppress(OSError, ValueError):  # one of them does not exist
                if output.samefile(read):
                    raise _wrong("output", f"would overwrite the file of --{name}")


def number(flags: Flags, name: str, *, least: float = -math.inf) -> float | None:
    """A flag that is a finite number, None if it was not given."""
    text = flags.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _wrong(name, f"{shortened(text)} is no number")
    if value < least:
        raise _wrong(name, f"must be at least {least:g}, not {text}")
    if value > _MOST_NUMBER:
        raise _wrong(name, f"must be at most {_MOST_NUMBER:.0f}, not {text}")
    return value


def count(flags: Flags, name: str) -> int | None:
    """A flag that is a whole number of at least 1, None if it was not given."""
    text = flags.get(name)
    if text is None:
        return None
    digits = str(text)
    if not (digits.isascii() and digits.lstrip("+-").isdigit()):
        raise _wrong(name, f"{shortened(text)} is no whole number")
    most = _MOST_OF.get(name, _MOST)
    if len(digits) > 20 or int(digits) > most:
        raise _wrong(name, f"must be at most {most}, not {shortened(text).strip(_QUOTE)}")
    if int(digits) < 1:
        raise _wrong(name, f"must be at least 1, not {text}")
    return int(digits)


def duration_s(flags: Flags, name: str) -> float | None:
    """A flag that is a time: `2s`, `300ms`, `0.1`."""
    text = flags.get(name)
    if text is None:
        return None
    try:
        value = seconds(text)
    except argparse.ArgumentTypeError as error:
        raise _wrong(name, str(error)) from None
    if value > _MOST_S:
        raise _wrong(name, f"must be at most {_MOST_S:.0f} s")
    return value


def choice(flags: Flags, name: str, choices: Sequence[str]) -> str:
    """A flag that is one of some words."""
    value = str(flags[name])
    if value not in choices:
        raise unknown_name(f"--{name.replace('_', '-')}", value, choices)
    return value


def read_catalogue(flags: Flags) -> Catalogue:
    """The shipped catalogue, with the user's file over it."""
    path = flags.get("hardware")
    catalogue = shipped_catalogue()
    if not path:
        return catalogue
    try:
        return catalogue.with_profile(user_path(path))
    except UnreadableFile as error:
        raise _wrong("hardware", error.message) from None


def read_model(flags: Flags) -> ModelSpec:
    """The model: of a folder or file, of the catalogue, or of the hub. Raises InvalidInput."""
    name = str(flags["model"])
    formats: dict[str, Any] = {
        "dtype": flags.get("dtype") or "auto",
        "quantization": flags.get("quantization"),
        "kv_cache_dtype": flags.get("kv_cache_dtype") or "auto",
    }
    if not name.strip():
        raise InvalidInput("model", "must not be empty")
    spec = find_model(name, **formats)
    if spec is not None:
        return spec
    if len(name) > _LONGEST_NAME:
        raise InvalidInput("model", f"there is no model of a name of {len(name)} characters")
    try:
        config = local_config(hub_config(name))
    except ModelUnavailable as error:
        near = unknown_name("model", name, known_models()).message
        hint = near.partition("did you mean ")[2]
        raise InvalidInput(
            "model", error.message + (f" Without the hub: {hint}" if hint else "")
        ) from None
    return model_spec(config, name=name, **formats)


def read_fidelity(flags: Flags, catalogue: Catalogue) -> tuple[Fidelity, Figures]:
    """The formulas, with what the catalogue corrects, and which figures of the hardware to take.

    The paper, too, calibrates its GPUs (section 7.1.5).
    """
    figures: Figures = "spec" if choice(flags, "figures", FIGURES) == "spec" else "calibrated"
    if choice(flags, "model_fidelity", FIDELITIES) == "paper":
        return PAPER, figures
    if not catalogue.corrections:
        return CALIBRATED, figures
    corrections = {}
    for name, values in catalogue.corrections.items():
        try:
            corrections[name] = corrections_from_json(values)
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidInput(f"--hardware: corrections.{name}", str(error)) from None
    return calibrated_fidelity(corrections), figures


def read_workload(flags: Flags) -> Workload:
    return find_workload(str(flags["workload"]))


def read_estimator(
    flags: Flags,
    model: ModelSpec,
    workload: Workload,
    catalogue: Catalogue,
    *,
    lengths_from: str = "workload",
) -> tuple[Estimator, Figures]:
    """The estimator; prompts and answers must fit the model's context.

    lengths_from: the flag or flags that say how long they are, for the error.
    """
    length = workload.input_tokens + workload.output_tokens
    if length > model.max_context:
        raise InvalidInput(
            lengths_from,
            f"{length} tokens a request are more than the {model.max_context} of {model.name}",
        )
    fidelity, figures = read_fidelity(flags, catalogue)
    return Estimator(model=model, workload=workload, fidelity=fidelity), figures


def read_goal(flags: Flags, workload: Workload) -> Goal:
    """What is wanted. Raises InvalidInput for what contradicts itself."""
    objective: Objective = choice(flags, "objective", get_args(Objective))  # type: ignore[assignment]
    load = number(flags, "load")
    if load is not None and objective != "cost-for-load":
        raise _wrong("load", "is for --objective cost-for-load")
    if objective == "cost-for-load" and load is None:
        load = workload.rate_rps
        if load is None:
            raise _wrong("load", f"is missing: the workload {workload.name} has no rate")
    penalty = number(flags, "latency_penalty", least=0)
    goal = Goal(
        objective=objective,
        load_rps=load,
        slo_ttft_s=duration_s(flags, "slo_ttft"),
        slo_tpot_s=duration_s(flags, "slo_tpot"),
        slo_latency_s=duration_s(flags, "slo_latency"),
        latency_penalty=math.inf if penalty is None else penalty,
        max_price_usd_per_hour=number(flags, "max_price"),
        on_demand_share=number(flags, "on_demand_share") or 0.0,
        max_zone_share=_or(number(flags, "max_zone_share"), 1.0),
        recovery_s=duration_s(flags, "recovery") or 0.0,
    )
    _check_slos(goal, has_penalty=penalty is not None)
    return goal


def check_papers_goal(flags: Flags) -> None:
    """Raises InvalidInput for wishes that the paper's search does not know."""
    for name in ("max_price", "on_demand_share", "max_zone_share"):
        if flags.get(name) is not None:
            raise _wrong(name, "is not known to the paper's search; use --solver exact")


def read_offers(flags: Flags, catalogue: Catalogue, figures: Figures, goal: Goal) -> list[Offer]:
    """The cluster's offers. Raises InvalidInput for a goal that they cannot meet by their kind."""
    path = user_path(flags["cluster"])
    try:
        offers = read_cluster(path, catalogue, figures, needs_price=goal.counts_dollars)
    except UnreadableFile as error:
        raise _wrong("cluster", error.message) from None
    if goal.on_demand_share and all(offer.market == "spot" for offer in offers):
        raise _wrong("on_demand_share", f"no offer of {path.name} is on_demand")
    zones = {offer.zone for offer in offers}
    if goal.max_zone_share * len(zones) < 1 - 1e-9:
        raise _wrong(
            "max_zone_share",
            f"{goal.max_zone_share:g} needs at least {math.ceil(1 / (goal.max_zone_share or 1))} "
            f"zones; {path.name} has {_named(zones)}"
            if goal.max_zone_share
            else "must be above 0",
        )
    return offers


def _named(zones: set[str]) -> str:
    """How many zones there are, and which. Offers without a zone are together in one."""
    names = sorted(zones - {""})
    if "" in zones:
        names.append("all offers without a zone, which count as one")
    return f"{len(zones)} ({', '.join(names)})"


def _check_slos(goal: Goal, *, has_penalty: bool) -> None:
    latency = goal.slo_latency_s
    if latency is not None and goal.slo_ttft_s is not None and goal.slo_ttft_s > latency:
        raise _wrong("slo_ttft", f"{goal.slo_ttft_s:g} s lie above --slo-latency {latency:g} s")
    has_slo = any((goal.slo_ttft_s, goal.slo_tpot_s, latency))
    if has_penalty and not has_slo:
        raise _wrong(
            "latency_penalty", "needs one of --slo-ttft, --slo-tpot and --slo-latency to miss"
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _wrong(name: str, message: str) -> InvalidInput:
    return InvalidInput(f"--{name.replace('_', '-')}", message)
