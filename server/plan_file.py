"""The file that `plan --output` writes and `serve --plan` runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from placement.cluster import Market
from placement.errors import InvalidInput
from placement.model import ModelSpec
from placement.plan import Plan
from placement.regular_file import read_regular_file
from placement.workload import Workload
from server.plan_json import plan_answer, stage_answer

FORMAT = 1
_MOST_BYTES = 1e15
# What vLLM may be told of the model's formats, by its flags.
FORMATS = ("dtype", "quantization", "kv_cache_dtype")


class _Entry(BaseModel):
    """What `serve` needs is checked; what it does not know is for others."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class PlannedStage(_Entry):
    """node: which machine of its pipeline, from 0. tp: its GPUs."""

    shape: str
    gpu: str
    tp: int = Field(ge=1)
    layers: int = Field(ge=1)
    node: int | None = Field(default=None, ge=0)
    weights_bytes: float = Field(default=0.0, ge=0, le=_MOST_BYTES)
    kv_bytes: float = Field(default=0.0, ge=0, le=_MOST_BYTES)


class FileMachine(_Entry):
    """What a machine of a pipeline is rented as. price_usd_per_hour: None if not known."""

    shape: str
    market: Market = "on_demand"
    zone: str = ""
    price_usd_per_hour: float | None = Field(default=None, ge=0)
    interruptions_per_hour: float = Field(default=0.0, ge=0)

    @property
    def kind(self) -> tuple[str, str, str]:
        """As `Offer.kind`."""
        return self.shape, self.market, self.zone


class FilePipeline(_Entry):
    """batch: requests in flight. throughput_rps: expected, in requests per second. machines: by
    `PlannedStage.node`; None in what `plan --json` alone writes."""

    machines: list[FileMachine] | None = None
    stages: list[PlannedStage] = Field(min_length=1)
    batch: int = Field(ge=1)
    throughput_rps: float = Field(gt=0)


class FileModel(_Entry):
    """The planned model. The dimensions tell whether another is served."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None

    def difference(self, model: ModelSpec) -> str | None:
        """How another model is not the planned one, whatever it is called."""
        for name in ("num_layers", "hidden_size", "vocab_size"):
            planned, other = getattr(self, name), getattr(model, name)
            if planned != other:
                return f"it is for {self.name} with {name} {planned}; the model has {other}"
        return None


class PlanFile(_Entry):
    """format: of this file; `plan --json` alone writes none."""

    format: int | None = Field(default=None, ge=FORMAT, le=FORMAT)
    model: FileModel | None = None
    pipelines: list[FilePipeline] = Field(min_length=1)


def write_plan(
    path: Path, plan: Plan, model: ModelSpec, workload: Workload, formats: dict[str, str | None]
) -> None:
    """Write a plan. formats: vLLM's dtype, quantization and kv_cache_dtype, where they were given.

    Raises InvalidInput if the file cannot be written.
    """
    try:
        path.write_text(json.dumps(_content(plan, model, workload, formats), indent=1) + "\n")
    except OSError as error:
        raise InvalidInput("--output", f"{path} cannot be written: {error.strerror}") from None


def read_plan(path: Path) -> PlanFile:
    """The plan at `path`. Raises InvalidInput that names the field."""
    try:
        return PlanFile.model_validate_json(read_regular_file(path))
    except OSError as error:
        raise InvalidInput(str(path), f"cannot be read: {error.strerror}") from None
    except pydantic.ValidationError as failure:
        first = failure.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise InvalidInput(f"{path.name}: {place}" if place else path.name, first["msg"]) from None


def _content(
    plan: Plan, model: ModelSpec, workload: Workload, formats: dict[str, str | None]
) -> dict[str, Any]:
    answer = plan_answer(plan)
    for planned, pipeline in zip(answer["pipelines"], plan.pipelines, strict=True):
        planned["ttft_s"] = pipeline.estimate.ttft_s
        planned["tpot_s"] = pipeline.estimate.tpot_s
        planned["machines"] = [
            {
                "shape": offer.shape.name,
                "market": offer.market,
                "zone": offer.zone,
                "price_usd_per_hour": offer.price_usd_per_hour or None,
                "interruptions_per_hour": offer.interruptions_per_hour,
            }
            for offer in pipeline.offers
        ]
        planned["stages"] = [
            {**stage_answer(one), "node": one.stage.node, "available_bytes": one.available_bytes}
            for one in pipeline.estimate.stages
        ]
    return {
        "format": FORMAT,
        "model": {
            "name": model.name,
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            **{name: value for name, value in formats.items() if value is not None},
        },
        "workload": {
            "name": workload.name,
            "input_tokens": workload.input_tokens,
            "output_tokens": workload.output_tokens,
            "rate_rps": workload.rate_rps,
        },
        "goal": {
            "objective": plan.goal.objective,
            "load_rps": plan.goal.load_rps,
            "slo_ttft_s": plan.goal.slo_ttft_s,
            "slo_tpot_s": plan.goal.slo_tpot_s,
            "slo_latency_s": plan.goal.slo_latency_s,
            "max_price_usd_per_hour": plan.goal.max_price_usd_per_hour,
            "on_demand_share": plan.goal.on_demand_share,
            "max_zone_share": plan.goal.max_zone_share,
        },
        **answer,
    }
