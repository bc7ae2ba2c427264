"""`python -m server` is the command `shuntyard`."""

from __future__ import annotations

import os
from typing import NoReturn


def run() -> NoReturn:
    """The console script. An interrupt ends it quietly while its parts are still being imported."""
    try:
        from server.cli import run as run_command

        run_command()
    except KeyboardInterrupt:
        os._exit(130)


if __name__ == "__main__":
    run()
