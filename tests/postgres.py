"""A real Postgres for tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def data_folder() -> Iterator[Path]:
    """A folder that Postgres can use also where tests run as root, which it does not."""
    folder = Path(tempfile.mkdtemp(prefix="shuntyard-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
