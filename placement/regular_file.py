"""Files of the user, read whole; neither a pipe nor a device can hold the reader up."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 16_000_000


def read_regular_file(path: Path) -> bytes:
    """What the file holds. Raises OSError: also if it is no regular file, or above MAX_BYTES."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MAX_BYTES // 10**6} MB")
    return content


def _open_at_once(path: str, flags: int) -> int:
    """A pipe that nobody writes to would be waited for."""
    return os.open(path, flags | os.O_NONBLOCK)
