"""The process that measures one device: samples as JSON lines on standard output.

    python -m placement.calibration.worker DEVICE [THREADS]

Lines `{"say": …}` tell people what comes next.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from placement.calibration.samples import sample_json
from placement.calibration.torch_kernels import measure


def main(device: str, num_threads: int | None) -> None:
    import torch

    if num_threads:
        torch.set_num_threads(num_threads)
    for sample in measure(device, lambda text: _write({"say": text})):
        _write(sample_json(sample))


def _write(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
