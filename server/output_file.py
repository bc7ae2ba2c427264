"""Files that commands write at the end of long work: whether they can, told before it begins."""

from __future__ import annotations

import os
from pathlib import Path


def why_unwritable(path: Path) -> str:
    """Why no file can be written there; empty where one can."""
    if path.is_dir():
        return f"{path} is a folder, not a file"
    if path.exists() and not path.is_file():
        return f"{path} is no regular file"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{path} cannot be written"
    return ""
