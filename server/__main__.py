"""`python -m server` is the command `shuntyard`."""

from __future__ import annotations

import sys

from server.cli import main

sys.exit(main())
