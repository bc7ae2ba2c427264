"""Measures passes of vLLM on this CPU, for `placement_truth_cpu`: one process per engine.

    python -m benchmarks.engine_passes OUT.jsonl STAGES BATCHxPROMPT...

Writes the notes of `timed_worker`, and one of its own as each case begins and ends.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

from placement.calibration.engine import TimedEngine
from server.demo_model import ensure_demo_model
from spot.engines.vllm_compat.environment import apply_default_environment

OUTPUT_TOKENS = 32
_MAX_TOKENS_PER_PASS = 8192


def main(out: str, stages: int, cases: list[tuple[int, int]]) -> None:
    os.environ.update(
        {
            "SHUNTYARD_PASS_TIMES": out,
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
    )
    apply_default_environment()
    engine = TimedEngine(
        str(ensure_demo_model()),
        max_num_batched_tokens=_MAX_TOKENS_PER_PASS,
        pipeline_parallel_size=stages,
    )
    words = random.Random(4)
    for batch, prompt in [(1, 64), *cases]:
        begun = time.perf_counter()
        engine.generate(batch, prompt, OUTPUT_TOKENS, lambda: words.randrange(1000, 40000))
        note = {
            "what": "case",
            "batch": batch,
            "prompt": prompt,
            "begun_s": begun,
            "wall_s": time.perf_counter() - begun,
        }
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")
        print(f"{batch} x {prompt}: {note['wall_s']:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(
        sys.argv[1],
        int(sys.argv[2]),
        [(int(one.split("x")[0]), int(one.split("x")[1])) for one in sys.argv[3:]],
    )
    sys.stdout.flush()
    os._exit(0)  # vLLM's own end on a CPU takes long, and complains
