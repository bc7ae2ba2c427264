"""`python -m server` is the command `shuntyard`."""

from __future__ import annotations

from server.cli import run

run()
