"""Reads vLLM's engine flags in a process of its own, since importing vLLM takes seconds and memory.

As a module it prints the parsed flags as JSON: `python -m spot.engines.vllm_compat.flags --flag …`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from spot.errors import EngineMisconfigured, InvalidRequest

_EXIT_UNKNOWN = 3


def read_engine_flags(argv: Sequence[str]) -> dict[str, Any]:
    """What `argv` says, by vLLM's argument names.

    Raises InvalidRequest that names an unknown flag or an impossible value.
    """
    if not argv:
        return {}
    command = [sys.executable, "-m", __name__, *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        parsed: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return parsed
    lines = done.stderr.strip().splitlines() or ["vLLM could not read the engine flags"]
    raise InvalidRequest(lines[-1], code="invalid_flag")


def _main(argv: Sequence[str]) -> int:
    from spot.engines.vllm_compat.environment import apply_default_environment

    apply_default_environment()
    from spot.engines.vllm_compat.engine_args import parse_engine_flags

    try:
        flags = parse_engine_flags(argv)
    except EngineMisconfigured as error:
        print(error.message, file=sys.stderr)
        return _EXIT_UNKNOWN
    print(json.dumps(flags))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
