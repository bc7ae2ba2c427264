"""Which of this machine's GPUs each pipeline gets."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_USUAL_UTILIZATION = 0.9


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The ids of the GPUs that engines may use, as CUDA_VISIBLE_DEVICES wants them."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [item.strip() for item in visible.split(",") if item.strip()]
    return query_gpus("index")


def query_gpus(fields: str) -> list[str]:
    """A line of these fields (comma separated) for each GPU that NVIDIA's driver shows."""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return listed.stdout.strip().splitlines()


@dataclass(slots=True)
class GpuAllotment:
    """Gives each pipeline GPUs of its own, as long as there are any.

    num_each: GPUs of one pipeline: tensor times pipeline parallel size.
    num_pipelines: that are started together. A lone one sees all GPUs, as with vLLM.
    """

    gpus: Sequence[str]
    num_each: int
    num_pipelines: int
    _num_given: int = field(default=0, init=False)

    @property
    def _num_groups(self) -> int:
        return len(self.gpus) // self.num_each

    def next_environment(self) -> dict[str, str]:
        """Variables for the next pipeline's processes. Groups are given in turns."""
        number = self._num_given
        self._num_given += 1
        if not self._num_groups or (self.num_pipelines == 1 and number == 0):
            return {}
        start = number % self._num_groups * self.num_each
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus[start : start + self.num_each])}

    def memory_args(self, engine_args: Mapping[str, Any]) -> dict[str, Any]:
        """What must be said of memory where pipelines share GPUs and the user has not said it."""
        if "gpu_memory_utilization" in engine_args or not self._num_groups:
            return {}
        num_sharing = math.ceil(self.num_pipelines / self._num_groups)
        if num_sharing < 2:
            return {}
        return {"gpu_memory_utilization": round(_USUAL_UTILIZATION / num_sharing, 3)}
