"""`shuntyard calibrate`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from placement.errors import PlacementError, user_path
from server.output_file import why_unwritable

COMMAND = "calibrate"


def add_command(commands: Any) -> None:
    """The command's parser."""
    parser = commands.add_parser(
        COMMAND,
        help="measure this machine for plan and estimate",
        description="Measure each kind of GPU of this machine, or its CPU, and write a hardware "
        "profile: effective TFLOPS and memory bandwidth, links, and how its kernels differ from a "
        "roofline. An idle machine of two cores takes about 65 s, a busy one several minutes, and "
        "its figures may be refused.",
        epilog="Then: shuntyard estimate --hardware hardware.yaml … On a CPU with vLLM, the engine "
        "itself is timed too, over small models with random weights.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        default="hardware.yaml",
        help="where to write the profile (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        metavar="N",
        type=int,
        help="threads of a CPU, as many as the engine will have, at most the machine's CPUs "
        "(default: as torch chooses)",
    )
    parser.add_argument(
        "--no-engine",
        action="store_true",
        help="on a CPU, do not start the engine",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="write the profile even where the measurements contradict each other",
    )


def run(flags: Mapping[str, Any]) -> int:
    """Calibrate. Returns the exit code: 0 fine, 1 failed, 2 wrong usage."""
    output = user_path(flags["output"])
    threads = flags["threads"]
    if threads is not None and threads < 1:
        return _complain("--threads: must be at least 1", 2)
    most = os.cpu_count() or 1
    if threads is not None and threads > most:
        return _complain(f"--threads: must be at most {most}, the CPUs of this machine", 2)
    if reason := why_unwritable(output):
        return _complain(f"--output: {reason}", 2)
    begun = time.monotonic()
    try:
        from placement.calibration.run import calibrate  # imports torch

        with _ending_on_sigterm():
            text = calibrate(
                _say,
                num_threads=threads,
                with_engine=not flags["no_engine"],
                takes_any_fit=flags["force"],
            )
        output.write_text(text, encoding="utf-8")
    except PlacementError as error:
        return _complain(error.message, 1)
    except OSError as error:
        return _complain(f"--output: {error}", 1)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit:
        return 128 + signal.SIGTERM
    _say(f"{output} written after {time.monotonic() - begun:.0f} s")
    return 0


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM inside leaves as SystemExit, so that processes that measure are ended too."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _complain(text: str, code: int) -> int:
    print(f"shuntyard: {text}", file=sys.stderr)
    return code
