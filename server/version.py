"""The version of Shuntyard, as it was installed, and this run of it."""

from __future__ import annotations

import secrets
from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("shuntyard")
except PackageNotFoundError:  # run from a folder that was not installed
    VERSION = "0.0.0"

# By which a server knows itself, should it be told to be its own upstream.
INSTANCE = secrets.token_hex(8)
