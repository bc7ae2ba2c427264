"""Bodies of the admin API."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from server.protocol.base import RequestBody
from server.protocol.responses import ResponseBody
from spot.engines.base import Resume
from spot.fleet_records import PipelineState

Weight = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


class _AdminBody(RequestBody):
    """Unknown fields are refused: operators' mistakes should not pass for orders."""

    model_config = ConfigDict(extra="forbid")


class NewPipeline(_AdminBody):
    """One more local engine, or the server at a URL."""

    id: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$",
        description="Its name; without one it gets a number.",
    )
    upstream: str | None = Field(
        default=None,
        max_length=2048,
        description="URL of a vLLM or Shuntyard server with the same model; null for an engine "
        "on this machine.",
    )
    weight: Weight = Field(default=1.0, description="Expected throughput, against the others'.")


class DrainOrder(_AdminBody):
    """How a pipeline leaves."""

    deadline_s: Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)] | None = Field(
        default=120.0,
        description="Seconds until what still runs moves elsewhere; null waits for its end.",
    )
    cause: Literal["drained", "notice"] = Field(
        default="drained", description="notice: the cloud takes the machine at the deadline."
    )


class PipelineChanges(_AdminBody):
    """What can be changed of a pipeline."""

    weight: Weight = Field(description="Expected throughput, against the others'.")


class PipelineCard(ResponseBody):
    """One pipeline. pids: of its processes on this machine, the host first."""

    id: str
    engine: str
    state: PipelineState
    detail: str
    weight: float = Field(gt=0)
    observed_tokens_per_s: float = Field(ge=0)
    running: int = Field(ge=0)
    waiting: int = Field(ge=0)
    seats: int = Field(ge=0)
    resume: Resume
    migrated_in: int = Field(ge=0)
    migrated_out: int = Field(ge=0)
    restarts: int = Field(ge=0)
    pids: list[int]
