"""The version of Shuntyard, as it was installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("shuntyard")
except PackageNotFoundError:  # run from a folder that was not installed
    VERSION = "0.0.0"
