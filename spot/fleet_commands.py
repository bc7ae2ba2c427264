"""What the fleet's decisions ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spot.errors import ShuntyardError
from spot.fleet_records import Live

# Why a generation leaves a pipeline before its end: nobody wants it; somebody more urgent wants its
# seat; the pipeline was lost, or is about to be; the pipeline did not take it.
Departure = Literal["cancelled", "preempted", "lost", "moved", "refused"]


@dataclass(frozen=True, slots=True)
class Start:
    """Submit the generation, with its output so far, to this pipeline."""

    live: Live
    pipeline_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Abort the generation's work on this pipeline, of which there may be nothing left."""

    live: Live
    pipeline_id: str
    why: Departure


@dataclass(frozen=True, slots=True)
class Fail:
    """End the generation with this error."""

    live: Live
    error: ShuntyardError


@dataclass(frozen=True, slots=True)
class Kill:
    """The pipeline hangs: end its processes."""

    pipeline_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Retire:
    """The pipeline is gone: stop its engine."""

    pipeline_id: str


Command = Start | Stop | Fail | Kill | Retire
